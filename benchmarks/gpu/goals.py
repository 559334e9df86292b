"""Goals for one NVIDIA H200, and whether the figures of a check reach them, without importing PyTorch or fedsim."""

from __future__ import annotations

from typing import Any, NamedTuple

BASELINES = ("bare loop", "captured loop", "vmap", "captured vmap", "jax")


class Goal(NamedTuple):
    """A maximum for a figure of a measurement.

    Attributes:
        measurement: name of the measurement.
        figure: name of the figure.
        most: maximum value of the figure.
    """

    measurement: str
    figure: str
    most: float


GOALS = (
    Goal("w1, batched", "round_ms", 60),
    Goal("w2, batched", "round_ms", 50),
    Goal("w3, batched", "round_ms", 3.5),
    Goal("w3-1000, batched", "round_ms", 20),
    Goal("gpt, batched", "round_ms", 100),
    Goal("char_lstm, batched", "round_ms", 300),
    Goal("resnet20, batched", "round_ms", 60),
    *(Goal(f"{name}, batched", "first_round_ms", 300) for name in ("w1", "w2", "w3")),
    Goal("w3, processes", "start_seconds", 4),
    Goal("which_rule", "seconds", 12),
    *(Goal(f"rules, {n} x {d}", "most_over_byzfl", 1) for n in (20, 100) for d in (21_840, 1_663_370)),
)

ASSERTIONS = (  # of benchmarks/gpu/assertions.py, in the order of their value
    *("failed capture", "drawing ahead", "runs in a session", "8 GB, 1 process", "8 GB, 2 processes"),
    *("graphs of char_lstm, 10 workers", "graphs of char_lstm, 100 workers"),
)


class Verdict(NamedTuple):
    """A goal with what was measured.

    Attributes:
        measured: value of the figure, or None if it was not measured.
        met: whether the goal is met, or None if the figure was not measured.
        baseline: name and value of the fastest baseline that did the same work in this check, or None.
    """

    goal: Goal
    measured: float | None
    met: bool | None
    baseline: tuple[str, float] | None

    @property
    def word(self) -> str:
        return {True: "met", False: "missed", None: "not measured"}[self.met]

    def __str__(self) -> str:
        name, figure, most = self.goal
        value = "-" if self.measured is None else f"{self.measured:.4g}"
        baseline = "" if self.baseline is None else ", best baseline: {} {:.4g}".format(*self.baseline)
        return f"{self.word:<14}{name:<22}{figure:<17}{value:>7} (at most {most:g}){baseline}"

    def as_json(self) -> dict[str, Any]:
        return {**self.goal._asdict(), "measured": self.measured, "met": self.met, "best_baseline": self.baseline}


def verdicts(figures: dict[str, dict[str, Any]]) -> list[Verdict]:
    """Compare the figures of each measurement with the goals."""
    results = []
    for goal in GOALS:
        measured = figures.get(goal.measurement, {}).get(goal.figure)
        met = None if measured is None else measured <= goal.most
        results.append(Verdict(goal, measured, met, _best_baseline(goal, figures)))
    return results


def _best_baseline(goal: Goal, figures: dict[str, dict[str, Any]]) -> tuple[str, float] | None:
    """Return the fastest baseline of a workload. A baseline with an error did other work than fedsim."""
    if goal.figure != "round_ms":
        return None
    workload = goal.measurement.partition(",")[0]
    runs = {program: figures.get(f"{workload}, {program}", {}) for program in BASELINES}
    ms = {program: run["round_ms"] for program, run in runs.items() if "round_ms" in run and "error" not in run}
    return min(ms.items(), key=lambda item: item[1], default=None)
