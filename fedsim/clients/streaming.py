"""Streaming: workers keep their own models, of which one fragment after another is synchronized (Streaming DiLoCo).

    [local]
    algorithm = "adamw"
    keep_optimizer_state = true
    steps = 10                                            # H / P steps between two synchronizations
    fragments = { count = 3, delay = 5, mixing = 0.5 }    # P, tau, alpha

Each worker has a model of its own, which starts as the initial global model. In round r it takes `steps` steps, and
sends only the update of fragment p = (r - 1) mod P: its parameters of this fragment minus the global ones. The server
aggregates these updates, and its optimizer moves only this fragment of the global model. A worker receives the new
fragment during round r + 1: after `delay` steps it replaces its own parameters x of the fragment by
mixing x + (1 - mixing) (global parameters). So sending and receiving may take as long as `delay` steps, in which the
worker trains on. It sends the fragment again in round r + P.

All other steps between training and aggregation (processors, attacks, clipping, noise) see the sent fragment only.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.clients.adapters import KeptState, only_optimizes
from fedsim.clients.algorithm import ClientAlgorithm, GradientAt, WorkerRound
from fedsim.clients.base import OuterProductGrad, State
from fedsim.clients.schedule import Schedule
from fedsim.core.rows import ColumnSpans, Entry, Layout
from fedsim.errors import ExperimentError, called

OWN, GLOBAL, ARRIVING, LEFT = (f"fragments.{name}" for name in ("own", "global", "arriving", "left"))


class Streamed(ClientAlgorithm):
    """Client algorithm whose workers keep their own models and synchronize them in fragments (Douillard et al. 2025).

    It wraps another client algorithm, and is used if `local.fragments` is set. `fedsim.clients.streaming` describes a
    round. The mixture is that of MaxText (`communication_overlapping_alpha`) and torchft (`fragment_update_alpha`), and
    as in torchft, updates are relative to the global fragment of the previous synchronization.

    Args:
        algorithm: client algorithm without other states or messages, such as `adamw`, or a `KeptState` of it.
        count: number of fragments, each of whole parameter tensors that follow each other.
        delay: number of steps after which a new fragment arrives, at most those of a round.
        mixing: weight of the worker's own parameters when a fragment arrives, 0 <= mixing < 1.

    Raises ExperimentError for other client algorithms, or if the model has fewer parameter tensors than fragments.

    Cost: that of `algorithm`, two more passes over the row per round, and one state tensor [d]. Each worker keeps its
    model [d], and sends and receives one fragment in each round.

    >>> algorithm = fedsim.clients.Streamed(fedsim.clients.SGD(lr=0.1), count=2)
    >>> layout = fedsim.core.rows.Layout.of(torch.nn.Linear(3, 2))
    >>> [[entry.name for entry in fragment] for fragment in algorithm.fragments(layout)]
    [['weight'], ['bias']]
    """

    setting = "local.fragments"

    def __init__(self, algorithm: ClientAlgorithm, count: int, delay: int = 0, mixing: float = 0.0) -> None:
        if not only_optimizes(algorithm.algorithm if isinstance(algorithm, KeptState) else algorithm):
            raise ExperimentError("local.fragments: only works with client algorithms such as sgd and adamw; omit it")
        self.count, self.delay, self.mixing, self._columns = count, delay, mixing, list[ColumnSpans]()
        self._set(algorithm)

    def _set(self, algorithm: ClientAlgorithm) -> None:
        self.algorithm = algorithm
        self.element_wise = algorithm.element_wise and not self.delay  # type: ignore[misc]
        self.sample_noise = algorithm.sample_noise  # type: ignore[misc]
        self.gradients_per_step = algorithm.gradients_per_step  # type: ignore[misc]

    def _of(self, algorithm: ClientAlgorithm, **changes: Any) -> ClientAlgorithm:
        changed = self._copy(**changes)
        changed._set(algorithm)  # type: ignore[attr-defined]
        return changed

    def for_model(self, module: nn.Module) -> ClientAlgorithm:
        columns = [ColumnSpans.of_entries(fragment) for fragment in self.fragments(Layout.of(module))]
        return self._of(self.algorithm.for_model(module), _columns=columns)

    def having(self, **values: Any) -> ClientAlgorithm:
        return self._of(self.algorithm.having(**values))

    def fragments(self, layout: Layout) -> list[list[Entry]]:
        entries = layout.parameters
        if self.count > len(entries):
            raise ExperimentError(
                f"local.fragments.count = {self.count}: the model has {len(entries)} parameter tensors; use at most "
                f"{len(entries)}"
            )
        sums, ends = [0, *accumulate(entry.shape.numel() for entry in entries)], [0]
        for number in range(1, self.count):
            possible = range(ends[-1] + 1, len(entries) - self.count + number + 1)
            ends.append(min(possible, key=lambda end: abs(sums[end] - layout.d * number / self.count)))
        return [list(entries[a:b]) for a, b in zip(ends, [*ends[1:], len(entries)], strict=True)]

    def fragment_at(self, round: int) -> int:
        return (round - 1) % self.count

    def check_work(self, schedule: Schedule, sizes: Mapping[int, int]) -> None:
        for worker, size in sizes.items():
            steps = schedule.local_steps(schedule.shortest(worker).steps_for(size))
            if size and steps < self.delay:
                raise ExperimentError(
                    f"local.fragments.delay = {self.delay}: must be at most the number of steps in a round, which is "
                    f"{steps} for worker {called(worker)}; use delay = {steps}, or more local.steps"
                )

    def worker_state(self, row: Tensor) -> State:
        return {OWN: row.clone(), **self.algorithm.worker_state(row)}

    def start(self, rows: Tensor) -> State:
        return {**self.algorithm.start(rows), GLOBAL: rows.clone(), **self._numbers(rows)}

    def _numbers(self, rows: Tensor) -> State:
        """Return, for each worker, the number of the arriving fragment, and of the steps until it arrives."""
        return {name: torch.zeros_like(rows[..., :1], dtype=torch.int64) for name in (ARRIVING, LEFT) if self.delay}

    def start_round(self, rows: Tensor, worker: WorkerRound) -> State:
        received, round = rows.clone(), self._round(worker)
        arrives = round > 1 and not worker.only_tested  # a test trains the global model
        if not worker.only_tested:
            rows.copy_(worker.kept[OWN])
        if arrives and not self.delay:
            self._arrive(rows, received, self.fragment_at(round - 1))
        state = {**self.algorithm.start_round(rows, worker), GLOBAL: received, **self._numbers(rows)}
        if arrives and self.delay:
            state[ARRIVING] += self.fragment_at(round - 1)
            state[LEFT] += self.delay
        return state

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        self.algorithm.step(rows, gradients, state)

    def step_fused(self, rows: Tensor, product: OuterProductGrad, state: State) -> None:
        self.algorithm.step_fused(rows, product, state)

    def step_rows(self, rows: Tensor, gradients: Tensor, state: State, gradient_at: GradientAt) -> None:
        if self.algorithm.element_wise:
            self.algorithm.step(rows, gradients, state)
        else:
            self.algorithm.step_rows(rows, gradients, state, gradient_at)
        if self.delay:
            state[LEFT] -= 1
            self._arrive_at(rows, state, state[LEFT] == 0)

    def finish(self, rows: Tensor, state: State, worker: WorkerRound) -> State:
        if self.delay:  # workers without samples take no steps
            self._arrive_at(rows, state, state[LEFT] > 0)
        self.algorithm.finish(rows, state, worker)
        worker.kept[OWN] = rows.clone()
        fragment = self._columns[self.fragment_at(self._round(worker))]
        sent = fragment.of(rows)
        rows.copy_(state[GLOBAL])
        fragment.write(rows, sent)
        return {}

    def _round(self, worker: WorkerRound) -> int:
        return int(worker.numbers.rounds[0])  # the same for all workers that are trained together

    def _arrive_at(self, rows: Tensor, state: State, due: Tensor) -> None:
        """Give the workers for which `due` [..., 1] is true the fragment that arrives in their round."""
        if bool(due.any()):
            mixed = rows.clone()
            self._arrive(mixed, state[GLOBAL], int(state[ARRIVING].max()))
            rows.copy_(torch.where(due, mixed, rows))

    def _arrive(self, rows: Tensor, received: Tensor, number: int) -> None:
        """Mix fragment `number` of the global model into the models `rows` [..., d], in place."""
        for start, stop in self._columns[number].spans:
            own, new = rows[..., start:stop], received[..., start:stop]
            own.copy_(torch.lerp(new, own, self.mixing))

    def __repr__(self) -> str:
        return f"Streamed({self.algorithm!r}, {self.count}, {self.delay}, {self.mixing})"
