"""Loop over synchronous rounds, in the main process. Each round is one call to all processes of the engine."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from fedsim.core.snapshot import Snapshot
from fedsim.engines import Engine, RunTask
from fedsim.errors import FedsimWarning, show
from fedsim.records.record import RoundRecord
from fedsim.records.worker_results import WorkerResults
from fedsim.rounds.private_rounds import PrivacyState
from fedsim.rounds.round_clock import RoundClockState
from fedsim.rounds.synchronous_rounds import SynchronousRounds
from fedsim.runs.loops.loop import Loop


class SynchronousLoop(Loop):
    """Runs the rounds of a synchronous experiment.

    Args:
        task: description of the run.
        engine: engine that is ready for the first round.
    """

    def __init__(self, task: RunTask, engine: Engine) -> None:
        self._task, self._engine = task, engine
        self._warned = False

    def run_round(self, round: int) -> RoundRecord:
        finished = self._engine.run(SynchronousRounds.run_round, round, of="rounds")[0]
        assert finished is not None
        record, results = finished
        self._engine.states.saved_elsewhere(record.cohort, record.excluded)
        self._warn_of_attack_without_honest_rows(record)
        self.tests = results or self.tests
        return record

    def test_workers(self, round: int) -> WorkerResults | None:
        results = self._engine.run(SynchronousRounds.test_workers, round, of="rounds")[0]
        self.tests = results or self.tests
        return results

    def state(self) -> Snapshot:
        metadata, rule, columns = self._engine.run(SynchronousRounds.state, of="rounds")[0]
        state = Snapshot(metadata=metadata)
        state.keep(self._engine.shared.state_dict() | columns)
        state.keep({name: torch.from_numpy(array) for name, array in rule.items()}, "rule.")
        state.keep(self._engine.states.tensors(), "worker_state.")
        return state

    def resume(self, state: Snapshot) -> None:
        engine, metadata = self._engine, state.metadata
        known = metadata["syncs"] in (list(engine.shared.server.states), ["gradients"])
        if type(metadata["has_last"]) is not bool or not known:
            raise ValueError("`has_last` or `syncs` has an unexpected value")
        if self._task.experiment.mode == "clock":
            RoundClockState.model_validate(metadata["clock"])  # validated here, because an error would close a pool
        if self._task.experiment.privacy.component.active:
            PrivacyState.model_validate(metadata["privacy"])
        later = tuple(f"{sync}." for sync in engine.shared.server.states if sync not in metadata["syncs"])
        columns = engine.run(SynchronousRounds.state, of="rounds")[0][
            2
        ]  # with ranks, tensors of the right shapes to fill in
        tensors = engine.shared.state_dict() | columns
        state.put_back({name: tensor for name, tensor in tensors.items() if not name.startswith(later)})
        engine.states.resume(state.under("worker_state."))
        rule = {name: tensor.numpy() for name, tensor in state.under("rule.").items()}
        engine.run(SynchronousRounds.resume, metadata, rule, columns, engine.states.workers, of="rounds")

    def _warn_of_attack_without_honest_rows(self, record: RoundRecord) -> None:
        """Warn once if an attack needs honest updates, but all workers of a round are Byzantine."""
        task, attack = self._task, self._task.experiment.attack.component
        byzantine = task.byzantine.in_round(record.round)
        if self._warned or not record.cohort or not byzantine or not attack.needs_honest:
            return
        workers = np.array(record.cohort)
        aggregations = np.ones_like(workers)
        if task.sync_in(record.round) == "gradients":
            sizes = self._engine.shared.data.shards.sizes(workers)
            aggregations = task.schedule.of(workers, np.full_like(workers, record.round)).steps_for(sizes)
        honest = aggregations[~np.isin(workers, list(byzantine))]
        if aggregations.max() > honest.max(initial=0):
            self._warned = True
            where = "worker has data left in the last steps" if len(honest) else "worker is in the cohort"
            warnings.warn(
                f"round {record.round}: no honest {where}, but attack.name = {show(attack.name)} is computed from "
                "honest updates; whenever this happens, the Byzantine workers send their trained updates unchanged",
                FedsimWarning,
                stacklevel=3,
            )
