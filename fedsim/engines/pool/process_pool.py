"""A pool of spawn processes, started once, that carry out calls together until the pool is closed.

The parent sends each call through pipes and waits on the pipes and on the processes themselves, so it notices a death
at once. Functions, arguments and results go through the pipes; large tensors lie in shared memory.
"""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fedsim.engines.pool.barrier import (
    ARRIVALS,
    NO_WORKER,
    SEVERAL_WORKERS,
    WAITING,
    WORKER,
    AbortedError,
    Barrier,
    DeadlineError,
    HeartbeatTable,
)
from fedsim.engines.pool.process_context import ProcessContext
from fedsim.engines.pool.worker_process import START_TIMEOUT, WorkerProcess
from fedsim.errors import ExperimentError, FedsimError, ProcessLostError, WorkerError
from fedsim.system.child_process import GRACE, init_child_process, require_importable_main, signals_deferred
from fedsim.system.limits import format_failure, require_files
from fedsim.system.messages import Channel, Message, ReceivedMessage

INSTEAD = "engine=serial, which starts none"


class ProcessPool:
    """Spawn processes that carry out calls together. Use it in a `with` block, or call `close`.

    The first failure (an exception in a process, its death, its silence) closes the pool and raises one WorkerError; a
    death or silence raises a ProcessLostError. The processes end if their parent dies.

    Args:
        count: number of processes.
        threads: threads that PyTorch uses in each.
        timeout: seconds without a heartbeat after which a process counts as hanging.

    Raises WorkerError if the system cannot start so many processes.
    """

    def __init__(self, count: int, threads: int = 1, timeout: float = 300.0) -> None:
        require_importable_main(INSTEAD)
        require_files(count, INSTEAD)
        self.count, self._timeout = count, timeout
        self._table = HeartbeatTable(count)
        self._children: list[WorkerProcess] = []
        try:
            with signals_deferred():  # child processes inherit the blocked signals: only the parent handles Ctrl-C
                for index in range(count):
                    self._children.append(self._start(index, threads))
        except BaseException:
            self.close()
            raise

    def _start(self, index: int, threads: int) -> WorkerProcess:
        return WorkerProcess(
            *(_serve, index, self._table, threads, self._timeout),
            table=self._table,
            index=index,
            instead=INSTEAD,
            name=f"fedsim-{index}",
            daemon=True,
        )

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run `function(process, *arguments)` in every process.

        Args:
            function: gets the ProcessContext first. It must be picklable, like arguments and results; tensors in shared
                memory are passed by handle, see `fedsim.system.messages`.

        Returns the results in the order of the processes. Raises WorkerError if a process fails, its subclass
        ProcessLostError if one dies or hangs, or the ExperimentError that one raised; the pool is closed then.
        """
        if not self.at_work:
            raise WorkerError("the process pool has been closed")
        try:
            if not self._children[0].started:
                self._collect(START_TIMEOUT)
                for child in self._children:
                    child.started = True
            message = Message((function, arguments))
            for index, child in enumerate(self._children):
                try:
                    child.pipe.send(message)
                except (BrokenPipeError, ConnectionResetError):
                    raise self._death(index) from None
            return self._collect(self._timeout)
        except BaseException:
            self.close()
            raise

    @property
    def at_work(self) -> bool:
        """Whether the pool takes calls: it was not closed, and no process has failed."""
        return bool(self._children)

    def close(self) -> None:
        """End the processes: each stops at its next heartbeat, and is killed if it does not end in time."""
        self._table.abort()
        with signals_deferred():  # a pool that is half closed would be worse than a late signal
            for child in self._children:
                child.dismiss()
            deadline = time.monotonic() + (GRACE if self._children and self._children[0].started else 0.0)
            while self._children:
                self._children.pop().close(deadline)

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self, timeout: float) -> list[Any]:
        """Wait for one answer from every process."""
        answers: dict[int, Any] = {}
        children = self._children
        for child in children:
            child.expect_heartbeats(timeout)
        while len(answers) < self.count:
            pending = [index for index in range(self.count) if index not in answers]
            pipes = {children[index].pipe: index for index in pending}
            sentinels = {child.sentinel: index for index, child in enumerate(children)}
            waited: list[Any] = [*pipes, *sentinels]
            ready: list[Any] = wait(waited, timeout=children[0].look_interval)
            for item in ready:
                if item in pipes:
                    answers[pipes[item]] = self._receive(pipes[item])
            for item in ready:
                index = sentinels.get(item)
                # A dead process whose answer is still in its pipe is read first; without an answer it has failed.
                if index is not None and (index in answers or not children[index].pipe.poll()):
                    raise self._death(index)
            if ProcessContext.monitored is not None:
                ProcessContext.monitored.heartbeat(0)  # the process of a job answers for the processes of its pool
            waiting_for = [index for index in pending if index not in answers]
            silent = [children[index].is_silent() for index in waiting_for]  # of each, since this measures
            if silent and all(silent):
                raise self._silence(waiting_for)
        return [answers[index] for index in range(self.count)]

    def _receive(self, index: int) -> Any:
        child = self._children[index]
        try:
            message = child.pipe.receive()
        except (EOFError, ConnectionResetError):
            raise self._death(index) from None
        except OSError:  # the process died while it sent a message, or the system refuses to receive it
            child.wait(GRACE)
            if child.exitcode is None:
                raise
            raise self._death(index) from None
        assert message is not None  # only the parent sends the message that ends a process
        kind, content = message.load()
        if kind == "result":
            return content
        if kind == "aborted":  # a peer has failed; its own message, or its sentinel, says how
            return None
        if kind == "waited":
            raise self._silence(list(range(self.count)))
        if kind == "refused":
            raise content
        worker = self._table.worker(index)
        where = f"{worker} failed (process {index})" if worker else f"{self._named(index)}, failed"
        raise WorkerError(f"{where}: {content}")

    def _named(self, index: int) -> str:
        return f"process {index}, {self._table.activity(index)}"

    def _silence(self, pending: list[int]) -> ProcessLostError:
        """The error if all of `pending` are silent; it names the one that has crossed the fewest barriers."""
        index = min(pending, key=lambda each: (self._table.read(each, ARRIVALS), self._table.read(each, WAITING)))
        why = self._children[index].describe_silence()
        if not self._children[index].started:
            return self._lost(index, f"process {index} {why}", why)
        where = self._table.worker(index) or self._table.activity(index)
        hint = "a step that takes longer needs a larger `timeout`"
        return self._lost(index, f"process {index} {why} ({where}); {hint}", why)

    def _death(self, index: int) -> WorkerError:
        child = self._children[index]
        why = child.describe_death()
        if child.started:
            return self._lost(index, f"{self._named(index)}, {why}", why)
        line = f"process {index} {why}"
        return WorkerError(line) if child.failed_at_start else self._lost(index, line, why)

    def _lost(self, index: int, line: str, why: str) -> ProcessLostError:
        worker = self._table.read(index, WORKER)
        known = None if worker in (NO_WORKER, SEVERAL_WORKERS) else worker
        return ProcessLostError(line, why, index, known)


def _serve(pipe: Connection, index: int, table: HeartbeatTable, threads: int, timeout: float) -> None:
    """Run one process of a pool until the pool is closed."""
    init_child_process()
    torch.set_num_threads(threads)
    gc.freeze()  # what is imported by now stays, and collections at the end of each task need not look at it
    barrier = Barrier(table, index, timeout + GRACE)  # the parent notices a silent process first
    process = ProcessContext(index, table.count, table, barrier)
    channel = Channel(pipe)
    with contextlib.suppress(EOFError, OSError):  # of the pipe: the parent has ended
        channel.send(("result", None))
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
    except DeadlineError:  # mostly the parent notices first
        return "waited", None
    except ExperimentError as error:
        return "refused", error
    except FedsimError as error:
        return "failed", f"{error}\n{traceback.format_exc()}"
    except Exception as error:
        return "failed", format_failure(error)
