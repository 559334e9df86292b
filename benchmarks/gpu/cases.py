"""Cases, and the check of their results. Imports neither PyTorch nor fedsim."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

Facts = Mapping[str, Any]

OK, WRONG, ERROR, DIED, HUNG, CUT, SKIPPED, NOT_REACHED = (
    *("ok", "wrong", "error", "died", "hung", "cut", "skipped", "not reached"),
)
BAD = (WRONG, ERROR, DIED, HUNG)  # outcomes that need somebody's attention


@dataclass(frozen=True)
class Context:
    """What every case may ask for.

    Attributes:
        device: "cuda", "cuda:1" or "cpu".
        quick: whether cases are made smaller, to try the check out.
        references: the folder of results that the CPU has computed.
        out: the folder of results; what is written there is kept.
        only: the sections, or section:text, that are asked for; none: all.
    """

    device: str
    quick: bool
    references: Path
    out: Path
    only: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


class Case(NamedTuple):
    """One thing to check or to measure.

    Attributes:
        name: unique in its section.
        work: returns the facts found, and raises WrongResultError or NotApplicableError.
        limit: seconds after which the process is killed.
        reference: an experiment, as tables, whose result on the CPU `work` will read.
    """

    name: str
    work: Callable[[], Facts | None]
    limit: float = 60.0
    reference: Mapping[str, Any] | None = None


class WrongResultError(Exception):
    """A result is not what it must be."""

    def __init__(self, message: str, facts: Facts) -> None:
        super().__init__(message)
        self.facts = facts


class NotApplicableError(Exception):
    """The case does not apply here."""


def check(condition: bool, message: str, **facts: Any) -> Facts:
    """Return the facts; raise WrongResultError with them unless the condition holds."""
    if not condition:
        raise WrongResultError(message, facts)
    return facts


def need_gpu(context: Context) -> None:
    """Raise NotApplicableError on a CPU."""
    if not context.on_gpu:
        raise NotApplicableError("needs a GPU")
