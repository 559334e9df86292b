"""Properties of places where two things meet: a stop and groups, a schedule and more rounds, a run and its process."""

from __future__ import annotations

import contextlib
import json
import random
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedsim
from fedsim.clients import PersonalModel, lr_schedule
from fedsim.core.learning_task import correct_of, counts_of
from fedsim.core.model_inputs import on_each, outputs_of
from fedsim.errors import FedsimError, FedsimWarning
from tests.foreign import WALKED, foreign
from tests.fuzz.draw import OWNERS, Settings, is_runnable, refusal
from tests.fuzz.properties import PROPERTIES, difference, equal, named, require, serially
from tests.fuzz.runs import COMPLETED, QUIET, Lab, Outcome, result_of, untimed
from tests.fuzz.tables import NAMINGS

__all__ = ["PROPERTIES"]

SAME_TEST = 1e-4  # relative difference of a loss that is computed in other batches
NEEDED = ("data.name", "data.form", "model.name", "partition.name", "workers", "rounds", "seed")
OF_A_RUN = ("model.safetensors", "partition.json", "workers-*.csv", "unseen-*.csv", "updates-*.safetensors")


def choices(settings: Settings) -> random.Random:
    """Return a generator of what a property draws itself. It depends on the seed alone, so a failure can be reduced."""
    return random.Random(settings["seed"])


class StopAfter(fedsim.Callback):
    """Ends the run after a round."""

    def __init__(self, round: int) -> None:
        self._round = round

    def on_round(self, record: Any) -> str | None:
        return "the fuzzer ends the run" if record.round == self._round else None


LENGTHENED = ("worker_evaluation", "stop", "privacy", "groups", "switch_after_round")


@named("lengthened", often=True, wants=LENGTHENED)
def lengthened(lab: Lab, settings: Settings) -> str | None:
    """A run that has ended earlier, and is then lengthened, is the unbroken run, or a warning says what it keeps."""
    rng, unit = choices(settings), settings.get("group_rounds", 1)
    settings = {"engine": "serial", **settings, "rounds": 2 * settings["rounds"], "checkpoint.every": 1}
    if rng.random() < 0.5:
        place = rng.choice(["local.schedule", "server.schedule"])
        settings = {key: value for key, value in settings.items() if not key.startswith(place)}
        settings[f"{place}.name"] = rng.choice([r.name for r in lr_schedule if "length" in r.takes])
    end = unit * rng.randrange(1, settings["rounds"] // unit)
    how = rng.choice(["rounds", "rounds", "request", "rule"])
    first = {**settings, **({"rounds": end} if how == "rounds" else {})}
    if how == "rule":
        settings = {key: value for key, value in settings.items() if not key.startswith("stop.")}
        first = {**settings, "stop.metric": "train_loss", "stop.target": -1e9, "stop.mode": "max"}
    require(refusal(first) is None)  # such as for a schedule that does not fit fewer rounds
    with lab.folder() as folder:
        whole, expected = _warned(settings, folder / "whole")
        callbacks = [StopAfter(end)] if how == "request" else []
        _warned(first, folder / "parts", callbacks=callbacks)
        try:
            again, said = _warned(settings, folder / "parts", resume=True)
        except FedsimError:
            return None  # a line says why
        found = difference(whole, again, f"unbroken and lengthened after an end by {how}")
        found = found or _different_file(folder / "whole", folder / "parts")
    return None if set(said) - set(expected) else found


def _warned(settings: Settings, out: Path, **options: Any) -> tuple[Outcome, list[str]]:
    """Return the outcome of a run, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fedsim.run({**QUIET, **settings}, out, **options)
    COMPLETED.append({**QUIET, **settings})
    return Outcome.of(result), [str(item.message) for item in caught if issubclass(item.category, FedsimWarning)]


def _different_file(ours: Path, theirs: Path) -> str | None:
    """Return which result of the run in the folder `ours` is missing or different in the folder `theirs`."""
    files = [file for pattern in OF_A_RUN for file in ours.glob(pattern)]
    different = [file.name for file in files if not (theirs / file.name).exists()]
    different += [f.name for f in files if f.name not in different and f.read_bytes() != (theirs / f.name).read_bytes()]
    return f"unbroken and lengthened: {different[0]} differs" if different else None


def _number(record: dict[str, Any], name: str) -> float | None:
    table, _, key = name.rpartition(".")
    return (record[table] if table else record).get(key)


class Ending(fedsim.Callback):
    """Tests the models at the end of a run with `torch` alone, and compares them with the last record."""

    found: str | None = None

    def on_start(self, run: Any) -> None:
        self._run = run

    def on_end(self, result: fedsim.Result) -> None:
        shared, record, experiment = self._run.engine.shared, result.history[-1], result.experiment
        if record.diverged is not None:
            return
        groups, server = shared.server.groups, experiment.server.component
        sent = server.broadcast(shared.server.row, shared.server.states["parameters"]) if groups else None
        if groups and not all(equal(row, sent) for row in groups["rows"]):
            self.found = "the returned model lacks what the groups have trained since it was aggregated"
        for part in ("test", "validation"):
            if len(data := getattr(shared.data, part)):
                self._compare(part, _tested(result.model, data, experiment), record)
        tested = self._run.tests_after(record.round)
        if tested is None or not tested.workers:
            return
        personal = isinstance(experiment.local.component, PersonalModel)
        if personal and (result.folder is None or experiment.mode == "race"):
            return
        numbers = []
        for worker in tested.workers:
            model = result.personal_model(worker) if personal else result.model
            own = shared.data.worker_tests.of(worker)
            source = shared.data.test if experiment.data.local_test_fraction == "own" else shared.data.train
            numbers.append(_tested(model, source, experiment, own))
        loss = sum(loss for loss, _ in numbers) / len(numbers)
        self._compare("worker", (loss, None), record)

    def _compare(self, part: str, tested: tuple[float, float | None], record: Any) -> None:
        for name, value in zip((f"{part}_loss", f"{part}_accuracy"), tested, strict=True):
            recorded = record[name]
            if value is None or recorded is None or not abs(recorded) < 1e6:
                continue
            if not abs(value - recorded) <= (SAME_TEST if "loss" in name else 0.1) * (1 + abs(recorded)):
                self.found = self.found or f"{name} of the returned model is {value:.6g}, recorded is {recorded:.6g}"


def _tested(
    model: torch.nn.Module, data: fedsim.TensorData, experiment: Any, positions: Tensor | None = None
) -> tuple[float, float | None]:
    """Return loss and accuracy of a model on all samples, or on those at `positions`, in one batch."""
    task, dtype = experiment.task.component, next(model.parameters()).dtype
    inputs, targets = data.gather(torch.arange(len(data)) if positions is None else positions)
    with torch.no_grad(), torch.random.fork_rng():
        outputs = outputs_of(model, on_each(lambda x: x.to(dtype) if x.is_floating_point() else x, inputs))
        counts, correct = counts_of(task), correct_of(task)
        answers = len(targets) if counts is None else max(1, int(counts(targets).sum()))
        accuracy = None if correct is None else float(correct(outputs, targets).sum()) / answers
        return float(task.loss(outputs, targets)), accuracy


ANY_MODE = ("groups", "worker_evaluation", "clock", "switch_after_round", "local", "data", "downlink")


@named("stopped", often=True, of_races=True, wants=ANY_MODE)
def stopped(lab: Lab, settings: Settings) -> str | None:
    """A stop returns the model that the last record describes, changes no earlier record, and loses no training."""
    rng, ending = choices(settings), Ending()
    settings = {key: value for key, value in serially(settings).items() if not key.startswith("stop.")}
    settings |= {"rounds": 2 * settings["rounds"], "checkpoint.every": 1}
    races = settings.get("mode") == "race"
    if races:  # records are means over the races, and only the model of the first one is returned
        settings["race.runs"] = 1
    callbacks: list[fedsim.Callback] = [ending]
    whole = [] if races else lab.run(settings).rounds
    names = [
        name for name in ("train_loss", "test_loss", "test_accuracy", "worker_loss") if any(r[name] for r in whole)
    ]
    names += [f"metrics.{name}" for name in (whole[0]["metrics"] if whole else {}) if not name.startswith("worker_")]
    if not names or rng.random() < 0.3:
        callbacks.append(StopAfter(rng.randint(1, settings["rounds"])))
    else:
        settings["stop.metric"] = name = rng.choice(names)
        values = [value for record in whole if (value := _number(record, name)) is not None]
        if values and rng.random() < 0.5:
            settings["stop.target"] = rng.choice(values)
        else:
            settings |= {"stop.patience": rng.randint(1, 2), "stop.min_delta": rng.choice([0.0, 0.1])}
    with lab.folder() as folder:
        result = result_of(settings, folder / "run", callbacks=callbacks)
    if ending.found:
        return f"after round {len(result.history)}: {ending.found}"
    for ours, theirs in zip(whole, [untimed(record) for record in result.history], strict=False):
        keys = [key for key in ours if key != "top_bytes" and json.dumps(ours[key]) != json.dumps(theirs[key])]
        if keys and (theirs["round"] < len(result.history) or len(result.history) == len(whole)):
            return f"with and without a stop: {keys[0]} of round {ours['round']} differs"
    return None


@contextlib.contextmanager
def _other_generators() -> Iterator[None]:
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1234)
    yield
    torch.set_rng_state(before[0])
    np.random.set_state(before[1])
    random.setstate(before[2])


def _generators() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()


GENERATORS = "generators"
FOREIGN = {setting.name: partial(foreign, setting) for setting in WALKED} | {GENERATORS: _other_generators}
READS = {setting.name: setting.read for setting in WALKED} | {GENERATORS: _generators}


@named("settings", often=True, of_races=True)
def global_settings(lab: Lab, settings: Settings) -> str | None:
    """What the user has set in PyTorch, NumPy and Python changes no bit of a run, and is found again after the run."""
    rng = choices(settings)
    race = settings.get("mode") == "race"
    if not race:
        settings = {"engine": rng.choice(["serial", "serial", "batched", "processes"]), **settings}
        settings["processes"] = 2 if settings["engine"] == "processes" else 1
    plain = None if race else Outcome.of(result_of(settings))
    for name in rng.sample([*FOREIGN], 4):
        with FOREIGN[name]():
            before = {key: read() for key, read in READS.items()}
            result = result_of(settings)
            changed = [key for key, read in READS.items() if read() != before[key]]
        if changed:
            return f"{changed[0]}: changed by the run"
        found = plain and difference(plain, Outcome.of(result), f"{settings['engine']} with and without {name}")
        if found:
            return found
    return None


@named("stated", often=True)
def stated(lab: Lab, settings: Settings) -> str | None:
    """The run folder states the experiment that ran: its file gives the same rows."""
    settings = serially(settings)
    with lab.folder() as folder:
        result = result_of(settings, folder / "run")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rerun = fedsim.run(folder / "run" / "experiment.toml", allow_imports=True)
    workers = {worker for record in result.history for worker in record.cohort}
    if not workers <= set(range(result.experiment.workers)):
        return f"workers {sorted(workers)} took part, of {result.experiment.workers}"
    return difference(Outcome.of(result), Outcome.of(rerun), "the run and that of its experiment.toml")


@named("names", often=True, wants=("partition",))
def names(lab: Lab, settings: Settings) -> str | None:
    """The names of owners, classes and files change no number."""
    settings = _of_owners(settings)
    plain = lab.run(settings)
    for naming in NAMINGS:
        try:
            other = lab.run({**settings, "data.naming": naming})
        except FedsimError as error:
            return f"{naming} names: {error}"
        if found := difference(plain, other, f"names such as {NAMINGS[naming].owners[0]!r} and {naming} names"):
            return found
    return None


def _of_owners(settings: Settings) -> Settings:
    """Return the experiment, on data of named owners, each of which is a worker."""
    of_data = ("data.", "task.", "model.", "partition.")
    if settings["data.name"] != OWNERS[0]["data.name"]:
        kept = {key: value for key, value in settings.items() if not key.startswith(of_data)}
        form = choices(settings).choice([OWNERS[0]] * len(OWNERS) + OWNERS)  # types of columns are only guessed in CSV
        settings = {**kept, **form, "model.name": "logistic"}
    settings = {**{key: value for key, value in settings.items() if not key.startswith("partition.")}, "workers": 6}
    settings["partition.name"] = "natural"
    for table in dict.fromkeys(key.partition(".")[0] for key in settings if key not in NEEDED):
        if is_runnable(settings):
            return settings
        settings = {k: v for k, v in settings.items() if k.partition(".")[0] != table or k in NEEDED}
    require(is_runnable(settings))
    return settings
