"""The engine `distributed`, which trains on ranks started by torchrun, srun or mpirun."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedsim.config.engines import TRAITS
from fedsim.engines.base import Engine
from fedsim.engines.preflight import Preflight
from fedsim.engines.ranks import Ranks, RankWorkerStates
from fedsim.errors import FedsimError, FedsimWarning, WorkerError, first_line
from fedsim.processes.process_group import RankGroup
from fedsim.processes.rendezvous import RankInfo
from fedsim.processes.team import Team
from fedsim.rounds.executor import MakeTrainer
from fedsim.rounds.synchronous_rounds import SynchronousRounds
from fedsim.rounds.worker_states import WorkerStates, initial_worker_state
from fedsim.training.parallel_trainer import ParallelTrainer
from fedsim.training.probe import StackingProbe
from fedsim.training.shared_state import SharedState
from fedsim.training.stacked import StackTrainer, stack_width
from fedsim.training.task import RunTask


class DistributedEngine(Engine):
    """Engine that divides a run among the processes (ranks) that a launcher such as torchrun starts.

        torchrun ... run_experiment.py

    Under a launcher, the engine `auto` is this engine. Each rank trains some of the workers and updates a part of the
    global model. The ranks run on CPUs or GPUs, on one or several machines. Results agree with the engine `serial` up
    to rounding.

    Bytes that P ranks together send in each aggregation of n updates of d numbers, where a number takes s bytes (4 in
    float32), with `sync = "gradients"` in each step:

        mean, weighted_mean                    2 (P - 1) d s
        columnwise rules, such as median       n d s (P - 1) / P + (P - 1) d s
        distance-based rules, such as krum     as columnwise rules, plus 16 (P - 1) n^2
        all other rules, such as fltrust       (n + 1) d s (P - 1) / P + (P - 1) d s
        b Byzantine workers, in addition       (n + b) d s (P - 1) / P

    Losses, buffers and test results add little. Every rank stores n^2 products for distance-based rules, which
    therefore suit cohorts of up to a few thousand workers.
    """

    traits = TRAITS["distributed"]
    _preflight: ClassVar[Preflight | None] = None  # check of the run that is being prepared

    @classmethod
    def is_main(cls) -> bool:
        return RankGroup.joined.first if RankGroup.joined else RankInfo.here().rank == 0

    @classmethod
    def device_for(cls, name: str) -> torch.device:
        assert RankGroup.joined is not None
        return RankGroup.joined.device

    @classmethod
    @contextlib.contextmanager
    def joined(cls, description: Mapping[str, Any]) -> Iterator[None]:
        table = description["distributed"]
        group = RankGroup.join(
            init=table["init_method"],
            backend=table.get("backend"),
            timeout=table["timeout"],
            device=description["device"],
        )
        cls._preflight = preflight = Preflight(group, description)
        group.require_usable()
        with warnings.catch_warnings():
            if not group.first:
                warnings.simplefilter("ignore", FedsimWarning)
            elif group.reason:
                line = f"the ranks exchange tensors with the backend {group.backend}: {group.reason}"
                warnings.warn(line, FedsimWarning, stacklevel=2)
            try:
                yield
            except BaseException as error:
                _report_error(error, group, preflight)
                raise

    def __init__(self, processes: int, threads: int, timeout: float, start_method: str) -> None:
        assert RankGroup.joined is not None
        self._group = RankGroup.joined
        super().__init__(processes, threads, timeout, start_method)

    @property
    def processes(self) -> int:
        return self._group.count

    def new_team(self, task: RunTask) -> Ranks:
        return Ranks(self._group, task, self.shared)

    def new_states(self, task: RunTask, team: Team) -> WorkerStates:
        assert isinstance(team, Ranks)
        initial, limit = initial_worker_state(task, self.shared), task.worker_state_memory
        return RankWorkerStates(initial, team, self._group, limit, task.scratch_folder)

    def allocate(self, task: RunTask, *data: Any) -> SharedState:
        return SharedState.allocate(task, *data, ranks=self._group.count)

    def begin(self, task: RunTask, shared: SharedState) -> None:
        assert self._preflight is not None
        self._task = task
        self._preflight.settle(shared.data.train, shared.data.test)
        server = shared.server
        for row in (server.row, server.buffers, *server.algorithm.values()):  # machines may initialise it differently
            self._group.broadcast(row)
        super().begin(task, shared)

    def metadata(self) -> dict[str, Any]:
        metadata, task = {**super().metadata(), **self._group.metadata()}, self._task
        if task.experiment.gradient_hook is not None:
            metadata["gradients"] = f"averaged during the backward pass, hook {task.experiment.gradient_hook.name}"
        elif task.experiment.rounds_of_gradients:
            metadata["gradients"] = f"stored per worker, because of the rule: {task.experiment.needs_rows}"
        return metadata

    def round_rows(self, cohort: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        return self.run(_gathered_rows, cohort, of="rounds")[0]

    def broadcast(self, value: Any) -> Any:
        return self._group.broadcast_object(value)

    def trainers(self, task: RunTask, shared: SharedState) -> tuple[MakeTrainer, dict[str, Any]]:
        if task.experiment.gradient_hook is not None:
            return partial(ParallelTrainer, ranks=self._group), {}
        if task.experiment.distributed.trainer == "serial":
            return super().trainers(task, shared)
        probe = StackingProbe.of(task, shared)
        width = stack_width(task, shared, probe, self._threads, self._group.sharing)
        if task.device.type != "cpu":  # GPUs may differ, but all ranks divide a wave alike
            width = min(self._group.gather_objects(width))
        return partial(StackTrainer, width=width, probe=probe), {"width": width}


def _report_error(error: BaseException, group: RankGroup, preflight: Preflight) -> None:
    """Tell the other ranks about an error of this rank, so that they end too."""
    if isinstance(error, FedsimError) and not preflight.settled:
        preflight.fail(error)
    elif isinstance(error, WorkerError):
        group.give_up(first_line(error))
    elif preflight.passed or not isinstance(error, FedsimError):
        why = f": {first_line(error)}" if isinstance(error, Exception) else " was terminated"
        group.give_up(f"rank {group.index}{why}")


def _gathered_rows(rounds: SynchronousRounds, cohort: Sequence[int]) -> tuple[Tensor, Tensor] | None:
    rows = rounds.level.aggregator.updates.gathered(range(len(cohort)))
    losses = rounds.team.of_all(rounds.shared.cohort.losses, range(len(cohort)))
    return (rows, losses) if rounds.team.index == 0 else None
