"""Virtual clock of synchronous rounds, and the simulated delays of an experiment."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedsim.config.experiment import Experiment
from fedsim.core.snapshot import CheckpointModel, Counts, Seconds
from fedsim.delays import Delays
from fedsim.errors import ExperimentError
from fedsim.records.record import TimelineRecord
from fedsim.records.round_stats import SentUpdates
from fedsim.server import Cohort
from fedsim.training.batches import WorkItems
from fedsim.training.memory import buffer_bytes, personal_bytes
from fedsim.training.shared_state import SharedState, message_bytes
from fedsim.training.task import RunTask


def delays_of(experiment: Experiment, attackers: Collection[int] = ()) -> Delays:
    """Return the simulated delays of workers and network, from the settings `clock.*` and `attack.slowdown`.

    `attackers` are the Byzantine workers of all rounds.
    """
    clock, chosen = experiment.clock, experiment.attack.slowdown
    slowdowns, noise = clock.slowdown.component(experiment.workers, experiment.seed), clock.noise.component
    if chosen is not None:
        byzantine = np.zeros(experiment.workers, dtype=bool)
        byzantine[sorted(attackers)] = True
        of_others = slowdowns[~byzantine]
        bounds = {"fastest": of_others.min(), "slowest": of_others.max()}
        slowdowns = np.where(byzantine, bounds[chosen] if isinstance(chosen, str) else chosen, slowdowns)
    return Delays(slowdowns, noise, experiment.seed, clock.step_seconds, clock.latency, clock.bandwidth)


class RoundClockState(CheckpointModel):
    """State of a `RoundClock` in a checkpoint."""

    now: Seconds
    started: Counts


class RoundClock:
    """Virtual clock of synchronous rounds, in which the server waits for the slowest worker.

    Args:
        delays: delays of workers and network.
        row_bytes: bytes of the global parameters that a worker receives for each gradient.
        buffer_bytes: bytes of the buffers that a worker receives, and also sends.
        message_bytes: bytes that a worker receives and sends per round in addition to parameters and buffers.

    Attributes:
        now: virtual seconds since the start of the run.
    """

    def __init__(self, delays: Delays, row_bytes: int = 0, buffer_bytes: int = 0, message_bytes: int = 0) -> None:
        self._delays = delays
        self._row_bytes, self._buffer_bytes, self._message_bytes = row_bytes, buffer_bytes, message_bytes
        self._started: Counter[int] = Counter()  # number of started rounds or steps, by worker
        self.now: float = 0.0
        self._start_timeline()

    def require_workers(self, cohort: Cohort, strategy: Any, round: int) -> None:
        """Raise ExperimentError if an empty cohort would be drawn again and again, because no time passes.

        Args:
            cohort: workers of the round, none of which sends an update.
            strategy: cohort strategy that has drawn them.
            round: number of the round.
        """
        if not cohort.dropped and "now" in strategy.accepts:
            raise ExperimentError(
                f"round {round}: no worker is available at {self.now:g} virtual seconds, and the virtual clock "
                "does not advance without work; make workers available in sampling.*, or use mode=rounds, which skips "
                "such rounds"
            )

    def finish_round(self, task: RunTask, work: WorkItems, sent: SentUpdates, received: int) -> None:
        """Advance the virtual time by a round in which the workers have done `work` and `sent` updates.

        See `pass_round`. The fragments of `local.fragments` are sent and received during `delay` steps.
        """
        batches = task.schedule.of(work.workers, work.rounds).batches_of_all(work.sizes)
        columns = zip(work.workers.tolist(), work.steps.tolist(), batches.tolist(), strict=True)
        gradients = {worker: task.algorithm.gradients(steps, count) for worker, steps, count in columns}
        overlapped = task.experiment.local.fragments.delay * task.algorithm.gradients_per_step
        self.pass_round(gradients, sent.sizes(), received, overlapped)

    def finish_steps(self, sent: SentUpdates) -> None:
        """Advance the virtual time by a round in which the workers have `sent` gradients. See `pass_steps`."""
        self.pass_steps(sent.sizes())

    def pass_round(
        self, gradients: Mapping[int, int], sent: Mapping[int, Sequence[int]], received: int = 0, overlapped: float = 0
    ) -> None:
        """Advance the virtual time by one round, after which each worker sends an update.

        Args:
            gradients: number of gradients that each worker of the cohort computes, by worker ID.
            sent: bytes of each worker's updates after compression, by worker ID.
            received: bytes of the parameters that each worker receives.
            overlapped: number of gradients that each worker computes while it communicates.
        """
        self._start_timeline()
        received += self._message_bytes + 2 * self._buffer_bytes
        self._pass({worker: (count, received + sum(sent[worker]), overlapped) for worker, count in gradients.items()})

    def pass_steps(self, sent: Mapping[int, Sequence[int]]) -> None:
        """Advance the virtual time by one round in which the workers wait for each other after each gradient.

        Each worker receives the buffers before its first step, and sends them after its last step.

        Args:
            sent: bytes of each worker's gradients after compression, one number per step, by worker ID.
        """
        self._start_timeline()
        for step in range(max(map(len, sent.values()), default=0)):
            work = {}
            for worker, sizes in sent.items():
                if step < len(sizes):
                    ends = (step == 0) + (step == len(sizes) - 1)
                    work[worker] = (1, self._row_bytes + ends * self._buffer_bytes + sizes[step])
            self._pass(work)

    def timeline(self, workers: Iterable[int], excluded: Iterable[int]) -> TimelineRecord | None:
        """Return how the `workers` spent the last round, of which the results of `excluded` workers were not used."""
        training = {worker: self._training[worker] for worker in workers}
        waiting = {worker: self._length - seconds for worker, seconds in training.items()}
        dropped = Counter(excluded)
        results = {(worker, 0): self._sent[worker] for worker in training}
        return TimelineRecord.of(training, waiting, results, dropped, dropped)

    def state(self) -> dict[str, Any]:
        """Return the state of the clock between two rounds, in JSON types, for a checkpoint."""
        return {"clock": {"now": self.now, "started": sorted(self._started.items())}}

    def resume(self, metadata: Mapping[str, Any]) -> None:
        """Set the clock to a state that the method `state` has returned."""
        saved = RoundClockState.model_validate(metadata["clock"])
        self.now, self._started = saved.now, Counter(dict(saved.started))

    def _pass(self, work: Mapping[int, tuple[float, ...]]) -> None:
        """Advance the virtual time until the slowest worker has computed and sent its gradients.

        Args:
            work: arguments `gradients`, `bytes` and `overlapped` of `Delays.seconds`, by worker ID.
        """
        longest = 0.0
        for worker, amounts in work.items():
            seconds = self._delays.seconds(worker, self._started[worker], *amounts)
            self._training[worker] += seconds
            longest = max(longest, seconds)
        self._started.update(work.keys())
        self._sent.update(work.keys())
        self.now += longest
        self._length += longest

    def _start_timeline(self) -> None:
        self._length = 0.0  # of the round
        self._training: defaultdict[int, float] = defaultdict(float)  # seconds in the round, by worker
        self._sent: Counter[int] = Counter()  # results in the round, by worker


class NoClock:
    """Clock of a run without virtual time, whose methods do nothing."""

    now = None

    def require_workers(self, cohort: Cohort, strategy: Any, round: int) -> None: ...

    def finish_round(self, task: RunTask, work: WorkItems, sent: SentUpdates, received: int) -> None: ...

    def finish_steps(self, sent: SentUpdates) -> None: ...

    def timeline(self, workers: Iterable[int], excluded: Iterable[int]) -> TimelineRecord | None:
        return None

    def state(self) -> dict[str, Any]:
        return {}

    def resume(self, metadata: Mapping[str, Any]) -> None: ...


Clock = RoundClock | NoClock


def clock_of(task: RunTask, shared: SharedState) -> Clock:
    """Return the clock of a run, at time 0."""
    if task.experiment.mode != "clock":
        return NoClock()
    row_bytes = shared.server.row.nbytes - personal_bytes(task)
    messages = sum(message_bytes(task, shared))
    return RoundClock(delays_of(task.experiment, task.byzantine.fixed), row_bytes, buffer_bytes(task, shared), messages)
