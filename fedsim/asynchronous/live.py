"""Lock-free racing: all modules' parameters are the shared row itself, which is read and written as it changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch

from fedsim.asynchronous.policy import Arrival
from fedsim.asynchronous.racer import Leg, Racer
from fedsim.asynchronous.server import Server
from fedsim.asynchronous.track import BEGUN, Track
from fedsim.engines.barrier import HOLDING, NOTHING, PEN
from fedsim.engines.crew import Seat
from fedsim.engines.dropout import RowDropout
from fedsim.engines.feed import Member
from fedsim.engines.module import RowModule
from fedsim.engines.station import Station
from fedsim.errors import ExperimentError
from fedsim.randomness import global_states, seed_everything
from fedsim.system.devices import synchronize, wide_dtype
from fedsim.training import Objective


class LiveRacer(Racer):
    """Workers who compute gradients of the global row as it is, and let the policy step it, without any lock.

    Each has a module whose parameters are views of the global row, and gradients views of its own row. It goes through
    its round as it would alone; the policy's `pull` and `may_start` are not asked.
    """

    def __init__(self, seat: Seat, station: Station, server: Server, track: Track, slots: Sequence[int]) -> None:
        super().__init__(seat, station, server, track, slots)
        self._begun = track.column(BEGUN)
        self._modules = {slot: RowModule(station.task.new_module) for slot in slots}
        self._objective = Objective(station.task.precision)
        self._dropout = RowDropout(station.task, station.memory, station.feed)
        self._pulls_buffers = server.has_buffers and server.buffers != "local"

    def _go(self, run: int, round: int, leg: Leg) -> None:
        self._station.feed.announce([Member(slot, slot, round) for slot in self._slots])
        with self._station.in_precision():
            active = [self._steps(slot, round, leg) for slot in self._slots]
            while active:
                active = [steps for steps in active if next(steps, None) is not None]
            synchronize(self._station.task.device)

    def _steps(self, slot: int, round: int, leg: Leg) -> Iterator[int]:
        """A worker's round, step by step; gives the number of each."""
        server, memory, feed, worker = self._server, self._station.memory, self._station.feed, slot
        server.begin(slot, worker)
        if self._pulls_buffers:
            memory.buffers[slot] = memory.global_buffers
        module = self._modules[slot]
        module.take(memory.global_row, server.rows[slot], memory.buffers[slot])
        module.module.train()
        step_of = self._stepper(slot, round, module, leg)
        device = self._station.task.device
        loss_sum, samples, loss_samples = torch.zeros((), dtype=wide_dtype(device), device=device), 0, 0
        for step, (inputs, targets) in enumerate(islice(feed.batches(worker, round), feed.steps(worker, round))):
            with self._seat.working_on(worker, round):
                loss = step_of(step, inputs, targets)
            if loss is not None:
                loss_sum.add_(loss, alpha=len(targets))
                loss_samples += len(targets)
            samples += len(targets)
            yield step
        module.give(memory.buffers[slot])
        server.end(slot, worker)
        leg.journal.samples[worker] += samples
        leg.journal.loss_sum += loss_sum.item()
        leg.journal.loss_samples += loss_samples

    def _stepper(self, slot: int, round: int, module: RowModule, leg: Leg) -> Callable[..., torch.Tensor | None]:
        """The function that takes one step of a worker and returns its loss; None if its gradient was left out."""
        server, policy, track, seat, task = self._server, self._policy, self._track, self._seat, self._station.task
        ended, begun, memory, journal, measures = self._ended, self._begun, server.memory, leg.journal, leg.measures
        gradient, objective, model, device = server.rows[slot], self._objective, module.module, task.device
        pulls_buffers = self._pulls_buffers
        gives_buffers = server.has_buffers and server.buffers != "server"
        dropout = self._dropout.of(slot, round)
        draws, may_not_be_finite = True, server.nonfinite != "keep"

        def step_of(step: int, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
            nonlocal draws
            seat.beat()
            unit = int(server.units[slot])
            server.units[slot] += 1
            if pulls_buffers:
                memory.buffers[slot] = memory.global_buffers
                module.layout.write_buffers(memory.buffers[slot], model)
            if draws:  # which the first step of a round finds out
                seed_everything(device, task.seed, "forward", round, slot, step)
                before = global_states(device) if step == 0 else None
            gradient.zero_()
            written = ended.tolist()
            with dropout.at(step, len(targets)):
                loss = objective(model, inputs, targets)
            loss.backward()
            measures.overlapped += any(map(int.__gt__, begun.tolist(), written))
            if step == 0:
                draws = global_states(device) != before
            if gives_buffers:
                module.layout.read_buffers(model, out=memory.buffers[slot])
            staleness = sum(ended.tolist()) - sum(written)
            up, down = policy.traffic(unit)
            journal.up += up
            journal.down += down
            journal.staleness[staleness] += 1
            if may_not_be_finite and not math.isfinite(gradient.sum()) and not bool(gradient.isfinite().all()):
                if server.nonfinite == "error":
                    raise ExperimentError(
                        f"round {round}: the gradient of worker {slot} holds NaN or infinity; "
                        "reduce local.lr, or exclude such work with aggregate.nonfinite=exclude"
                    )
                journal.excluded.append(slot)
                return None
            begun[slot] += 1
            seat.board.write(seat.index, HOLDING, PEN)
            policy.take(server, Arrival(slot, slot, unit, staleness))
            track.add(slot)
            seat.board.write(seat.index, HOLDING, NOTHING)
            ended[slot] += 1
            measures.updates += 1
            return loss.detach()

        return step_of
