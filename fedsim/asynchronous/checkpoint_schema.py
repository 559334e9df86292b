"""The checkpointed state of clocks and schedulers, as pydantic models that check its types."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from fedsim.engines.trainers.batches import WorkItem

Number = Annotated[int, Field(ge=0, lt=2**53)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Counts = list[tuple[Number, Number]]  # (worker, count)


class CheckpointModel(BaseModel):
    """Base of the checkpoint models: frozen, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class RoundClockState(CheckpointModel):
    """State of a `RoundClock`."""

    now: Seconds
    started: Counts


class SchedulerState(CheckpointModel):
    """State of a `Scheduler`."""

    done: Counts
    drawn: Number


class DispatcherState(CheckpointModel):
    """State of a `Dispatcher`."""

    scheduler: SchedulerState
    in_flight: list[WorkItem]
    untrained: list[Number]
    nonfinite: list[Number]
    arrivals: Number


class ClockState(CheckpointModel):
    """State of a `VirtualClock`."""

    dispatcher: DispatcherState
    now: Seconds
    pending: list[tuple[Seconds, Number]]
    idle: list[Number]
    waiting: list[Number]
    asked_at: Number | None
    leaving: list[Number]
    started: Counts
