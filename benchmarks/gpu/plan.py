"""The sections, their order, and their time limits. Imports neither PyTorch nor fedsim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BUDGET = 520.0  # seconds, for which the limits below are meant
SUMMARY_SECONDS = 5.0  # kept for the end


class Section(NamedTuple):
    """Cases of one kind.

    Attributes:
        name: of the section, and of its module in this package.
        about: what it tells.
        processes: how many processes share its cases.
        every: with --quick, one case of so many is run.
        compared: whether its cases compare with references.
        package: where its module is.
    """

    name: str
    about: str
    processes: int = 1
    every: int = 1
    compared: bool = False
    package: str = "benchmarks.gpu"

    @property
    def module(self) -> str:
        return f"{self.package}.{self.name}"


class Stage(NamedTuple):
    """Sections that run side by side.

    Attributes:
        seconds: after which what is left of them is cut.
        alone: whether results depend on time, so that nothing else may run, not even references.
    """

    seconds: float
    sections: tuple[Section, ...]
    alone: bool = False


REFERENCES = Section("references", "results of the CPU that others are compared with", processes=8)

STAGES = (
    Stage(15, (Section("machine", "device, versions, packages, data"),)),
    Stage(60, (Section("ways", "one small run in every way there is", processes=3, every=3, compared=True),)),
    Stage(30, (Section("constants", "what a launch, a wait, a copy and a product cost"),), alone=True),
    Stage(25, (Section("convolutions", "convolutions of stacks in each way", every=4),), alone=True),
    Stage(
        95,
        (
            Section("rules", "every rule, pre-aggregator and attack", every=9),
            Section("draws", "random numbers on the CPU and on the GPU"),
            Section("engines", "the contract of engines, in float64", processes=4, every=30, compared=True),
            Section("options", "every solver, server optimizer and policy", processes=2, every=12, compared=True),
            Section("processes", "engine spawn, and races", every=12, compared=True),
            Section("tests", "the tests that are marked gpu", processes=2),
        ),
    ),
    Stage(50, (Section("faults", "lost processes, failed captures, Ctrl-C", processes=2, compared=True),)),
    Stage(30, (Section("shortage", "a device that is almost full", compared=True),)),
    Stage(40, (Section("memory", "memory after runs; memory that processes share"),)),
    Stage(BUDGET, (Section("workloads", "milliseconds of a round, against loops and limits"),), alone=True),
)


def text_asked(only: Sequence[str], section: str) -> str | None:
    """What the names of a section's cases must contain to be run; None where none of them is asked for.

    Args:
        only: words such as "rules" or "rules:krum"; none of them asks for everything.
    """
    asked = {word.partition(":")[0]: word.partition(":")[2] for word in only}
    return asked.get(section) if asked else ""


def sections_of(stages: tuple[Stage, ...] = STAGES) -> dict[str, Section]:
    """All sections but the references, by name."""
    return {section.name: section for stage in stages for section in stage.sections}
