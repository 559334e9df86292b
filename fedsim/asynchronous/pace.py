"""How long things take on the virtual clock of an experiment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fedsim.asynchronous.delays import Delays, bind_noise, draw_speeds
from fedsim.asynchronous.standing import RoundsStanding
from fedsim.engines.job import Schedule
from fedsim.experiment import Experiment
from fedsim.preparation import Setting


def delays_of(experiment: Experiment) -> Delays:
    """The delays that an experiment's table [clock] describes."""
    clock = experiment.clock
    speeds = draw_speeds(clock.speed.plug, clock.speed.params, experiment.workers, experiment.seed)
    bound = bind_noise(clock.noise.plug, clock.noise.params)
    return Delays(speeds, bound, experiment.seed, clock.base, clock.latency, clock.bandwidth)


class RoundClock:
    """Virtual time of the synchronous loop: a round, or a step of those of gradients, waits for the slowest.

    A worker's pieces of work are numbered as it begins them, whatever the policy, so all policies meet the same delays.

    Attributes:
        now: virtual seconds since the start.
    """

    def __init__(self, delays: Delays, schedule: Schedule, model_bytes: int) -> None:
        self._delays, self._schedule, self._bytes = delays, schedule, 2 * model_bytes
        self._begun: Counter[int] = Counter()
        self.now = 0.0

    @classmethod
    def of(cls, setting: Setting) -> RoundClock:
        return cls(delays_of(setting.experiment), setting.schedule, setting.row_bytes + setting.buffer_bytes)

    def pass_round(self, cohort: Sequence[int], sizes: Sequence[int], *, in_step: bool) -> None:
        """A round of these workers, whose shards are of these sizes; `in_step` where all wait at every step."""
        steps = [self._schedule.steps_for(size) for size in sizes]
        if not in_step:
            self._pass_together(list(zip(cohort, steps, strict=True)))
            return
        for step in range(max(steps)):
            self._pass_together([(worker, 1) for worker, count in zip(cohort, steps, strict=True) if step < count])

    def state(self) -> dict[str, Any]:
        """What the rounds to come depend on, in the types that JSON has."""
        return {"now": self.now, "begun": list(self._begun.items())}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        standing = RoundsStanding.model_validate(state)
        self.now, self._begun = standing.now, Counter(dict(standing.begun))

    def _pass_together(self, work: Sequence[tuple[int, int]]) -> None:
        longest = 0.0
        for worker, steps in work:
            longest = max(longest, self._delays.seconds(worker, self._begun[worker], steps, self._bytes))
            self._begun[worker] += 1
        self.now += longest
