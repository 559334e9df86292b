"""A pool of processes, started once, that carry out calls together until the pool is closed.

The parent sends each call through pipes and waits on the pipes and on the processes themselves, so it notices a death
at once. Functions, arguments and results go through the pipes; large tensors lie in shared memory.
"""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fedsim.engines.pool.process_context import (
    AbortedError,
    Barrier,
    HeartbeatTable,
    HeartbeatTimeout,
    ProcessContext,
)
from fedsim.errors import ExperimentError, FedsimError, ProcessLostError, WorkerError
from fedsim.system.child_process import (
    GRACE,
    Child,
    can_fork,
    describe_exit,
    describe_failed_start,
    init_child_process,
    require_importable_main,
    signals_deferred,
    start_process,
)
from fedsim.system.limits import format_failure, require_files
from fedsim.system.messages import Channel, Message, ReceivedMessage

INSTEAD = "engine=serial, which starts none"
START_TIMEOUT = 120.0  # seconds for a process to import PyTorch and send its first message


class ProcessPool:
    """Processes that carry out calls together. Use it in a `with` block, or call `close`.

    The first failure (an exception in a process, its death, its silence) closes the pool and raises one WorkerError; a
    death or silence raises a ProcessLostError. The processes end if their parent dies.

    Args:
        processes: their number.
        threads: threads that PyTorch uses in each; None: as PyTorch chooses.
        timeout: seconds without a heartbeat after which a process counts as hanging.
        start_method: "fork" forks processes with one thread where that is safe, and spawns others; or "spawn".
        instead: a setting that starts no processes, for errors.
        called: format string for error messages: what a process is called, {} being its index.
        daemon: as in multiprocessing: the processes have no children, and Python ends them at exit.

    Raises WorkerError if the system cannot start so many processes.
    """

    def __init__(
        self,
        processes: int,
        threads: int | None = 1,
        timeout: float = 300.0,
        start_method: str = "fork",
        *,
        instead: str = INSTEAD,
        called: str = "process {}",
        daemon: bool = True,
    ) -> None:
        fork = start_method == "fork" and threads == 1 and can_fork()
        if not fork:
            require_importable_main(instead)
        require_files(processes, instead)
        self.count, self._timeout, self._instead, self._called = processes, timeout, instead, called
        self._table = HeartbeatTable(processes)
        self._children: list[Child] = []
        self._starting = set(range(processes))
        self._answers: dict[int, Any] = {}
        self._message: Message | None = None  # the call, until all processes have started
        self._on_message: Callable[[Any], object] | None = None
        try:
            with signals_deferred():  # child processes inherit the blocked signals: only the parent handles Ctrl-C
                for index in range(processes):
                    self._children.append(
                        start_process(
                            _serve, index, self._table, threads, name=f"fedsim-{index}", daemon=daemon, fork=fork
                        )
                    )
            self.expect_heartbeats(START_TIMEOUT)
        except BaseException:
            self.close()
            raise

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run `function(process, *arguments)` in every process.

        Args:
            function: gets the ProcessContext first. It must be picklable, like arguments and results; tensors in shared
                memory are passed by handle, see `fedsim.system.messages`.

        Returns the results in the order of the processes. Raises WorkerError if a process fails, its subclass
        ProcessLostError if one dies or hangs, or the ExperimentError that one raised; the pool is closed then.
        """
        try:
            self.begin(function, *arguments)
            while (results := self.poll(wait_for([self]))) is None:
                continue
            return results
        except BaseException:
            self.close()
            raise

    def begin(
        self, function: Callable[..., Any], *arguments: Any, on_message: Callable[[Any], object] | None = None
    ) -> None:
        """Begin a call, whose results `poll` returns; `on_message` gets what the function sends meanwhile.

        If this or `poll` raises, the caller closes the pool.
        """
        if not self.at_work:
            raise WorkerError("the process pool has been closed")
        self._answers, self._on_message, self._message = {}, on_message, Message((function, arguments))
        if not self._starting:
            self._send()

    def poll(self, ready: Collection[object]) -> list[Any] | None:
        """Return the results of the call that was begun; None as long as they are not complete.

        Call it after each `wait_for`, whose result is `ready`. Raises what `call` raises.
        """
        for index in self._pending:
            if self._children[index].pipe in ready:
                self._receive(index)
        for index, child in enumerate(self._children):
            # A dead process whose answer is still in its pipe is read first; without an answer it has failed.
            if child.process.sentinel in ready and (index in self._answers or not child.pipe.poll()):
                raise self._death(index)
        if self._message and not self._starting:
            self._send()
        pending = self._pending
        if ProcessContext.monitored is not None:
            ProcessContext.monitored.heartbeat(0)  # the process of a job answers for the processes of its pool
        silent = [self._silences[index].too_long() for index in pending]  # of each, since this measures
        if silent and all(silent):
            raise self._silence(pending)
        return None if pending else [self._answers[index] for index in range(self.count)]

    @property
    def at_work(self) -> bool:
        """Whether the pool takes calls: it was not closed, and no process has failed."""
        return bool(self._children)

    @property
    def has_started(self) -> bool:
        """Whether all processes have started, and have been sent a call."""
        return self._message is None and not self._starting

    def expect_heartbeats(self, timeout: float) -> None:
        """Measure the silence of the processes from now on, with this timeout."""
        self._silent_seconds = timeout
        self._silences = [HeartbeatTimeout(self._table, index, timeout) for index in range(self.count)]

    def close(self) -> None:
        """End the processes; see `close_pools`."""
        close_pools([self])

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _pending(self) -> list[int]:
        """The processes whose first message, or then whose answer, has not come."""
        return sorted(self._starting) or [index for index in range(self.count) if index not in self._answers]

    def _send(self) -> None:
        """Send the call to all processes."""
        for child in self._children:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died, as `poll` finds out
                child.pipe.send(self._message)
        self._message = None
        self.expect_heartbeats(self._timeout)

    def _receive(self, index: int) -> None:
        """Read a message of a process."""
        child = self._children[index]
        try:
            message = child.pipe.receive()
        except (EOFError, ConnectionResetError):
            raise self._death(index) from None
        except OSError:  # the process died while it sent a message, or the system refuses to receive it
            child.process.join(GRACE)
            if child.process.exitcode is None:
                raise
            raise self._death(index) from None
        assert message is not None  # only the parent sends the message that ends a process
        kind, content = message.load()
        if kind == "started":
            self._starting.discard(index)
        elif kind == "message":
            if self._on_message:
                self._on_message(content)
        elif kind in ("result", "aborted"):  # a peer has failed; its own message, or its sentinel, says how
            self._answers[index] = content
        elif kind == "refused":
            raise content
        else:
            worker, name = self._table.worker(index), self._called.format(index)
            where = f"{worker} failed ({name})" if worker else f"{name}, {self._table.activity(index)}, failed"
            raise WorkerError(f"{where}: {content}")

    def _silence(self, pending: list[int]) -> ProcessLostError:
        """Return the error if all of `pending` are silent; it names the one that has crossed the fewest barriers."""
        index = min(pending, key=self._table.progress)
        if index in self._starting:
            return self._lost(index, f"has not started within {self._silent_seconds:g} s")
        where = self._table.worker(index) or self._table.activity(index)
        hint = f" ({where}); a step that takes longer needs a larger `timeout`"
        return self._lost(index, f"has given no sign of life for {self._silent_seconds:g} s", hint=hint)

    def _death(self, index: int) -> WorkerError:
        """Return the error if a process has ended, or closed its pipe."""
        child = self._children[index]
        child.process.join(GRACE)
        if self.has_started:
            why = describe_exit(child.process.exitcode) + self._table.consequence(index)
            return self._lost(index, why, f", {self._table.activity(index)},")
        why = describe_failed_start(child.process.exitcode, self._instead)
        if (
            child.process.exitcode or 0
        ) > 0:  # exited with an error, for example because the main script cannot be imported
            return WorkerError(f"{self._called.format(index)} {why}")
        return self._lost(index, why)

    def _lost(self, index: int, why: str, activity: str = "", hint: str = "") -> ProcessLostError:
        """Return the error for a process that has died or hangs, which is killed: nothing more is expected of it."""
        self._children[index].process.kill()
        line = f"{self._called.format(index)}{activity} {why}{hint}"
        return ProcessLostError(line, why, index, self._table.single_worker(index))


def wait_for(pools: Iterable[ProcessPool]) -> list[Any]:
    """Wait until processes of these pools have sent something or ended, or until their heartbeats are to be looked at.

    Returns what is ready, for `poll`, which is called for each of the pools.
    """
    sources, interval = list[Any](), float("inf")
    for pool in pools:
        sources += [pool._children[index].pipe for index in pool._pending]
        sources += [child.process.sentinel for child in pool._children]
        interval = min(interval, pool._silences[0].interval)
    return wait(sources, timeout=interval)


def close_pools(pools: Collection[ProcessPool], grace: float = GRACE) -> None:
    """End the processes: each stops at its next heartbeat, and is killed if it does not end within `grace` seconds."""
    for pool in pools:
        pool._table.abort()
    with signals_deferred():  # a pool that is half closed would be worse than a late signal
        for pool in pools:
            for child in pool._children:
                with contextlib.suppress(OSError):  # it has ended
                    child.pipe.dismiss()
        deadline = time.monotonic() + grace
        for pool in pools:
            while pool._children:
                child = pool._children.pop()
                child.process.join(0.0 if pool._starting else max(0.0, deadline - time.monotonic()))
                child.process.kill()
                child.process.join()
                child.process.close()
                child.pipe.close()


def _serve(pipe: Connection, index: int, table: HeartbeatTable, threads: int | None) -> None:
    """Run one process of a pool until the pool is closed."""
    init_child_process()
    if threads is not None:
        torch.set_num_threads(threads)
    gc.freeze()  # what is imported by now stays, and collections at the end of each task need not look at it
    channel, barrier = Channel(pipe), Barrier(table, index)
    process = ProcessContext(index, table.count, table, barrier, lambda content: channel.send(("message", content)))
    with contextlib.suppress(EOFError, OSError):  # of the pipe: the parent has ended
        channel.send(("started", None))
        while (message := channel.receive()) is not None:
            channel.send(_answer(process, message))
    if process.state:  # after a failure; memory of a device that is in cycles would never be closed
        process.state.clear()
        gc.collect()


def _answer(process: ProcessContext, message: ReceivedMessage) -> Message | tuple[str, Any]:
    try:
        function, arguments = message.load()
        return Message(("result", function(process, *arguments)))  # a result that cannot be pickled is a failure too
    except AbortedError:
        return "aborted", None
    except ExperimentError as error:
        return "refused", error
    except FedsimError as error:
        return "failed", f"{error}\n{traceback.format_exc()}"
    except Exception as error:
        return "failed", format_failure(error)
