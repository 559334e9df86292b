"""Virtual clock of synchronous rounds, and the simulated delays of an experiment."""

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
    """Return the simulated delays of workers and network, from the settings `clock.*` of an experiment."""
    clock = experiment.clock
    slowdowns, noise = clock.slowdown.component(experiment.workers, experiment.seed), clock.noise.component
    return Delays(slowdowns, noise, experiment.seed, clock.step_seconds, clock.latency, clock.bandwidth)


class RoundClockState(CheckpointModel):
    """State of a `RoundClock` in a checkpoint."""

    now: Seconds
    started: Counts


class RoundClock:
    """Virtual clock of synchronous rounds, in which the server waits for the slowest worker.

    Args:
        delays: delays of workers and network.
        row_bytes: bytes of the global parameters that a worker receives, without the setting `broadcast`.
        buffer_bytes: bytes of the buffers that a worker receives, and also sends.
        message_bytes: bytes that a worker receives and sends in addition to parameters and buffers.

    Attributes:
        now: virtual seconds since the start of the run.
    """

    def __init__(self, delays: Delays, row_bytes: int = 0, buffer_bytes: int = 0, message_bytes: int = 0) -> None:
        self._delays = delays
        # Bytes per round besides the update: parameters received, buffers in both directions, and messages.
        self._other_bytes = row_bytes + 2 * buffer_bytes + message_bytes
        self._started: Counter[int] = Counter()  # number of started rounds or steps, by worker
        self.now = 0.0

    @classmethod
    def of(cls, task: RunTask, shared: SharedState) -> RoundClock:
        """Return a clock for a run, at time 0."""
        row_bytes = 0 if task.experiment.broadcast else shared.server.row.nbytes - personal_bytes(task)
        return cls(delays_of(task.experiment), row_bytes, buffer_bytes(task, shared), sum(message_bytes(task, shared)))

    def pass_round(self, gradients: Mapping[int, int], *, processed_bytes: float, in_step: bool) -> None:
        """Advance the virtual time by one round.

        Args:
            gradients: number of gradients that each worker of the cohort computes, by worker ID.
            processed_bytes: mean number of bytes of an update (or gradient) after compression, and of a broadcast.
            in_step: whether the workers wait for each other after each gradient, not only at the end of the round.
        """
        nbytes = self._other_bytes + processed_bytes
        if not in_step:
            self._pass(gradients, nbytes)
            return
        for step in range(max(gradients.values())):
            self._pass({worker: 1 for worker, count in gradients.items() if step < count}, nbytes)

    def state(self) -> dict[str, Any]:
        """Return the state of the clock between two rounds, in JSON types, for a checkpoint."""
        return {"now": self.now, "started": list(self._started.items())}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Set the clock to a state that the method `state` has returned."""
        saved = RoundClockState.model_validate(state)
        self.now, self._started = saved.now, Counter(dict(saved.started))

    def _pass(self, gradients: Mapping[int, int], nbytes: float) -> None:
        """Advance the virtual time until the slowest worker has computed and sent its gradients.

        Args:
            gradients: number of gradients that each worker computes, by worker ID.
            nbytes: bytes that each worker receives and sends.
        """
        seconds = [self._delays.seconds(worker, self._started[worker], n, nbytes) for worker, n in gradients.items()]
        self._started.update(gradients.keys())
        self.now += max(seconds, default=0.0)
