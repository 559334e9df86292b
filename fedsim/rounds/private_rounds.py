"""Differential privacy in the rounds of a run: clipping and noise, and the numbers that are recorded.

The order in a round is: local update, clipping and noise of the workers, processors, attack (before the processors with
`attack.before_processors`), clipping by the server if an attack or processors may have lengthened updates, sum, noise
of the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fedsim.core.numbers import PositiveFloat
from fedsim.core.randomness import Draws
from fedsim.core.snapshot import CheckpointModel
from fedsim.privacy import clip_update
from fedsim.processes.team import Team
from fedsim.records.round_stats import SentUpdates
from fedsim.rounds.participants import releases_of
from fedsim.training.batches import WorkItems
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask
from fedsim.training.weights import AggregationContext


class PrivacyState(CheckpointModel):
    """State of `PrivateRounds` in a checkpoint."""

    clip: Annotated[PositiveFloat, Field(allow_inf_nan=False)]


class PrivateRounds:
    """Applies the privacy mechanism of an experiment. Without a mechanism, its methods change nothing.

    Args:
        team: processes that compute the run together. All processes must call each method at the same time.
        task: run to compute.
        shared: tensors of the run.

    Attributes:
        mechanism: privacy mechanism.
        clip: maximum norm of an update in the next round.
    """

    def __init__(self, team: Team, task: RunTask, shared: SharedState) -> None:
        self._team, self._task, self._shared = team, task, shared
        self.mechanism = task.experiment.privacy.component
        self.clip = self.mechanism.clip
        self._clip_of_round, self._clipped, self._updates = self.clip, 0, 0
        self._counts = [0, 0]  # clipped updates and all updates of the aggregation that is being prepared
        self._releases = releases_of(task.experiment, shared.data.shards, shared.data.root.numpy())

    def at_workers(self, context: AggregationContext, mine: WorkItems, sent: SentUpdates) -> bool:
        """Clip the updates that this process's workers will send, in place, and add noise if workers add it.

        Returns False: these changes need no further check for NaN. See `UpdateStep` for the arguments.
        """
        if not self.mechanism.active:
            return False
        clipped, round = self._clip(mine, self.clip), context.moment[0]
        if self.mechanism.at_workers:
            std, coordinates = self.mechanism.noise * self.clip, [(round, worker) for worker in mine.workers.tolist()]
            for slot, noise in zip(mine.slots.tolist(), self._noises(std, "local_privacy", coordinates), strict=True):
                self._shared.cohort.rows[slot] += noise
        counts = self._team.gather((int(torch.stack(clipped).sum()) if clipped else 0, len(clipped)))
        self._counts = [sum(column) for column in zip(self._counts, *counts, strict=True)]
        return False

    def as_received(self, context: AggregationContext, mine: WorkItems, sent: SentUpdates) -> bool:
        """Clip the updates that the server has received, in place, and return True; return False if not necessary.

        Clipping is necessary again because attackers do not clip, and processors may lengthen updates. See `UpdateStep`
        for the arguments.
        """
        experiment, round = self._task.experiment, context.moment[0]
        clips = self.mechanism.at_server and not experiment.aggregate.secure
        if clips := clips and bool(experiment.chain or self._task.byzantine.in_round(round)):
            self._clip(mine, self.clip)
        return clips

    def finish(self, round: int) -> Tensor | None:
        """Finish an aggregation: count clipped updates, and compute the maximum norm of the next round.

        Returns the noise [d] that the server adds to the mean of the updates, or None if it adds none.
        """
        experiment, (clipped, updates) = self._task.experiment, self._counts
        self._clip_of_round, self._clipped, self._updates, self._counts = self.clip, clipped, updates, [0, 0]
        cohort = experiment.expected_updates
        if self.mechanism.active:
            self.clip = self.mechanism.next_clip(self.clip, clipped, updates, cohort, experiment.seed, round)
        if not self.mechanism.at_server:
            return None
        std = self.mechanism.noise_of_sum(cohort) * self._clip_of_round / cohort
        return next(self._noises(std, "privacy", [(round,)]))

    def metrics(self, round: int) -> dict[str, float]:
        """Return the numbers to record after `round`, by name: epsilon so far, and numbers about clipping."""
        metrics, privacy = dict[str, float](), self._task.experiment.privacy
        if self._releases is not None and self._releases.noise:
            metrics["epsilon"] = self._releases.epsilon(round, privacy.delta, privacy.accountant)
        if self._updates:
            metrics["clipped_updates"] = self._clipped / self._updates
        if self.mechanism.adapts:
            metrics["clip_norm"] = self._clip_of_round
        return metrics

    def state(self) -> dict[str, Any]:
        """Return the state between two rounds, in JSON types, for a checkpoint."""
        return {"privacy": {"clip": self.clip}} if self.mechanism.active else {}

    def resume(self, metadata: Mapping[str, Any]) -> None:
        """Restore the state that the method `state` has returned."""
        if self.mechanism.active:
            self.clip = PrivacyState.model_validate(metadata["privacy"]).clip

    def _clip(self, mine: WorkItems, max_norm: float) -> list[Tensor]:
        """Clip the updates of the workers `mine` to `max_norm`, in place. Return for each whether it has been scaled.

        Updates are clipped one by one, so that the rounding does not depend on the number of processes.
        """
        return [clip_update(self._shared.cohort.rows[member.slot], max_norm) for member in mine]

    def _noises(self, std: float, purpose: str, coordinates: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Yield Gaussian noise [d] for each of `coordinates`, with zeros for parameters that workers do not send."""
        row = self._shared.server.row
        of_all = Draws.of_all(purpose, coordinates, seed=self._task.experiment.seed, device=row.device)
        for draws, (round, *_) in zip(of_all, coordinates, strict=True):
            noise = draws.normal(len(row), dtype=row.dtype).mul_(std)
            unsent = self._task.unsent_columns(round, len(row))
            if unsent.width:
                unsent.write(noise, noise.new_zeros(unsent.width))
            yield noise
