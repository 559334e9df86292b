"""Races without locks: the parameters of all modules are the shared row itself, which other processes change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from fedsim.asynchronous.dispatch import nonfinite_error
from fedsim.asynchronous.policy import Arrival
from fedsim.asynchronous.race.state import WRITES_BEGUN
from fedsim.asynchronous.race.worker import ProcessResult, RaceWorker
from fedsim.core.randomness import global_states, seed_everything
from fedsim.core.rows import clip_rows
from fedsim.engines.pool.process_context import SHARED_ROW
from fedsim.engines.trainers.batches import WorkItem
from fedsim.engines.trainers.dropout import RowDropout
from fedsim.engines.trainers.row_module import RowModule
from fedsim.system.devices import synchronize, wide_dtype


class HogwildWorker(RaceWorker):
    """Workers that compute gradients at the live global row, and let the policy step it without a lock.

    Each worker has a module whose parameters are views of the global row, and whose gradients are views of its own row.
    """

    def _set_up(self) -> None:
        executor, server = self._executor, self._server
        self._writes_begun = self._race_state.column(WRITES_BEGUN)
        self._dropout = RowDropout(executor.task, executor.shared, executor.batch_source)
        self._modules = {slot: RowModule(self._dropout.new_module) for slot in self._slots}
        self._objective = executor.task.objective
        self._pulls_buffers = server.has_buffers and server.buffers != "local"
        self._pushes_buffers = server.has_buffers and server.buffers != "server"

    def _run_round(self, run: int, round: int, result: ProcessResult) -> None:
        self._executor.batch_source.announce([WorkItem(slot, slot, round) for slot in self._slots])
        with self._executor.in_precision():
            active = [self._steps(slot, round, result) for slot in self._slots]
            while active:
                active = [steps for steps in active if next(steps, None) is not None]
            synchronize(self._executor.task.device)

    def _steps(self, slot: int, round: int, result: ProcessResult) -> Iterator[int]:
        """A worker's round, one step at a time; yields the number of each."""
        server, executor, stats, module = self._server, self._executor, result.stats, self._modules[slot]
        task, shared, batches, device = executor.task, executor.shared, executor.batch_source, executor.task.device
        server.begin(slot, slot)
        if self._pulls_buffers:
            shared.cohort.buffers[slot] = shared.server.buffers
        module.load(shared.server.row, server.rows[slot], shared.cohort.buffers[slot])
        module.module.train()
        loss_sum, loss_samples = torch.zeros((), dtype=wide_dtype(device), device=device), 0
        dropout = self._dropout.of(slot, round)
        draws = True  # whether the model draws from the global generators; the first step finds out
        for step, (inputs, targets) in enumerate(islice(batches.batches(slot, round), batches.steps(slot, round))):
            self._process.heartbeat()
            with self._process.working_on(slot, round), dropout.at(step, len(targets)):
                if draws:
                    seed_everything(device, task.experiment.seed, "forward", round, slot, step)
                    before = global_states(device) if step == 0 else None
                loss = self._step(slot, round, module, inputs, targets, result)
                if step == 0:
                    draws = global_states(device) != before
            if loss is not None:
                loss_sum.add_(loss, alpha=len(targets))
                loss_samples += len(targets)
            stats.samples[slot] += len(targets)
            yield step
        module.store(shared.cohort.buffers[slot])
        server.end(slot, slot)
        stats.loss_sum += loss_sum.item()
        stats.loss_samples += loss_samples

    def _step(
        self, slot: int, round: int, module: RowModule, inputs: Tensor, targets: Tensor, result: ProcessResult
    ) -> Tensor | None:
        """One step of a worker: its loss, or None if its gradient was excluded."""
        server, process, stats, measures = self._server, self._process, result.stats, result.measures
        shared, ended, gradient = server.shared, self._writes_ended, server.rows[slot]
        unit = int(server.units[slot])
        server.units[slot] += 1
        if self._pulls_buffers:
            shared.cohort.buffers[slot] = shared.server.buffers
            module.layout.write_buffers(shared.cohort.buffers[slot], module.module)
        gradient.zero_()
        ended_before = ended.tolist()
        loss = self._objective(module.module, inputs, targets)
        loss.backward()
        measures.overlapped += any(map(int.__gt__, self._writes_begun.tolist(), ended_before))
        if self._pushes_buffers:
            module.layout.read_buffers(module.module, out=shared.cohort.buffers[slot])
        staleness = sum(ended.tolist()) - sum(ended_before)
        up, down = self._policy.traffic(unit)
        stats.up += up
        stats.down += down
        stats.staleness[staleness] += 1
        if server.nonfinite != "keep" and not math.isfinite(gradient.sum()) and not bool(gradient.isfinite().all()):
            if server.nonfinite == "error":
                raise nonfinite_error(round, f"the gradient of worker {slot}")
            stats.excluded.append(slot)
            return None
        clip_rows(gradient, self._executor.task.experiment.local.clip_norm)
        self._writes_begun[slot] += 1
        with process.holding(SHARED_ROW):
            self._policy.take(server, Arrival(slot, slot, unit, staleness))
            self._race_state.add(slot)
        ended[slot] += 1
        measures.updates += 1
        return loss.detach()
