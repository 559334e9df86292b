"""Process pool in which every process executes every call.

The parent sends each call through pipes. It then waits for the pipes and for the processes themselves, and thus notices
the death of a process at once. Functions, arguments and results go through the pipes. Large tensors are in shared
memory.
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

from fedsim.errors import ExperimentError, FedsimError, ProcessLostError, WorkerError
from fedsim.processes.child_process import (
    GRACE,
    Child,
    describe_exit,
    describe_failed_start,
    forks,
    init_child_process,
    require_importable_main,
    signals_deferred,
    start_process,
)
from fedsim.processes.messages import Channel, Message, ReceivedMessage
from fedsim.processes.process_context import AbortedError, HeartbeatTable, HeartbeatTimeout, ProcessContext
from fedsim.system.limits import format_failure, require_files

INSTEAD = "engine=serial, which starts no processes"
START_TIMEOUT = 120.0  # seconds for a process to import PyTorch and send its first message


class ProcessPool:
    """Pool of processes that all execute the same call. Use it in a `with` block, or call `close`.

    If a process fails, the pool is closed and WorkerError is raised. If the process died or hangs, the error is the
    subclass ProcessLostError.

    Args:
        processes: number of processes.
        threads: number of threads that PyTorch uses in each process; None for PyTorch's default.
        timeout: seconds without a heartbeat after which a process counts as hanging.
        start_method: how processes start: "auto", "fork" or "spawn", as in `forks`.
        instead: alternative that error messages recommend, such as a setting that starts no processes.
        called: format string that names a process in error messages, such as "process {}", where {} is its index.
        daemon: as in multiprocessing: the processes cannot have children, and Python terminates them at exit.

    Attributes:
        count: number of processes.
        start_method: how the processes were really started, "spawn" or "fork".

    Raises WorkerError if the system cannot start so many processes, and ExperimentError if they cannot be forked safely
    with start_method="fork".
    """

    def __init__(
        self,
        processes: int,
        threads: int | None = 1,
        timeout: float = 300.0,
        start_method: str = "auto",
        *,
        instead: str = INSTEAD,
        called: str = "process {}",
        daemon: bool = True,
    ) -> None:
        fork = forks(start_method, threads)
        if not fork:
            require_importable_main(instead)
        require_files(processes, instead)
        self.count, self._timeout, self._instead, self._called = processes, timeout, instead, called
        self.start_method = "fork" if fork else "spawn"
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
        """Call `function(process, *arguments)` in every process, and return one result per process.

        Args:
            function: picklable function, whose first argument is the ProcessContext.
            arguments: picklable arguments.

        Raises WorkerError if a process fails, or the ExperimentError that a process raised. The pool is then closed.
        """
        try:
            self.begin(function, *arguments)
            while (results := self.poll(wait_for([self]))) is None:
                continue
            return results
        except BaseException:
            self.close()
            raise

    def prepare(self, function: Callable[..., object], *arguments: Any) -> None:
        """Let every process call `function(process, *arguments)` before its next call, and return at once.

        Results and errors are ignored. The pickled arguments must be small: they fill the pipe until the process, which
        may still be starting, reads them.
        """
        message = Message((False, function, arguments))
        for child in self._children:
            with contextlib.suppress(OSError):  # the process died; the next call reports it
                child.pipe.send(message)

    def begin(
        self, function: Callable[..., Any], *arguments: Any, on_message: Callable[[Any], object] | None = None
    ) -> None:
        """Start a call without waiting for its results, which `poll` returns.

        Args:
            function: picklable function that every process calls as `function(process, *arguments)`, where `process`
                is its ProcessContext.
            arguments: picklable arguments.
            on_message: function that is called with each object that a process sends by `ProcessContext.send`.

        If this method or `poll` raises an error, the caller must close the pool.
        """
        if not self.at_work:
            raise WorkerError("the process pool has been closed; create a new one")
        self._answers, self._on_message, self._message = {}, on_message, Message((True, function, arguments))
        if not self._starting:
            self._send()

    def poll(self, ready: Collection[object]) -> list[Any] | None:
        """Return the results of the call started by `begin`; None if they are not complete yet.

        Args:
            ready: result of `wait_for`.

        Raises the same errors as `call`.
        """
        for index in self._pending:
            if self._children[index].pipe in ready:
                self._receive(index)
        for index, child in enumerate(self._children):
            # If a dead process has left an answer in its pipe, the answer is read first. Otherwise it has failed.
            if child.process.sentinel in ready and (index in self._answers or not child.pipe.poll()):
                raise self._death(index)
        if self._message and not self._starting:
            self._send()
        pending = self._pending
        if ProcessContext.monitored is not None:
            ProcessContext.monitored.heartbeat(0)  # a comparison's job sends heartbeats while it waits for its pool
        silent = [self._silences[index].too_long() for index in pending]  # all must be called: each call measures
        if silent and all(silent):
            raise self._silence(pending)
        return None if pending else [self._answers[index] for index in range(self.count)]

    @property
    def at_work(self) -> bool:
        """Whether the pool accepts calls: it is not closed, and no process has failed."""
        return bool(self._children)

    @property
    def has_started(self) -> bool:
        """Whether all processes have started."""
        return self._message is None and not self._starting

    def expect_heartbeats(self, timeout: float) -> None:
        """Restart the timers: from now on, a process without a heartbeat for `timeout` seconds counts as hanging."""
        self._silent_seconds = timeout
        self._silences = [HeartbeatTimeout(self._table, index, timeout) for index in range(self.count)]

    def forget(self) -> None:
        """Stop keeping the CUDA tensors that earlier calls sent to the processes.

        Their memory may then be freed, so call this when no process uses them.
        """
        for child in self._children:
            child.pipe.forget()

    def close(self) -> None:
        """Stop the processes of this pool."""
        close_pools([self])

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _pending(self) -> list[int]:
        """Indices of the processes from which an answer is still expected."""
        return sorted(self._starting) or [index for index in range(self.count) if index not in self._answers]

    def _send(self) -> None:
        """Send the current call to all processes."""
        for child in self._children:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the process died; `poll` reports it
                child.pipe.send(self._message)
        self._message = None
        self.expect_heartbeats(self._timeout)

    def _receive(self, index: int) -> None:
        """Read and handle one message of process `index`."""
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
        elif kind in ("result", "aborted"):  # after "aborted", the process that failed reports the error
            self._answers[index] = content
        elif kind == "refused":
            raise content
        else:
            worker, name = self._table.worker(index), self._called.format(index)
            where = f"{worker} failed ({name})" if worker else f"{name}, {self._table.activity(index)}, failed"
            raise WorkerError(f"{where}: {content}")

    def _silence(self, pending: list[int]) -> ProcessLostError:
        """Return the error to raise if the processes `pending` have all stopped sending heartbeats."""
        index = min(pending, key=self._table.progress)
        if index in self._starting:
            return self._lost(index, f"has not started within {self._silent_seconds:g} s")
        where = self._table.worker(index) or self._table.activity(index)
        hint = f" ({where}); if a step takes longer, increase `process_timeout`"
        return self._lost(index, f"has sent no heartbeat for {self._silent_seconds:g} s", hint=hint)

    def _death(self, index: int) -> WorkerError:
        """Return the error to raise if process `index` has ended."""
        child = self._children[index]
        child.process.join(GRACE)
        if self.has_started:
            why = describe_exit(child.process.exitcode) + self._table.consequence(index)
            return self._lost(index, why, f", {self._table.activity(index)},")
        why = describe_failed_start(child.process.exitcode, self._instead)
        # exited with an error, for example because the main script cannot be imported
        if (child.process.exitcode or 0) > 0:
            return WorkerError(f"{self._called.format(index)} {why}")
        return self._lost(index, why)

    def _lost(self, index: int, why: str, activity: str = "", hint: str = "") -> ProcessLostError:
        """Kill process `index`, which has died or hangs, and return the error to raise.

        Args:
            index: index of the process.
            why: what happened, such as "was killed by SIGKILL".
            activity: text that says what the process was doing.
            hint: text at the end of the message.
        """
        self._children[index].process.kill()
        line = f"{self._called.format(index)}{activity} {why}{hint}"
        return ProcessLostError(line, why, index, self._table.single_worker(index))


def wait_for(pools: Iterable[ProcessPool]) -> list[Any]:
    """Wait until a process of the pools sends a message or ends, or until it is time to check the heartbeats.

    Returns a list that the caller passes to the method `poll` of each pool.
    """
    sources, interval = list[Any](), float("inf")
    for pool in pools:
        sources += [pool._children[index].pipe for index in pool._pending]
        sources += [child.process.sentinel for child in pool._children]
        interval = min(interval, pool._silences[0].interval)
    return wait(sources, timeout=interval)


def close_pools(pools: Collection[ProcessPool], grace: float = GRACE) -> None:
    """Stop the processes of `pools`. Processes that do not end within `grace` seconds are killed."""
    for pool in pools:
        pool._table.abort()
    with signals_deferred():  # signals wait until the pool is completely closed
        for pool in pools:
            for child in pool._children:
                with contextlib.suppress(OSError):  # the process has already exited
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
    """Main function of a process in a pool: execute calls and send their results until the pool is closed."""
    init_child_process()
    if threads is not None:
        torch.set_num_threads(threads)
    gc.freeze()  # excludes all imported modules from later garbage collections
    channel = Channel(pipe)
    process = ProcessContext(index, table, lambda content: channel.send(("message", content)))
    with contextlib.suppress(EOFError, OSError):  # errors of the pipe: the parent has exited
        channel.send(("started", None))
        while (message := channel.receive()) is not None:
            if (answer := _answer(process, message)) is not None:
                channel.send(answer)
    if process.state:  # after a failure; otherwise device memory in reference cycles would never be released
        process.state.clear()
        gc.collect()


def _answer(process: ProcessContext, message: ReceivedMessage) -> Message | tuple[str, Any] | None:
    """Call the function in a message. Return the answer for the parent, or None if the parent expects no answer."""
    answer: Message | tuple[str, Any]
    expected = True
    try:
        expected, function, arguments = message.load()
        answer = Message(("result", function(process, *arguments)))  # raises if the result cannot be pickled
    except AbortedError:
        answer = "aborted", None
    except ExperimentError as error:
        answer = "refused", error
    except FedsimError as error:
        answer = "failed", f"{error}\n{traceback.format_exc()}"
    except Exception as error:
        answer = "failed", format_failure(error)
    return answer if expected else None
