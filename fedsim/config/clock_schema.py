"""The tables of asynchronous experiments: the policy, the virtual clock and races."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat

from fedsim.asynchronous.delays import noise, speed
from fedsim.asynchronous.policies import policy
from fedsim.core.base_table import PlugTable, Table
from fedsim.core.objects import Name


class AsyncPolicy(PlugTable):
    """What the server does with each result that arrives, if there are no synchronous rounds."""

    place, named_by, registry = "policy", "name", policy

    name: Name = "sync"


class Speed(PlugTable):
    """How fast each worker is on the virtual clock."""

    place, named_by, registry = "clock.speed", "name", speed

    name: Name = "equal"


class Noise(PlugTable):
    """How the duration of work varies on the virtual clock."""

    place, named_by, registry = "clock.noise", "name", noise

    name: Name = "constant"


class Clock(Table):
    """Virtual time: workers compute for gradients x base x speed x noise, and send in latency + bytes / bandwidth."""

    base: PositiveFloat = 1.0
    """Seconds of a gradient of a batch; a local step of `sgd` computes one."""
    speed: Speed = Speed()
    """How fast each worker is."""
    noise: Noise = Noise()
    """How the duration of work varies."""
    latency: NonNegativeFloat = 0.0
    """Seconds of each message."""
    bandwidth: PositiveFloat | None = None
    """Bytes per second. Unset: infinite."""
    departures: dict[str, NonNegativeFloat] = Field(default={})
    """Seconds after which workers leave: `{3 = 100.0}`."""
    log: str | None = None
    """A run folder of a race, or its race.csv: the clock repeats its order of events."""


class Race(Table):
    """Processes that race. The result differs each time, so a race is run several times, and the records hold all."""

    runs: Annotated[int, Field(gt=0, le=10_000)] = 5
    """Number of runs."""
