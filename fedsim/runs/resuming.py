"""Going on with a run that was broken off: from its newest sound checkpoint, to the bits that it would have come to."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from fedsim.engines import Engine
from fedsim.engines import engine as engines
from fedsim.errors import ExperimentError, FedsimWarning, RecordError, one_line
from fedsim.experiment import Experiment
from fedsim.loading import describe, experiment_of
from fedsim.objects import names_in, with_objects
from fedsim.permission import words_of
from fedsim.preparation import Setting
from fedsim.records import EXPERIMENT, RoundRecord, RunFolder, describe_environment
from fedsim.runs.checkpoints import Checkpoints
from fedsim.runs.differences import HOW, differences_of
from fedsim.runs.history import read_history
from fedsim.simulation import Loop
from fedsim.snapshot import Snapshot

# What a loop says to a state that is none of its own: it may come from a file that says anything.
UNFIT = (RecordError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError)

State = tuple[int, Snapshot]  # after which round, and what it was


class Past:
    """What the earlier part of a run has left: its records, and its checkpoints, of which some may be damaged.

    Args:
        folder: of the run; None where there is none, or another process keeps it.
        experiment: that is run now.

    Raises ExperimentError, a line for each difference, where the folder holds a run of another experiment.
    """

    def __init__(self, folder: RunFolder | None, experiment: Experiment) -> None:
        chosen = experiment.checkpoint
        self.checkpoints = Checkpoints(folder.path if folder else None, chosen.every, chosen.keep)
        self.records: list[RoundRecord] = []
        self._candidates: list[int] = []  # rounds of checkpoints, the newest first
        self._newest: State | None = None
        if folder is not None and folder.resumes:
            self.records = read_history(folder.path)
            self._candidates = self.checkpoints.rounds()
            _require_same(folder, experiment, len(self.records))
            _warn_of_another_place(folder)

    def as_before(self, experiment: Experiment) -> Experiment:
        """The experiment with what its engine has chosen before, on which bits may depend."""
        newest = self.newest()
        if newest is None or engines.get(experiment.engine).target.ranks:
            return experiment
        way = newest[1].facts.get("way")
        return _in_this_way(experiment, way if isinstance(way, dict) else {})

    def restore(self, loop: Loop, engine: Engine) -> int:
        """Put the loop to where the newest sound checkpoint was; after which round that is, 0 at the start."""
        start = loop.state()
        while (found := engine.spread(self.newest())) is not None:
            round, state = found
            try:
                loop.resume(state)
            except UNFIT as error:
                loop.resume(start)
                self._refuse(f"does not fit this run: {one_line(error)}")
                continue
            break
        else:
            round = 0
        self.records[:] = engine.broadcast(self.records[:round])
        self.checkpoints.forget_after(round)
        return round

    def newest(self) -> State | None:
        """The newest state that can be read, and to which all rounds are on record; None where there is none."""
        while self._newest is None and self._candidates:
            round = self._candidates[0]
            try:
                if round > len(self.records):
                    raise RecordError(f"only {len(self.records)} rounds are on record")
                self._newest = round, self.checkpoints.read(round)
            except RecordError as error:
                self._refuse(str(error))
        return self._newest

    def _refuse(self, why: str) -> None:
        """Do without the newest."""
        if self._candidates:  # else it is another process that has them, and speaks
            round = self._candidates.pop(0)
            then = f"that of round {self._candidates[0]} is tried" if self._candidates else "the run begins anew"
            warnings.warn(f"checkpoint of round {round}: {why}; {then} instead", FedsimWarning, stacklevel=2)
        self._newest = None


def way_of(setting: Setting) -> dict[str, Any]:
    """How a run is computed, as far as its bits may depend on that: what a checkpoint says of it."""
    chosen = {"engine": setting.experiment.engine, **setting.how}
    return {key: chosen[key] for key in ("engine", "processes", "threads", "width") if key in chosen}


def _in_this_way(experiment: Experiment, way: Mapping[str, Any]) -> Experiment:
    """The experiment with what it leaves open settled in this way, and checked no more: a file may say anything."""
    changes: dict[str, Any] = {}
    numbers = {key: way[key] for key in ("processes", "threads", "width") if _is_count(way.get(key))}
    if engines.get(experiment.engine).target.chooses and way.get("engine") in engines.names():
        changes["engine"] = way["engine"]
        changes["threads_per_process"] = numbers.get("threads", experiment.threads_per_process)
    elif way.get("engine") != experiment.engine:
        return experiment  # the user wants another
    if experiment.processes is None and "processes" in numbers:
        changes["processes"] = numbers["processes"]
    if experiment.batched.width is None and "width" in numbers:
        changes["batched"] = experiment.batched.model_copy(update={"width": numbers["width"]})
    return experiment.model_copy(update=changes)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _require_same(folder: RunFolder, experiment: Experiment, rounds: int) -> None:
    file, own = folder.path / EXPERIMENT, experiment.resolved()
    with words_of(file, [own]):
        there = experiment_of(with_objects(describe(file), names_in(experiment.model_dump())))
    lines = differences_of(there.resolved(), own, (*HOW, "rounds"))
    if experiment.rounds < max(rounds, there.rounds):
        lines.append(f"rounds: {there.rounds} there, {experiment.rounds} here; there can only be more")
    if lines:
        raise ExperimentError(*(f"{folder.path}: holds another experiment: {line}" for line in lines))


def _warn_of_another_place(folder: RunFolder) -> None:
    """Where the run has begun with other software, or on another kind of processor, bits may come out otherwise."""
    before, here = folder.environment(), describe_environment()
    told = [
        f"{name} {there.get(key)} there, {now[key]} here"
        for name, key, there, now in (
            ("fedsim", "fedsim", before, here),
            ("torch", "torch", before.get("packages"), here["packages"]),
            ("processor", "cpu_capability", before, here),
        )
        if isinstance(there, dict) and key in there and there[key] != now[key]
    ]
    if told:
        warnings.warn(
            f"{folder.path}: {', '.join(told)}: it may not come to the same bits", FedsimWarning, stacklevel=2
        )
