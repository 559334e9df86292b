"""Where clocks and rosters stand between two rounds, in the types that JSON has, checked: a file may say anything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from fedsim.engines.feed import Member

Number = Annotated[int, Field(ge=0, lt=2**53)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Counts = list[tuple[Number, Number]]  # by worker


class Standing(BaseModel):
    """Checked types; what must hold between the numbers is for those to check whose numbers they are."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RoundsStanding(Standing):
    """Of a `RoundClock`."""

    now: Seconds
    begun: Counts


class RosterStanding(Standing):
    """Of a `Roster`."""

    done: Counts
    busy: list[Number]
    drawn: Number


class WorkStanding(Standing):
    """Of whoever knows what is under way: each piece a `Member`, in the order in which they began."""

    roster: RosterStanding
    under_way: list[tuple[Number, Number, Number, Number | None, Number | None]]
    untrained: list[Number]
    unfit: list[Number]
    taken: Number

    @property
    def members(self) -> list[Member]:
        return [Member(*member) for member in self.under_way]


class ClockStanding(WorkStanding):
    """Of a `VirtualClock`."""

    now: Seconds
    pending: list[tuple[Seconds, Number]]
    idle: list[Number]
    waiting: list[Number]
    asked_at: tuple[Number, Number] | None
    leaving: list[Number]
    left: Number
    begun: Counts


def require_below(limit: int, what: str, numbers: Iterable[int]) -> None:
    """Raise ValueError unless all of these numbers are below a limit, and different."""
    listed = list(numbers)
    if len(set(listed)) < len(listed) or any(number >= limit for number in listed):
        raise ValueError(f"its {what} are not those of this run, each once")
