"""The engine `distributed`: the ranks that torchrun, srun or mpirun has started, on one machine or on many."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedsim.data import TensorData
from fedsim.engines import handover
from fedsim.engines.agreement import Agreement
from fedsim.engines.averaging import Account, Meeting
from fedsim.engines.batched import stack_width
from fedsim.engines.collective import RankAveraging
from fedsim.engines.crew import Seat, worker_in_hand
from fedsim.engines.engine import Engine, mean_loss
from fedsim.engines.feed import Member
from fedsim.engines.job import Memory, Task
from fedsim.engines.launch import Place
from fedsim.engines.parallel import ParallelTrainer, SharedModel
from fedsim.engines.ranks import Ranks, no_beats
from fedsim.engines.rehearsal import Rehearsal
from fedsim.engines.seating import Seating
from fedsim.engines.stack_trainer import StackTrainer
from fedsim.engines.station import MakeTrainer, Station, deal
from fedsim.engines.trainer import RowTrainer
from fedsim.engines.vigil import TERMINATED
from fedsim.errors import ExperimentError, FedsimError, FedsimWarning, WorkerError, one_line, show
from fedsim.snapshot import Snapshot
from fedsim.system.limits import lines_of

SAMPLES = 8  # on which it is found out whether copies of a model can share its parameters


class DistributedEngine(Engine):
    """One rank of those that a launcher has started: `torchrun ... run_experiment.py engine=distributed`.

    Every rank holds the rows of its own members and moves its own columns of the global row; on CPUs and cards, on
    one machine or many, by `torch.distributed`. Agrees with the engine `serial` up to rounding.
    """

    ranks = True
    stacks = True
    _agreement: ClassVar[Agreement | None] = None  # of the run that is being prepared

    @classmethod
    def default_processes(cls, device: torch.device, cohort: int, threads: int) -> int:
        return 1

    @classmethod
    def settings(cls, most: int) -> set[str]:
        """`batched` is for distributed.inner = "batched" alone, which no other engine has set."""
        return {"distributed"}

    @classmethod
    def leads(cls) -> bool:
        return Ranks.joined.first if Ranks.joined else Place.here().rank == 0

    @classmethod
    def device_for(cls, name: str) -> torch.device:
        assert Ranks.joined is not None
        return Ranks.joined.device

    @classmethod
    @contextlib.contextmanager
    def among_peers(cls, description: Mapping[str, Any]) -> Iterator[None]:
        ranks = Ranks.join(device=description["device"], **_how_to_meet(description["distributed"]))
        cls._agreement = agreement = Agreement(ranks, description)
        with ranks.at_work(), warnings.catch_warnings():
            if not ranks.first:
                warnings.simplefilter("ignore", FedsimWarning)
            elif ranks.reason:
                warnings.warn(f"rows travel by {ranks.backend}: {ranks.reason}", FedsimWarning, stacklevel=2)
            try:
                yield
            except FedsimError as error:
                _tell_of(error, ranks, agreement)
                raise
            except KeyboardInterrupt:
                ranks.give_up(TERMINATED)
                raise
            except BaseException as error:
                cause = None if isinstance(error, Exception) else ranks.cause()
                if cause is None or cause == TERMINATED:
                    ranks.give_up(one_line(error) if isinstance(error, Exception) else TERMINATED)
                    raise
                raise WorkerError(ranks.give_up(cause)) from None  # a launcher ends all, where one has ended

    def __init__(self, processes: int, threads: int, timeout: float) -> None:
        assert Ranks.joined is not None
        self._ranks, self._threads = Ranks.joined, threads
        self._threads_before = torch.get_num_threads()
        self._station: RankStation | None = None
        self._width = 0
        torch.set_num_threads(threads)

    def allocate(self, task: Task, cohort: int, *data: Any) -> Memory:
        self._seats = cohort + task.rule.takes("root")
        self._model, self._refusal = _model_to_share(task, data[0], self._ranks) if task.hook else (None, None)
        return Memory.allocate(self._settled(task), cohort, *data, ranks=self._ranks.count)

    def begin(self, task: Task, memory: Memory) -> None:
        assert self._agreement is not None
        self._task = task = self._settled(task)
        self._agreement.settle(memory.train, memory.test)
        self.memory = memory
        ranks = self._ranks
        for row in (memory.global_row, memory.global_buffers):  # a model that one machine makes otherwise than another
            ranks.broadcast(row, "start")
        self._station = RankStation(ranks, task, memory, self._seats, self._trainer(task, memory))
        ranks.beats = self._station.seat_beats

    def facts(self) -> dict[str, Any]:
        width = {"width": self._width} if self._width else {}
        return {"processes": self._ranks.count, **self._ranks.facts(), **width, **self._how_gradients_are_averaged()}

    def train_loss(self, samples: Sequence[int]) -> float:
        assert self._station is not None
        return mean_loss(self._station.train_losses, samples)

    def round_rows(self, cohort: Sequence[int], round: int) -> tuple[Tensor, Tensor] | None:
        return self._each("round_rows", cohort, round)[0]

    def state(self) -> Snapshot:
        state = super().state()
        self._each("keep_hook", state)
        return state

    def resume(self, state: Snapshot) -> None:
        super().resume(state)
        self._each("resume_hook", state)

    def _lasting(self) -> dict[str, Tensor]:
        return self._each("lasting")[0]

    def _remember(self, lasting: dict[str, Tensor], rule: dict[str, Tensor], has_last: bool) -> None:
        self._each("take_back", lasting)
        super()._remember(lasting, rule, has_last)

    def spread(self, found: tuple[int, Snapshot] | None) -> tuple[int, Snapshot] | None:
        ranks = self._ranks
        said = found and (found[0], found[1].facts, {name: (t.shape, t.dtype) for name, t in found[1].tensors.items()})
        said = ranks.hear_first(said)
        if said is None:
            return None
        round, facts, forms = said
        tensors = {
            name: found[1].tensors[name] if found and ranks.first else torch.empty(shape, dtype=dtype)
            for name, (shape, dtype) in forms.items()
        }
        for name, tensor in tensors.items():
            owner = handover.owner_of(name)
            if tensor.numel() and owner is None:
                ranks.broadcast(tensor, "checkpoint")
            elif tensor.numel() and owner is not None and owner < ranks.count:
                ranks.send_from_first(tensor, owner, "checkpoint")
        return round, Snapshot(tensors, facts)

    def broadcast(self, value: Any) -> Any:
        return self._ranks.hear_first(value)

    def agree(self, due: bool) -> bool:
        return bool(self._ranks.broadcast(torch.tensor([float(due)]), "checkpoint")[0])

    def leave(self) -> None:
        if self._station is not None:
            self._station, self._model, self._ranks.beats = None, None, no_beats
            del self.memory

    def close(self) -> None:
        self.leave()
        torch.set_num_threads(self._threads_before)

    def _settled(self, task: Task) -> Task:
        """The task as it can be done here."""
        return replace(task, hook=None, rows_for=self._refusal) if self._refusal else task

    def _how_gradients_are_averaged(self) -> dict[str, Any]:
        task = self._task
        if not task.gradient_rounds:
            return {}
        if task.hook is None:
            return {"gradients": f"rows of single workers, by the rule: {task.rows_for}"}
        return {"gradients": f"DistributedDataParallel, hook {task.hook.name}"}

    def _trainer(self, task: Task, memory: Memory) -> MakeTrainer:
        if self._model is not None and task.hook is not None:
            return partial(ParallelTrainer, ranks=self._ranks, model=self._model)
        if task.inner == "serial":
            return RowTrainer
        rehearsal = Rehearsal.of(task, memory)
        width = task.width or stack_width(task, memory, rehearsal, 1, self._threads)
        self._width = max(1, width // self._ranks.neighbours) if task.width is None else width
        return partial(StackTrainer, width=self._width, rehearsal=rehearsal)

    def _each(self, method: str, *arguments: object) -> list[Any]:
        station, ranks = self._station, self._ranks
        assert station is not None
        try:
            return [station.do(method, *arguments)]
        except FedsimError:
            raise
        except Exception as error:
            worker = worker_in_hand(station.seat.board, 0)
            where = f"{worker} failed (rank {ranks.index})" if worker else f"rank {ranks.index} failed"
            raise WorkerError(f"{where}: {lines_of(error)}") from error


class RankStation(Station):
    """A station of one rank. Its members' slots are places among the rank's own rows.

    Args:
        seats: rows in all ranks.
    """

    averaging: RankAveraging
    trainer: Any

    def __init__(self, ranks: Ranks, task: Task, memory: Memory, seats: int, make_trainer: MakeTrainer) -> None:
        self._ranks, self._seats = ranks, seats
        self.train_losses = torch.zeros(seats, dtype=torch.double)  # of all
        super().__init__(Seat.alone(), task, memory, make_trainer)

    def seat_beats(self) -> int:
        """How many steps this rank has made."""
        return self.seat.beats

    def round_rows(self, cohort: Sequence[int], round: int) -> tuple[Tensor, Tensor] | None:
        """See `Engine`."""
        collector = self.averaging.gather_rows(self._whole_cohort(cohort, round))
        return None if collector is None else (collector.rows, self.averaging.losses)

    def lasting(self) -> dict[str, Tensor]:
        """What one round leaves to the next, whole: the states of all columns, put together."""
        return self.averaging.lasting()

    def take_back(self, lasting: dict[str, Tensor]) -> None:
        """Take this rank's columns of the states; the rest is in place."""
        self.averaging.take_back(lasting)

    def keep_hook(self, state: Snapshot) -> None:
        """Add what the hook keeps to a state; see `handover`."""
        if isinstance(self.trainer, ParallelTrainer):
            handover.keep(state, self.trainer.hook, self._ranks, whole=self.averaging.of_gradients)

    def resume_hook(self, state: Snapshot) -> None:
        """Put what the hook keeps to what it was in a state."""
        if isinstance(self.trainer, ParallelTrainer):
            handover.resume(state, self.trainer.hook, self._ranks, self.trainer.buckets())

    def test(self, round: int) -> None:
        """Test the global model on this rank's share of the test batches; all ranks get the sums of all."""
        self.memory.test_sums.zero_()
        super().test(round)
        self._ranks.all_reduce(self.memory.test_sums, "test")

    def _new_averaging(self) -> RankAveraging:
        root_slot = None if self.feed.root is None else self._seats - 1
        return RankAveraging(self._ranks, self.task, self.memory, self._seats, root_slot)

    def _test_batches(self) -> range:
        return range(self._ranks.index, len(self.memory.test_sums), self._ranks.count)

    def _mine(self, cohort: Sequence[int], round: int = 0) -> list[Member]:
        everyone, steps = self._everyone(cohort)
        hands = deal(steps, self._ranks.count, most=-(-len(everyone) // self._ranks.count))
        self.averaging.seating = Seating(hands)
        return [Member(row, everyone[slot], round) for row, slot in enumerate(hands[self._ranks.index])]

    def _step_together(self, step: int, meeting: Meeting) -> Account:
        if self.task.hook is None:
            return super()._step_together(step, meeting)
        averaging, shares = self.averaging, self.averaging.shares(meeting)
        with self.in_precision():
            mean = self.trainer.mean_gradient(step, averaging.of_mine(meeting, shares))
            if self.task.nonfinite != "keep" and not math.isfinite(mean.sum()):
                averaging.refuse(meeting, self.trainer.not_finite(step))
        averaging.move_along(mean)
        return Account(shares, [])

    def _meet(self) -> None:
        """What the ranks send each other makes them wait for each other."""

    def _combine_buffers(self, meeting: Meeting, account: Account) -> None:
        self.averaging.combine_buffers(meeting, account.excluded or ())
        losses = torch.zeros(self._seats, dtype=torch.double)
        hand = self.averaging.seating.hands[self._ranks.index]
        losses[hand] = self.memory.train_loss[: len(hand)]
        self.train_losses = self._ranks.all_reduce(losses, "facts")


def _model_to_share(task: Task, train: TensorData, ranks: Ranks) -> tuple[SharedModel | None, str | None]:
    """The model for DistributedDataParallel, or why it cannot have that; then ranks average rows of single workers.

    Raises ExperimentError where those would not give what the hook gives.
    """
    assert task.hook is not None
    model, refusal = None, None
    if not ranks.sums_where_rows_lie:
        refusal = f"{ranks.backend} sums no tensors of {ranks.device.type}"
    else:
        model = SharedModel(task.new_module)
        samples = train.to(task.device, task.dtype).gather(torch.arange(min(SAMPLES, len(train))))
        refusal = model.refusal(task, *samples)
    if refusal and not task.hook.exact:
        raise ExperimentError(f"distributed.hook = {show(task.hook.name)}: {refusal}")
    return (None, refusal) if refusal else (model, None)


def _how_to_meet(table: Mapping[str, Any]) -> dict[str, Any]:
    return {"init": table["init"], "backend": table.get("backend"), "timeout": table["timeout"]}


def _tell_of(error: FedsimError, ranks: Ranks, agreement: Agreement) -> None:
    """Tell the other ranks of an error of this one, in the way in which they will look for it."""
    if not agreement.settled:
        agreement.fail(error)
    elif agreement.reached:
        said = str(error).splitlines()[0]
        ranks.give_up(said if isinstance(error, WorkerError) else f"rank {ranks.index}: {said}")
