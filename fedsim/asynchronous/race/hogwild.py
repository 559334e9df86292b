"""Races without locks: the parameters of each process's modules are views of one global row in shared memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fedsim.asynchronous.policies.server import Arrival
from fedsim.asynchronous.race.state import WRITES_BEGUN
from fedsim.asynchronous.race.worker import ProcessResult, RaceWorker
from fedsim.asynchronous.server_state import nonfinite_error
from fedsim.core.randomness import global_states
from fedsim.errors import called
from fedsim.processes.process_context import SHARED_ROW
from fedsim.system.devices import synchronize
from fedsim.training.batches import WorkItem
from fedsim.training.gradient_rounds import SyncParticipant
from fedsim.training.sequential import RowTrainer


class HogwildWorker(RaceWorker):
    """Trains some workers in one process of a race (asynchronous training in real time) without locks.

    Each worker computes a gradient at the current global model and immediately changes the global model. Other
    processes may be changing it at the same time.
    """

    def _set_up(self) -> None:
        executor, server = self._executor, self._server
        assert isinstance(executor.trainer, RowTrainer)
        self._trainer = executor.trainer
        self._writes_begun = self._race_state.column(WRITES_BEGUN)
        self._pulls_buffers = server.has_buffers and server.buffers != "local"
        self._pushes_buffers = server.has_buffers and server.buffers != "frozen"

    def _run_round(self, run: int, round: int, result: ProcessResult) -> None:
        for slot in self._slots:
            self._server.begin(slot, slot)
        with self._executor.in_precision():
            participants = self._trainer.begin_gradient_round([WorkItem(slot, slot, round) for slot in self._slots])
            active = [self._steps(participant, result) for participant in participants]
            while active:
                active = [steps for steps in active if next(steps, None) is not None]
            synchronize(self._executor.task.device)

    def _steps(self, participant: SyncParticipant, result: ProcessResult) -> Iterator[int]:
        """Run one worker's round. Yields the step number after each step, so that workers can take turns."""
        slot, round, stats = participant.member.slot, participant.member.round, result.stats
        for step in range(self._executor.batch_source.steps(slot, round)):
            with self._process.working_on(slot, round):
                self._step(participant, step, result)
                if step == 0:  # only once, since seeding takes a tenth of a small step's time
                    after = global_states(self._executor.task.device)
                    self._trainer.seed_layers(participant.member, round, step)
                    participant.draws = global_states(self._executor.task.device) != after
            yield step
        participant.module.store(self._server.shared.cohort.buffers[slot])
        self._server.end(slot, slot)
        stats.loss_sum += participant.loss_sum.item()
        stats.loss_samples += participant.samples

    def _step(self, participant: SyncParticipant, step: int, result: ProcessResult) -> None:
        """Compute a worker's gradient, and pass it to the policy, which changes the global model."""
        server, process, stats, measures = self._server, self._process, result.stats, result.measures
        member, module, ended = participant.member, participant.module, self._writes_ended
        slot, buffers, gradient = member.slot, server.shared.cohort.buffers, server.rows[member.slot]
        unit = int(server.units[slot])
        server.units[slot] += 1
        if self._pulls_buffers:
            buffers[slot] = server.shared.server.buffers
            module.layout.write_buffers(buffers[slot], module.module)
        ended_before = ended.tolist()
        loss = self._trainer.gradient(participant, step)
        synchronize(self._executor.task.device)  # count updates until a GPU has computed the gradient
        measures.overlapped += any(map(int.__gt__, self._writes_begun.tolist(), ended_before))
        if self._pushes_buffers:
            module.layout.read_buffers(module.module, out=buffers[slot])
        staleness = sum(ended.tolist()) - sum(ended_before)
        up, down = self._policy.traffic(unit)
        stats.up += up
        stats.down += down
        stats.results[slot, staleness] += 1
        stats.samples[slot] += participant.batch_size
        if server.nonfinite != "keep" and not math.isfinite(gradient.sum()) and not bool(gradient.isfinite().all()):
            if server.nonfinite == "error":
                raise nonfinite_error(member.round, f"the gradient of worker {called(slot)}")
            stats.excluded.append(slot)
            return
        self._writes_begun[slot] += 1
        with process.holding(SHARED_ROW):
            self._policy.take(server, Arrival(slot, slot, unit, staleness))
            self._race_state.add(slot)
            synchronize(self._executor.task.device)
        ended[slot] += 1
        measures.updates += 1
        participant.count(loss)
