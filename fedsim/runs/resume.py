"""Resuming an interrupted run from its newest intact checkpoint.

Results are bit-identical to an uninterrupted run, except in races.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from fedsim.clients.lr_schedules import LENGTHS
from fedsim.config.engines import traits_of
from fedsim.config.experiment import Experiment
from fedsim.config.load import describe, experiment_of
from fedsim.config.schema import Stop
from fedsim.config.tables import component_tables
from fedsim.core.import_policy import reading_stored_run, untrusted_config
from fedsim.core.input_limits import leaves_of
from fedsim.core.objects import names_in, with_objects
from fedsim.core.snapshot import Snapshot
from fedsim.errors import ExperimentError, FedsimWarning, RecordError, cut, first_line, show
from fedsim.records.checkpoints import CheckpointFolder, rounding_of
from fedsim.records.history import read_history, records_digest
from fedsim.records.record import RoundRecord
from fedsim.records.run_folder import EXPERIMENT, RunFolder, describe_environment
from fedsim.records.worker_results import without_worker_tests
from fedsim.runs.live_run import LiveRun

# Exceptions that a loop may raise for the checkpoint of another run or a manipulated file.
UNFIT = (RecordError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError)

State = tuple[int, Snapshot]  # (last finished round, state after this round)


NO_EFFECT = (  # keys that change results at most by rounding, of which a warning then tells
    *("name", "engine", "processes", "start_method", "process_timeout", "batched.stack_size", "cuda_graphs"),
    *("distributed.backend", "distributed.timeout", "distributed.init_method", "distributed.trainer"),
    *("checkpoint.every", "checkpoint.keep", "max_restarts", "worker_state_memory"),
    *("records.figures", "records.tensorboard", "records.loggers"),
)
LENGTH = ("rounds", *(f"stop.{key}" for key in Stop.model_fields))  # keys that only determine when a run ends
# keys of what is planned for a number of rounds, which a longer run may change
PLAN = ("planned_rounds", *(f"{place}.schedule.{key}" for place in ("local", "server") for key in LENGTHS))


class ResumeState:
    """Records and checkpoints in the folder of a run that is to be resumed.

    Args:
        folder: run folder; None if there is no folder.
        experiment: experiment to run now.

    Attributes:
        experiment: experiment to run now, with the `planned_rounds` of the first run unless they are set.
        checkpoints: the checkpoints in the folder.
        records: records of the finished rounds.

    Raises ExperimentError, with a line for each difference, if the newest checkpoint (or, without one, the folder)
    contains another experiment.
    """

    def __init__(self, folder: RunFolder | None, experiment: Experiment) -> None:
        chosen = experiment.checkpoint
        self.checkpoints = CheckpointFolder(folder.path if folder else None, chosen.every, chosen.keep)
        self.experiment, self._folder = experiment, folder
        self.records: list[RoundRecord] = []
        self._candidates: list[int] = []  # rounds of checkpoints, newest first
        self._newest: State | None = None
        self._before: Experiment | None = None  # as run before
        self._elsewhere = False  # whether the run began with other software or on another CPU
        self._changed: list[str] = []  # one line for each setting of the plan that differs from it
        if folder is not None and folder.resumes:
            self.records = read_history(folder.path)
            self._candidates = self.checkpoints.rounds()
            if self.records and not self._candidates:
                line = f"{folder.path}: has no checkpoint, so the run starts again from round 1; set checkpoint.every"
                warnings.warn(f"{line} to store checkpoints", FedsimWarning, stacklevel=2)
            self.newest()
            if self._before is None:
                self._require_same_experiment(describe(folder.path / EXPERIMENT))
            self._keep_plan()
            self._elsewhere = _warn_of_other_software(folder.environment(), folder)

    def _require_same_experiment(self, stored: Mapping[str, Any]) -> None:
        """Raise ExperimentError if the experiment in the tables `stored` differs from the experiment to run."""
        assert self._folder is not None
        folder, experiment = self._folder.path, self.experiment
        settings = experiment.resolved()
        with reading_stored_run(), untrusted_config(folder / EXPERIMENT, [settings]):
            self._before = before = experiment_of(with_objects(stored, names_in(experiment.model_dump())))
        lines = differences_of(before.resolved(), settings, (*NO_EFFECT, *LENGTH, "planned_rounds"))
        if experiment.planned_rounds not in (None, before.schedule_rounds) and experiment.planned_settings:
            lines.append(f"planned_rounds: {before.schedule_rounds} there, {experiment.planned_rounds} here")
        may_change = PLAN if experiment.privacy.target_epsilon is None else ()  # noise that has been added stays
        self._changed = [line for line in lines if line.partition(":")[0] in may_change]
        lines = [line for line in lines if line not in self._changed]
        if experiment.rounds < max(len(self.records), before.rounds):
            lines.append(
                f"rounds: {before.rounds} there, {experiment.rounds} here; a resumed run cannot have fewer rounds"
            )
        if lines:
            raise ExperimentError(*(f"{folder}: holds another experiment: {line}" for line in lines))

    def _keep_plan(self) -> None:
        """Use the `planned_rounds` of the stored run, on which schedules and noise depend, and warn of this."""
        before, experiment = self._before, self.experiment
        assert before is not None
        kept, rounds, target = before.schedule_rounds, experiment.rounds, experiment.privacy.target_epsilon
        if not experiment.planned_settings:  # a `T_max` that is set now replaces what was planned
            self.experiment = experiment.model_copy(update={"planned_rounds": None})
            return
        unset = experiment.planned_rounds is None
        if kept == rounds or not (unset or experiment.planned_rounds == kept):
            return
        line = f"rounds = {rounds}: planned_rounds stays {kept} for {' and '.join(experiment.planned_settings)}"
        if unset and traits_of(experiment.engine).ranks:  # the other ranks do not read the folder
            raise ExperimentError(
                f"{line}, but only rank 0 reads this number from the folder; add planned_rounds={kept}"
            )
        self.experiment = experiment.model_copy(update={"planned_rounds": kept})
        if before.rounds < rounds and kept < rounds:
            then = f"set planned_rounds={rounds} to change this"
            then = then if target is None else f"epsilon will exceed privacy.target_epsilon = {target:g}"
            warnings.warn(f"{line}, as in the first run; {then}", FedsimWarning, stacklevel=2)

    def as_before(self) -> Experiment:
        """Return the experiment with the stack width of the run before it was interrupted, unless the width is set.

        The stack width is the number of workers that are trained at once. On a GPU, its default depends on the GPU's
        memory, and another width changes the rounding of sums.
        """
        newest, experiment = self.newest(), self.experiment
        traits, table = traits_of(experiment.engine), experiment.batched
        width = _rounding_in(newest[1]).get("width") if newest else None
        if not _is_count(width) or table.stack_size is not None or traits.ranks or not traits.stacks:
            return experiment
        return experiment.model_copy(update={"batched": table.model_copy(update={"stack_size": width})})

    def restore(self, run: LiveRun) -> int:
        """Restore the state of a run from the newest usable checkpoint. Later records and checkpoints are dropped.

        Returns the number of finished rounds, or 0 if there is no usable checkpoint.

        Raises ExperimentError if the run that wrote the checkpoint had other data.
        """
        start = run.state()
        while (checkpoint := run.engine.broadcast(self.newest())) is not None:
            round, state = checkpoint
            self._require_same_data(run, state.metadata.get("data"))
            try:
                run.resume(state)
            except UNFIT as error:
                run.resume(start)
                self._refuse(f"is damaged or belongs to another run: {first_line(error)}")
                continue
            _warn_of_other_rounding(_rounding_in(state), rounding_of(run.metadata.how))
            break
        else:
            round = 0
        self.records[:] = run.engine.broadcast(self.records[:round])
        if round % run.experiment.worker_evaluation.every:  # a longer run has no such tests after this round
            self.records[-1] = without_worker_tests(self.records[-1])
        if round and self._folder and self._changed:
            line = f"{self._folder.path}: changes after round {round}: {'; '.join(self._changed)}"
            warnings.warn(line, FedsimWarning, stacklevel=2)
            self._folder.event("changed", round=round, settings=self._changed)
        self.checkpoints.forget_after(round)
        self._newest = None  # frees its memory
        return round

    def _require_same_data(self, run: LiveRun, stored: Any) -> None:
        """Raise ExperimentError if the data of a run differs from the hashes in a checkpoint.

        With other software or on another CPU, data that was computed, such as standardized columns, may differ by
        rounding. A warning is shown in this case. Checkpoints of earlier versions contain no hashes.
        """
        if self._folder is None or not isinstance(stored, dict):  # rank 0 compares for all ranks
            return
        now = run.data_digests
        names = [re.sub(r" \d+$", "s", name) for name in {**stored, **now} if stored.get(name) != now.get(name)]
        if not names:
            return
        line = f"{self._folder.path}: holds a run with other data: {', '.join(map(cut, dict.fromkeys(names)))} differ"
        if not self._elsewhere:
            raise ExperimentError(f"{line}; use the same data, or another folder")
        warnings.warn(f"{line}, perhaps only by rounding; the run continues", FedsimWarning, stacklevel=2)

    def newest(self) -> State | None:
        """Return the newest usable checkpoint as (round, state); None if there is none."""
        while self._newest is None and self._candidates:
            round = self._candidates[0]
            try:
                if round > len(self.records):
                    raise RecordError(f"the run folder has records of only {len(self.records)} rounds")  # file was cut
                state, folder = self.checkpoints.read(round), self._folder
                assert folder is not None
                if not isinstance(stored := state.metadata.get("experiment"), dict):
                    raise RecordError("the checkpoint does not contain the experiment")
                self._require_same_experiment(stored)
                if state.metadata.get("records") != records_digest(folder.path, round):
                    raise RecordError("the records up to this round have changed since the checkpoint was written")
                self._newest = round, state
            except RecordError as error:
                self._refuse(str(error))
        return self._newest

    def _refuse(self, why: str) -> None:
        """Ignore the newest checkpoint, and show a warning with the reason `why`."""
        if self._candidates:  # empty in ranks other than rank 0
            round = self._candidates.pop(0)
            then = "the run starts from round 1"
            if self._candidates:
                then = f"the checkpoint of round {self._candidates[0]} is tried instead"
            warnings.warn(f"checkpoint of round {round}: {why}; {then}", FedsimWarning, stacklevel=2)
        self._newest = None


def _rounding_in(state: Snapshot) -> dict[str, Any]:
    """Return what a checkpoint says about the rounding of sums: number of workers per stack, and of ranks."""
    metadata = state.metadata.get("way")
    metadata = metadata if isinstance(metadata, dict) else {}
    return rounding_of({key: value for key, value in metadata.items() if _is_count(value)})


def _warn_of_other_rounding(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warn if, before the interruption, stacks (workers trained at once) or the number of ranks had another size."""
    if before != now:
        line = f"results may differ in the last bits: before, workers were trained {_way(before)}, now {_way(now)}"
        warnings.warn(line, FedsimWarning, stacklevel=2)


def _way(rounding: Mapping[str, Any]) -> str:
    """Return how workers are trained, such as "in stacks of 5 on 2 ranks"."""
    width, ranks = rounding.get("width"), rounding.get("ranks")
    return (f"in stacks of {width}" if width else "one by one") + (f" on {ranks} ranks" if ranks else "")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _warn_of_other_software(before: Mapping[str, Any], folder: RunFolder) -> bool:
    """Warn if the run began with other software versions or on another CPU, because results may differ slightly.

    Returns whether this is the case.
    """
    here = describe_environment()
    differences = [
        f"{name} was {cut(str(earlier[key]))}, now {now[key]}"
        for name, key, earlier, now in (
            ("fedsim", "fedsim", before, here),
            ("torch", "torch", before.get("packages"), here["packages"]),
            ("processor", "cpu_capability", before, here),
        )
        if isinstance(earlier, dict) and key in earlier and earlier[key] != now[key]
    ]
    if differences:
        line = f"{folder.path}: results may differ in the last bits, because {', '.join(differences)}"
        warnings.warn(line, FedsimWarning, stacklevel=2)
    return bool(differences)


def differences_of(
    there: Mapping[str, Any], here: Mapping[str, Any], ignored: Collection[str] = NO_EFFECT
) -> list[str]:
    """Compare two experiments, and return a line for each setting that differs, such as "rounds: 5 there, 10 here".

    Args:
        there: all settings of the first experiment.
        here: all settings of the second experiment.
        ignored: settings that are not compared.
    """
    first, second = dict(leaves_of(there)), dict(leaves_of(here))
    keys = [key for key in {**first, **second} if first.get(key) != second.get(key) and key not in ignored]
    of_components = {
        key
        for place, table in component_tables(Experiment).items()
        if f"{place}.{table.named_by}" in keys
        for key in keys
        if key.startswith(f"{place}.") and key.removeprefix(f"{place}.").partition(".")[0] not in table.model_fields
    }
    return [
        f"{key}: {_shown(first, key)} there, {_shown(second, key)} here" for key in keys if key not in of_components
    ]


def _shown(leaves: Mapping[str, Any], key: str) -> str:
    return show(leaves[key]) if key in leaves else "not set"
