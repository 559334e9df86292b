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

from fedsim.core.snapshot import Snapshot
from fedsim.engines.distributed import hook_state
from fedsim.engines.distributed.ddp import ParallelTrainer, model_to_share
from fedsim.engines.distributed.placement import RowPlacement
from fedsim.engines.distributed.preflight import Preflight
from fedsim.engines.distributed.process_group import RankGroup, no_beats
from fedsim.engines.distributed.rank_aggregator import RankAggregator
from fedsim.engines.distributed.rank_worker_states import RankWorkerStates
from fedsim.engines.distributed.rendezvous import RankInfo
from fedsim.engines.distributed.watchdog import TERMINATED
from fedsim.engines.engine import Engine, mean_loss
from fedsim.engines.executor import Executor, MakeTrainer, balance_load
from fedsim.engines.in_process import InProcess
from fedsim.engines.named import one_by_one
from fedsim.engines.pool.process_context import ProcessContext
from fedsim.engines.round_stats import AggregationContext, AggregationStats, SentUpdates
from fedsim.engines.stacking.probe import StackingProbe
from fedsim.engines.stacking.width import stack_width
from fedsim.engines.task import SharedState, TaskSpec
from fedsim.engines.trainers.batches import WorkItem
from fedsim.engines.trainers.stacked import StackTrainer
from fedsim.engines.worker_states import WorkerStates, initial_worker_state
from fedsim.errors import FedsimError, FedsimWarning, WorkerError, one_line


class DistributedEngine(Engine):
    """One rank of those that a launcher has started: `torchrun ... run_experiment.py engine=distributed`.

    Every rank holds the rows of its own members and moves its own columns of the global row; on CPUs and GPUs, on
    one machine or many, by `torch.distributed`. Agrees with the engine `serial` up to rounding.
    """

    ranks = True
    stacks = True
    _backend: InRank
    _agreement: ClassVar[Preflight | None] = None  # of the run that is being prepared

    @classmethod
    def default_processes(cls, device: torch.device, cohort: int, threads: int) -> int:
        return 1

    @classmethod
    def settings(cls, most: int) -> set[str]:
        """`batched` is for distributed.inner = "batched" alone, which no other engine has set."""
        return {"distributed"}

    @classmethod
    def leads(cls) -> bool:
        return RankGroup.joined.first if RankGroup.joined else RankInfo.here().rank == 0

    @classmethod
    def device_for(cls, name: str) -> torch.device:
        assert RankGroup.joined is not None
        return RankGroup.joined.device

    @classmethod
    @contextlib.contextmanager
    def among_peers(cls, description: Mapping[str, Any]) -> Iterator[None]:
        ranks = RankGroup.join(device=description["device"], **_how_to_meet(description["distributed"]))
        cls._agreement = agreement = Preflight(ranks, description)
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
        assert RankGroup.joined is not None
        self._ranks = RankGroup.joined
        super().__init__(InRank(self._ranks, threads), self._trainers_of, threads)

    def allocate(self, task: TaskSpec, cohort: int, *data: Any) -> SharedState:
        self._backend.rows = cohort + task.rule.accepts("root")
        self._model, self._refusal = model_to_share(task, data[0], self._ranks) if task.hook else (None, None)
        return SharedState.allocate(self._settled(task), cohort, *data, ranks=self._ranks.count)

    def begin(self, task: TaskSpec, shared: SharedState) -> None:
        assert self._agreement is not None
        self._task = task = self._settled(task)
        self._agreement.settle(shared.train, shared.test)
        for row in (shared.global_row, shared.global_buffers):  # a model that one machine makes otherwise than another
            self._ranks.broadcast(row, "start")
        super().begin(task, shared)

    def _new_worker_states(self, task: TaskSpec, shared: SharedState) -> WorkerStates:
        placement = self._backend.placement
        return RankWorkerStates(initial_worker_state(task, shared), self._ranks, placement)

    def pull_down(self, cohort: Sequence[int], round: int) -> int:
        self._backend.run(RankExecutor.place, cohort)
        return super().pull_down(cohort, round)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), **self._ranks.facts(), **self._how_gradients_are_averaged()}

    def train_loss(self, samples: Sequence[int]) -> float:
        return mean_loss(self._backend.run(RankExecutor.gather_train_losses)[0], samples)

    def round_rows(self, cohort: Sequence[int], round: int) -> tuple[Tensor, Tensor] | None:
        return self._backend.run(RankExecutor.round_rows, cohort, round)[0]

    def state(self) -> Snapshot:
        state = super().state()
        self._backend.run(RankExecutor.keep_hook, state)
        return state

    def resume(self, state: Snapshot) -> None:
        super().resume(state)
        self._backend.run(RankExecutor.resume_hook, state)

    def _lasting(self) -> dict[str, Tensor]:
        return self._backend.run(RankExecutor.lasting)[0]

    def _remember(self, lasting: dict[str, Tensor], rule: dict[str, Tensor], has_last: bool) -> None:
        self._backend.run(RankExecutor.take_back, lasting)
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
            owner = hook_state.owner_of(name)
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
        super().leave()
        self._model = None

    def _settled(self, task: TaskSpec) -> TaskSpec:
        """The task as it can be done here."""
        return replace(task, hook=None, rows_for=self._refusal) if self._refusal else task

    def _how_gradients_are_averaged(self) -> dict[str, Any]:
        task = self._task
        if not task.gradient_rounds:
            return {}
        if task.hook is None:
            return {"gradients": f"rows of single workers, by the rule: {task.rows_for}"}
        return {"gradients": f"DistributedDataParallel, hook {task.hook.name}"}

    def _trainers_of(
        self, task: TaskSpec, shared: SharedState, processes: int, threads: int
    ) -> tuple[MakeTrainer, dict[str, Any]]:
        if self._model is not None and task.hook is not None:
            return partial(ParallelTrainer, ranks=self._ranks, model=self._model), {}
        if task.inner == "serial":
            return one_by_one(task, shared, processes, threads)
        probe = StackingProbe.of(task, shared)
        width = task.width or max(1, stack_width(task, shared, probe, 1, threads) // self._ranks.neighbours)
        return partial(StackTrainer, width=width, probe=probe), {"width": width}


class InRank(InProcess):
    """The backend of one rank of several: this process, with its share of the rows.

    Attributes:
        rows: how many rows there are in all ranks; to be set before a task begins.
    """

    rows: int

    def __init__(self, ranks: RankGroup, threads: int) -> None:
        super().__init__(threads)
        self._ranks, self.processes = ranks, ranks.count

    def begin(self, task: TaskSpec, shared: SharedState, make_trainer: MakeTrainer) -> None:
        self.shared, self._began = shared, True
        self._executor = RankExecutor(self._ranks, task, shared, self.rows, make_trainer)
        self._process = self._executor.process
        self._ranks.beats = self._executor.seat_beats

    def placement(self) -> RowPlacement:
        """The placement of the current cohort."""
        assert isinstance(self._executor, RankExecutor)
        return self._executor.aggregator.placement

    def _describe_failure(self) -> str:
        worker, index = self._process.table.worker(0), self._ranks.index
        return f"{worker} failed (rank {index})" if worker else f"rank {index} failed"

    def leave(self) -> None:
        if self._began:
            self._ranks.beats = no_beats
        super().leave()


class RankExecutor(Executor):
    """The executor of one rank. Its members' slots are places among the rank's own rows.

    Args:
        n_rows: rows in all ranks.
    """

    aggregator: RankAggregator
    trainer: Any

    def __init__(
        self, ranks: RankGroup, task: TaskSpec, shared: SharedState, n_rows: int, make_trainer: MakeTrainer
    ) -> None:
        self._ranks, self._n_rows = ranks, n_rows
        super().__init__(ProcessContext.alone(), task, shared, make_trainer)

    def seat_beats(self) -> int:
        """How many steps this rank has made."""
        return self.process.heartbeats

    def round_rows(self, cohort: Sequence[int], round: int) -> tuple[Tensor, Tensor] | None:
        """See `Engine`."""
        root = self.aggregator.gather_rows(self._whole_cohort(cohort, round))
        return None if root is None else (root.rows, self.aggregator.losses)

    def lasting(self) -> dict[str, Tensor]:
        """What one round leaves to the next, whole: the states of all columns, put together."""
        return self.aggregator.lasting()

    def take_back(self, lasting: dict[str, Tensor]) -> None:
        """Take this rank's columns of the states; the rest is in place."""
        self.aggregator.take_back(lasting)

    def keep_hook(self, state: Snapshot) -> None:
        """Add the state of the hook to a snapshot; see `hook_state`."""
        if isinstance(self.trainer, ParallelTrainer):
            hook_state.keep(state, self.trainer.hook, self._ranks, whole=self.aggregator.of_gradients)

    def resume_hook(self, state: Snapshot) -> None:
        """Put what the hook keeps to what it was in a state."""
        if isinstance(self.trainer, ParallelTrainer):
            hook_state.resume(state, self.trainer.hook, self._ranks, self.trainer.buckets())

    def _test(self, round: int) -> None:
        """All ranks get the sums of all test batches."""
        self.shared.test_sums.zero_()
        super()._test(round)
        self._ranks.all_reduce(self.shared.test_sums, "test")

    def _new_aggregator(self) -> RankAggregator:
        root_slot = None if self.batch_source.root is None else self._n_rows - 1
        return RankAggregator(self._ranks, self.task, self.shared, self._n_rows, root_slot)

    def _test_batches(self) -> range:
        return range(self._ranks.index, len(self.shared.test_sums), self._ranks.count)

    def _mine(self, cohort: Sequence[int], round: int = 0) -> list[WorkItem]:
        everyone, steps = self._everyone(cohort)
        assignments = balance_load(steps, self._ranks.count, most=-(-len(everyone) // self._ranks.count))
        self.aggregator.placement = RowPlacement(assignments)
        return [WorkItem(row, everyone[slot], round) for row, slot in enumerate(assignments[self._ranks.index])]

    def place(self, cohort: Sequence[int]) -> None:
        """Decide which rank trains which members of a cohort."""
        self._mine(cohort)

    def _total(self, sent: SentUpdates) -> SentUpdates:
        return SentUpdates.total(self._ranks.tell_all(sent))

    def _step_together(
        self, step: int, context: AggregationContext, members: Sequence[WorkItem], sent: SentUpdates
    ) -> AggregationStats:
        if self.task.hook is None:
            return super()._step_together(step, context, members, sent)
        self._count_unprocessed(context, sent)
        aggregator, shares = self.aggregator, self.aggregator.shares(context)
        with self.in_precision():
            mean = self.trainer.mean_gradient(step, aggregator.of_mine(context, shares))
            if self.task.nonfinite != "keep" and not math.isfinite(mean.sum()):
                aggregator.refuse(context, self.trainer.not_finite(step))
        aggregator.move_along(mean)
        return AggregationStats(shares, [])

    def _meet(self) -> None:
        """What the ranks send each other makes them wait for each other."""

    def gather_train_losses(self) -> Tensor:
        """The training losses of all ranks' members, by slot."""
        losses = torch.zeros(self._n_rows, dtype=torch.double)
        assignment = self.aggregator.placement.assignments[self._ranks.index]
        losses[assignment] = self.shared.train_loss[: len(assignment)]
        return self._ranks.all_reduce(losses, "facts")


def _how_to_meet(table: Mapping[str, Any]) -> dict[str, Any]:
    return {"init": table["init"], "backend": table.get("backend"), "timeout": table["timeout"]}


def _tell_of(error: FedsimError, ranks: RankGroup, agreement: Preflight) -> None:
    """Tell the other ranks of an error of this one, in the way in which they will look for it."""
    if not agreement.settled:
        agreement.fail(error)
    elif agreement.reached:
        said = str(error).splitlines()[0]
        ranks.give_up(said if isinstance(error, WorkerError) else f"rank {ranks.index}: {said}")
