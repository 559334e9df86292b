"""A pool of P spawn processes, started once, that carry out calls together until the pool is closed.

The parent sends each call down a pipe and waits on the pipes AND on the processes themselves, so a death is noticed
at once, wherever the process was. Small things (what to call, its arguments and results) go through the pipes; what is
large lies in shared memory. The processes among themselves meet at a Barrier.
"""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar

import torch

from fedsim.engines.pool.barrier import (
    ARRIVALS,
    BEATS,
    HOLDING,
    LOCK,
    NOBODY,
    NOTHING,
    PEN,
    ROUND,
    SEVERAL,
    WAITING,
    WORKER,
    AbortedError,
    Barrier,
    DeadlineError,
    HeartbeatTable,
    HeartbeatTimeout,
)
from fedsim.errors import ExperimentError, FedsimError, ProcessLostError, WorkerError
from fedsim.system.child_process import (
    GRACE,
    ChildProcess,
    describe_exit,
    describe_failed_start,
    init_child_process,
    require_importable_main,
    signals_deferred,
)
from fedsim.system.limits import format_failure, require_files
from fedsim.system.messages import Channel, Message, ReceivedMessage

START_TIMEOUT = 120.0  # seconds for a process to import PyTorch and report for work
INSTEAD = "engine=serial, which starts none"
HELD = {
    LOCK: " while it held a lock: what that protects may be half written",
    PEN: " in the middle of a write to the shared model, which may be half written",
}


@dataclass
class ProcessContext:
    """The place of one process in its group; what it calls "mine" follows from `index` and `count`."""

    watched: ClassVar[HeartbeatTable | None] = (
        None  # where somebody looks for signs of life of this process, if it is alone
    )

    index: int
    count: int
    board: HeartbeatTable
    barrier: Barrier
    belongings: dict[str, Any] = field(default_factory=dict)  # what calls leave there for later calls

    @classmethod
    def alone(cls) -> ProcessContext:
        """The context of a process that works without others."""
        board = cls.watched or HeartbeatTable(1)
        board.write(0, WORKER, NOBODY)
        return cls(0, 1, board, Barrier(board, 0, timeout=0.0))

    def heartbeat(self) -> None:
        """Say that work goes on."""
        self.board.heartbeat(self.index)

    @property
    def beats(self) -> int:
        """How often it has said so."""
        return self.board.read(self.index, BEATS)

    @contextlib.contextmanager
    def working_on(self, worker: int, round: int) -> Iterator[None]:
        """Note what is being worked on; the note stays where an exception (or a death) ends the work."""
        self.board.write(self.index, WORKER, worker)
        self.board.write(self.index, ROUND, round)
        yield
        self.board.write(self.index, WORKER, NOBODY)

    @contextlib.contextmanager
    def holding(self, what: int) -> Iterator[None]:
        """Note that a lock, or the pen, is held; the note stays where a death ends that."""
        self.board.write(self.index, HOLDING, what)
        yield
        self.board.write(self.index, HOLDING, NOTHING)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that others are waited for, which is no sign of life. Raises AbortedError when work is called off."""
        self.board.write(self.index, WAITING, 1)
        yield
        self.board.write(self.index, WAITING, 0)
        if self.board.aborted:
            raise AbortedError("called off")

    def working_on_several(self, round: int) -> contextlib.AbstractContextManager[None]:
        """The same for workers that are trained together."""
        return self.working_on(SEVERAL, round)


def worker_in_hand(board: HeartbeatTable, index: int) -> str | None:
    """`worker 3 in round 2`, or `a stack of workers in round 2`, if a process works on any."""
    worker, round = board.read(index, WORKER), board.read(index, ROUND)
    if worker == NOBODY:
        return None
    if worker == SEVERAL:
        return f"a stack of workers in round {round}"
    return f"worker {worker} in round {round}" if round else f"worker {worker}"


def whereabouts(board: HeartbeatTable, index: int) -> str:
    """What a process is doing, as part of a sentence: `working on worker 3 in round 2`."""
    worker, round = worker_in_hand(board, index), board.read(index, ROUND)
    if worker:
        return f"working on {worker}"
    return f"between workers, last in round {round}" if round else "before the first worker"


class ProcessPool:
    """P spawn processes that carry out calls together.

    Args:
        count: number of processes.
        threads: threads that PyTorch uses in each.
        timeout: seconds without a sign of life after which a process counts as hanging.

    The first failure (an exception in a process, its death, its silence) ends the whole pool with one WorkerError, of
    the last two a ProcessLostError. Use it in a `with` block, or call `close`; a pool whose parent dies ends by itself.
    """

    def __init__(self, count: int, threads: int = 1, timeout: float = 300.0) -> None:
        require_importable_main(INSTEAD)
        require_files(count, INSTEAD)
        self.count, self._timeout = count, timeout
        self._board = HeartbeatTable(count)
        self._children: list[ChildProcess] = []
        self._ready = False
        try:
            with signals_deferred():  # children inherit that: Ctrl-C is the parent's business
                for index in range(count):
                    process = index, self._board, threads, timeout
                    self._children.append(ChildProcess(_serve, *process, name=f"fedsim-{index}", daemon=True))
        except BaseException:
            self.close()
            raise

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run `function(process, *arguments)` in every process; the results in order of the processes.

        `function`, `arguments` and results must be picklable (tensors travel by handle); see `fedsim.system.messages`.
        Raises WorkerError if any process fails (ProcessLostError if one is gone, or hangs), or the ExperimentError that
        one raised, and closes the pool.
        """
        if not self.at_work:
            raise WorkerError("the process pool has been closed")
        try:
            if not self._ready:
                self._collect(START_TIMEOUT)  # each process reports for work once
                self._ready = True
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
        """Whether it has not been dismissed, nor ended by a failure."""
        return bool(self._children)

    def close(self) -> None:
        """Dismiss the processes and wait until they are gone.

        One that works stops at its next step; one that does not go in time is killed.
        """
        self._board.abort()
        with signals_deferred():  # half closed would be worse than late
            for child in self._children:
                child.dismiss()
            deadline = time.monotonic() + (GRACE if self._ready else 0.0)
            while self._children:
                self._children.pop().close(deadline)

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self, timeout: float) -> list[Any]:
        """One answer from every process."""
        answers: dict[int, Any] = {}
        silences = [HeartbeatTimeout(self._board, index, timeout) for index in range(self.count)]
        while len(answers) < self.count:
            pending = [index for index in range(self.count) if index not in answers]
            pipes = {self._children[index].pipe: index for index in pending}
            sentinels = {child.sentinel: index for index, child in enumerate(self._children)}
            ready = wait([*pipes, *sentinels], timeout=silences[0].interval)
            for item in ready:
                if item in pipes:
                    answers[pipes[item]] = self._receive(pipes[item])
            for item in ready:
                index = sentinels.get(item)
                # A process whose answer is still in its pipe is asked once more; dead without an answer it has failed.
                if index is not None and (index in answers or not self._children[index].pipe.poll()):
                    raise self._death(index)
            if ProcessContext.watched is not None:
                ProcessContext.watched.heartbeat(0)  # this process answers for the processes of its pool
            waiting_for = [index for index in pending if index not in answers]
            silent = [silences[index].too_long() for index in waiting_for]  # looks at each of them
            if silent and all(silent):
                raise self._silence(waiting_for, timeout)
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
        kind, content = message.load()
        if kind == "result":
            return content
        if kind == "aborted":  # a peer has failed; its own message, or its sentinel, says how
            return None
        if kind == "waited":
            raise self._silence(list(range(self.count)), self._timeout)
        if kind == "refused":
            raise ExperimentError(*content)
        worker = worker_in_hand(self._board, index)
        where = f"process {index}, {whereabouts(self._board, index)}, failed"
        raise WorkerError(f"{f'{worker} failed (process {index})' if worker else where}: {content}")

    def _silence(self, pending: list[int], timeout: float) -> ProcessLostError:
        """All of `pending` are silent, and wait for the one that has come least far, and does not wait itself."""
        index = min(pending, key=lambda each: (self._board.read(each, ARRIVALS), self._board.read(each, WAITING)))
        if not self._ready:
            why = f"has not started within {timeout:g} s"
            return self._lost(index, f"process {index} {why}", why)
        where = worker_in_hand(self._board, index) or whereabouts(self._board, index)
        why = f"has given no sign of life for {timeout:g} s"
        return self._lost(
            index, f"process {index} {why} ({where}); a step that takes longer needs a larger `timeout`", why
        )

    def _death(self, index: int) -> WorkerError:
        child = self._children[index]
        child.wait(GRACE)
        if not self._ready:
            why = describe_failed_start(child.exitcode, INSTEAD)
            line = f"process {index} {why}"
            own_doing = (child.exitcode or 0) > 0  # it could not be imported, and neither could another
            return WorkerError(line) if own_doing else self._lost(index, line, why)
        why = describe_exit(child.exitcode) + HELD.get(self._board.read(index, HOLDING), "")
        return self._lost(index, f"process {index}, {whereabouts(self._board, index)}, {why}", why)

    def _lost(self, index: int, line: str, why: str) -> ProcessLostError:
        worker = self._board.read(index, WORKER)
        return ProcessLostError(line, why, index, self.count, None if worker in (NOBODY, SEVERAL) else worker)


def _serve(pipe: Connection, index: int, board: HeartbeatTable, threads: int, timeout: float) -> None:
    """Run one process of a pool until the pool is closed."""
    init_child_process()
    torch.set_num_threads(threads)
    gc.freeze()  # what is imported by now stays: collections, of which each task's end is one, need not look at it
    process = ProcessContext(
        index, board.count, board, Barrier(board, index, timeout + GRACE)
    )  # the parent speaks up first
    channel = Channel(pipe)
    with contextlib.suppress(EOFError, OSError):  # of the pipe: the parent is gone
        channel.send(("result", None))  # reports for work
        while (message := channel.receive()) is not None:
            channel.send(_answer(process, message))
    if process.belongings:  # after a failure; memory of a device that is in cycles would never be closed
        process.belongings.clear()
        gc.collect()


def _answer(process: ProcessContext, message: ReceivedMessage) -> Message | tuple[str, Any]:
    """Carry out a call, and say what came of it."""
    try:
        function, arguments = message.load()
        return Message(("result", function(process, *arguments)))  # what cannot be pickled is this call's failure too
    except AbortedError:
        return "aborted", None
    except DeadlineError:  # mostly the parent finds that out first
        return "waited", None
    except ExperimentError as error:
        return "refused", error.lines
    except Exception as error:
        return "failed", f"{error}\n{traceback.format_exc()}" if isinstance(error, FedsimError) else format_failure(
            error
        )
