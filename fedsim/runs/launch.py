"""The choice of a run's engine if a launcher such as torchrun has started this process as one of several ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from fedsim.config.engines import traits_of
from fedsim.config.experiment import Experiment
from fedsim.config.validation import problems_with
from fedsim.errors import ExperimentError, FedsimWarning, show
from fedsim.processes.rendezvous import RankInfo, launcher_of

RANKED = "distributed"  # the engine that `auto` is under a launcher
_alone = ContextVar("alone", default=False)  # whether runs ignore the launcher


@contextmanager
def ignoring_launcher() -> Iterator[None]:
    """Return a context manager in which runs ignore the launcher, because each rank runs its own comparison."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def launched_ranks() -> str | None:
    """Return the launcher's number of ranks as text, such as "WORLD_SIZE = 2", or None for fewer than two ranks.

    Raises ExperimentError if the launcher's environment variables are inconsistent.
    """
    if _alone.get():
        return None
    rank_info, launcher = RankInfo.of(os.environ), launcher_of(os.environ)
    return f"{launcher.count} = {rank_info.count}" if rank_info and launcher and rank_info.count > 1 else None


def under_launcher(experiment: Experiment) -> Experiment:
    """Return the experiment. If a launcher started this process, the engine `auto` is replaced by `distributed`.

    Raises ExperimentError if the ranks cannot divide the experiment.
    """
    if not traits_of(experiment.engine).chooses or (ranks := launched_ranks()) is None:
        return experiment
    ranked = experiment.model_copy(update={"engine": RANKED})
    if lines := problems_with(ranked):
        start = f'engine = "auto": means engine={RANKED} under a launcher ({ranks}), which cannot run this experiment: '
        raise ExperimentError(*(f"{start}{line}" for line in lines))
    return ranked


def warn_of_copies(engine: str) -> None:
    """Warn on rank 0 if each rank of a launcher runs its own copy of the experiment, as with most engines."""
    if traits_of(engine).ranks:
        return
    with suppress(ExperimentError):  # the launcher's environment variables have no effect
        if (ranks := launched_ranks()) and RankInfo.here().rank == 0:
            line = f"engine = {show(engine)}: each rank of the launcher ({ranks}) runs its own copy"
            warnings.warn(line, FedsimWarning, stacklevel=2)


def check_copies(experiments: Iterable[Experiment]) -> None:
    """Check whether a launcher has started several ranks, each of which would run the whole comparison.

    Then raise ExperimentError if an experiment has the engine `auto`. Otherwise, warn on rank 0.
    """
    names = list(dict.fromkeys(experiment.engine for experiment in experiments))
    for name in names:
        if traits_of(name).chooses and (ranks := launched_ranks()):
            raise ExperimentError(
                f"engine = {show(name)}: a comparison does not divide its runs among the ranks of a launcher "
                f"({ranks}); start it without the launcher, give each rank a part with --shard i/n, or name an engine, "
                "such as engine=serial, with which each rank runs the whole comparison"
            )
    for name in names[:1]:
        warn_of_copies(name)
