"""Virtual time of synchronous rounds, and the delays of an experiment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from fedsim.asynchronous.delays import Delays
from fedsim.asynchronous.dispatch import CheckpointModel, Counts, Seconds
from fedsim.config.experiment import Experiment
from fedsim.engines.memory import buffer_bytes, personal_bytes
from fedsim.engines.shared_state import SharedState, message_bytes
from fedsim.engines.task import RunTask


def delays_of(experiment: Experiment) -> Delays:
    """Return the delays that the table [clock] of an experiment describes."""
    clock = experiment.clock
    slowdowns, noise = clock.slowdown.component(experiment.workers, experiment.seed), clock.noise.component
    return Delays(slowdowns, noise, experiment.seed, clock.step_seconds, clock.latency, clock.bandwidth)


class RoundClockState(CheckpointModel):
    """State of a `RoundClock`."""

    now: Seconds
    started: Counts


class RoundClock:
    """Virtual time of the synchronous loop: each round, or each averaged gradient, waits for the slowest worker.

    Attributes:
        now: virtual seconds since the start.
    """

    def __init__(self, delays: Delays, row_bytes: int = 0, buffer_bytes: int = 0, message_bytes: int = 0) -> None:
        self._delays = delays
        # The model that a worker receives, buffers both ways, and what it receives and sends besides.
        self._other_bytes = row_bytes + 2 * buffer_bytes + message_bytes
        self._started: Counter[int] = Counter()  # work items, by worker
        self.now = 0.0

    @classmethod
    def of(cls, task: RunTask, shared: SharedState) -> RoundClock:
        """Return the clock of a run."""
        row_bytes = shared.server.row.nbytes - personal_bytes(task)
        return cls(delays_of(task.experiment), row_bytes, buffer_bytes(task, shared), sum(message_bytes(task, shared)))

    def pass_round(self, gradients: Mapping[int, int], *, update_bytes: float, in_step: bool) -> None:
        """Advance `now` by a round.

        Args:
            gradients: number of gradients that each worker of the cohort computes.
            update_bytes: mean size of an update, or of a gradient, as it is sent.
            in_step: the workers wait for each other at each gradient, not only at the end of the round.
        """
        nbytes = self._other_bytes + update_bytes
        if not in_step:
            self._pass(gradients, nbytes)
            return
        for step in range(max(gradients.values())):
            self._pass({worker: 1 for worker, count in gradients.items() if step < count}, nbytes)

    def state(self) -> dict[str, Any]:
        """Return the state between two rounds, in JSON types."""
        return {"now": self.now, "started": list(self._started.items())}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from such a state."""
        saved = RoundClockState.model_validate(state)
        self.now, self._started = saved.now, Counter(dict(saved.started))

    def _pass(self, gradients: Mapping[int, int], nbytes: float) -> None:
        """Advance until every worker of the cohort has computed its gradients; all start at the same time."""
        seconds = [self._delays.seconds(worker, self._started[worker], n, nbytes) for worker, n in gradients.items()]
        self._started.update(gradients.keys())
        self.now += max(seconds, default=0.0)
