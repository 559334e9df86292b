"""Properties that every experiment has. Each function returns what violates it, or None.

A function raises `NotApplicable` if the experiment does not have what the property is about. Results that are equal
only up to rounding are compared in float64. A difference that a change of the initial model by 1e-12 also causes does
not count, because the experiment is ill-conditioned there.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import json
import math
import random
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import getitem
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import fedsim
from fedsim.asynchronous.combination import Combination
from fedsim.cli.rule_replay import load_round, replay, stored_rounds
from fedsim.clients import UpdateCorrection
from fedsim.config.experiment import Experiment
from fedsim.config.load import load_experiment, with_data
from fedsim.core.model_inputs import on_each, outputs_of, split_inputs
from fedsim.core.randomness import batch_order, draw_key
from fedsim.errors import FedsimError
from fedsim.records.record import LARGEST
from tests.device.pretend import pretend_gpu
from tests.fuzz.draw import Settings, loaded
from tests.fuzz.runs import Lab, Outcome, result_of, run, untimed
from tests.waves import in_waves

ROUNDING = 1e-9  # relative difference of float64 results after a few rounds
# Adam divides a gradient that is 0 up to rounding, such as that of a bias before BatchNorm, by its small eps.
ROUNDING_OF_ADAM = 1e-6
PERTURBATION = 1e-12
WHOLE_SHARD = 10_000  # a batch size that is larger than each shard
# inputs of components that depend on the order of the workers
DRAWING = {"rng", "draws", "seed", "generator", "workers", "worker"}

Check = Callable[[Lab, Settings], str | None]


@dataclass(frozen=True)
class Property:
    """A property of every experiment.

    Attributes:
        check: function that returns what violates the property, or None.
        wants: groups of keys, of which the draws for this property often have one.
        often: whether the property concerns every experiment and is quick, and is therefore checked more often.
        of_races: whether races have the property.
    """

    check: Check
    wants: tuple[str, ...] = ()
    often: bool = False
    of_races: bool = False


PROPERTIES: dict[str, Property] = {}


class NotApplicable(Exception):  # noqa: N818
    """The experiment lacks what the property is about."""


def named(name: str, **traits: Any) -> Callable[[Check], Check]:
    def register(function: Check) -> Check:
        PROPERTIES[name] = Property(function, **traits)
        return function

    return register


def require(condition: Any) -> None:
    if not condition:
        raise NotApplicable


def difference(ours: Outcome, theirs: Outcome, names: str) -> str | None:
    """Return where two outcomes differ in a bit."""
    if not equal(ours.row, theirs.row):
        return f"{names}: the models differ by {distance(ours.row, theirs.row):.3g}"
    if not all(equal(ours.state[key], theirs.state[key]) for key in ours.state):
        return f"{names}: the buffers differ"
    for one, other in itertools.zip_longest(ours.rounds, theirs.rounds, fillvalue={}):
        keys = [key for key in one | other if json.dumps(one.get(key)) != json.dumps(other.get(key))]
        if keys:
            key = keys[0]
            return f"{names}: {key} of round {one.get('round')} is {one.get(key)} and {other.get(key)}"
    return None


def equal(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference relative to the largest value. Infinity if only one of the two is finite."""
    if ours.shape != theirs.shape or not torch.equal(ours.isfinite(), theirs.isfinite()):
        return math.inf
    finite = ours.isfinite()
    if not finite.any():
        return 0.0
    ours, theirs = ours[finite].double(), theirs[finite].double()
    return float((ours - theirs).abs().max() / (1 + ours.abs().max()))


def far(lab: Lab, settings: Settings, ours: Outcome, theirs: Outcome, names: str) -> str | None:
    """Return where two outcomes differ by more than rounding, unless perturbed runs differ as much."""
    worst, where = farthest(ours, theirs)
    adapts = str(settings.get("local.algorithm")).startswith("ada")
    if worst <= (ROUNDING_OF_ADAM if adapts else ROUNDING) or _moves(lab, settings, worst):
        return None
    return f"{names}: {where} by {worst:.3g}"


def farthest(ours: Outcome, theirs: Outcome) -> tuple[float, str]:
    """Return the largest distance of two outcomes in their models and losses, and where it is."""
    worst, where = distance(ours.row, theirs.row), "the models differ"
    for one, other in zip(ours.rounds, theirs.rounds, strict=True):
        for key in ("train_loss", "test_loss"):
            if one[key] is None or other[key] is None or not math.isfinite(one[key]):
                continue
            apart = abs(one[key] - other[key]) / (1 + max(abs(one[key]), abs(other[key])))
            if apart > worst:
                worst, where = apart, f"{key} of round {one['round']} differs"
    return worst, where


def _moves(lab: Lab, settings: Settings, apart: float) -> bool:
    """Whether tiny changes of the initial model change the result as much."""
    plain = lab.run(settings)
    for seed in range(3):
        moved = run({"engine": "serial", **settings}, callbacks=[Perturbed(seed)])
        if len(moved.rounds) != len(plain.rounds) or farthest(plain, moved)[0] >= apart / 10:
            return True
    return False


class Perturbed(fedsim.Callback):
    """Callback that changes each initial parameter by a random relative amount of about 1e-12.

    On a graph, each worker has an initial model of its own, which is perturbed differently.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def on_start(self, run: Any) -> None:
        server = getattr(run.loop, "_server", None)  # of an asynchronous run
        for row in [run.engine.shared.server.row, *([] if server is None else server.replicas)]:
            noise = torch.randn(row.shape, generator=self._generator, dtype=row.dtype)
            row.mul_(1 + PERTURBATION * noise).add_(noise, alpha=PERTURBATION)


def serially(settings: Settings) -> Settings:
    """Return the settings with the engine `serial`, unless they have another engine or need several processes."""
    return settings if settings.get("mode") == "race" else {"engine": "serial", **settings}


def in_float64(settings: Settings) -> Settings:
    return {**settings, "precision": "float64"}


@named("hash seed", often=True)
def hash_seed(lab: Lab, settings: Settings) -> str | None:
    """The same command gives the same bits in each process."""
    first, second = lab.in_children(settings)
    return difference(first, second, "two processes")


@named("stacks", often=True)
def stacks(lab: Lab, settings: Settings) -> str | None:
    """`batched` gives the numbers of `serial`, up to rounding."""
    settings = in_float64(settings)
    batched = lab.run(settings, engine="batched", processes=1)
    return far(lab, settings, lab.run(settings), batched, "serial and batched")


@named("gpu")
def gpu(lab: Lab, settings: Settings) -> str | None:
    """A run on the pretend GPU gives the numbers of the CPU, up to rounding, with single workers and with stacks."""
    settings = in_float64(settings)
    for engine in ("serial", "batched"):
        with pretend_gpu():
            outcome = run({**settings, "device": "cuda", "engine": engine, "processes": 1})
        if found := far(lab, settings, lab.run(settings), outcome, f"the CPU and {engine} on the GPU"):
            return found
    return None


@named("pool", often=True)
def pool(lab: Lab, settings: Settings) -> str | None:
    """`processes` gives the bits of `serial`."""
    return difference(lab.run(settings), lab.run(settings, engine="processes", processes=2), "serial and processes")


@named("waves")
def waves(lab: Lab, settings: Settings) -> str | None:
    """Updates that are added up in waves give the numbers of stored updates, and the same bits in 1 and 2 processes."""
    settings = in_float64(settings)
    require(load_experiment(settings).stores_updates is None)
    with in_waves():
        serial = run({**settings, "engine": "serial"})
        others = {n: run({**settings, "engine": "auto", "processes": n}) for n in (1, 2)}
        ranked = lab.on_ranks({**settings, "engine": "distributed"}, in_waves=True)[0]
    stored = lab.run(settings)
    return (
        far(lab, settings, stored, serial, "stored updates and waves")
        or far(lab, settings, stored, others[1], "stored updates and waves of `auto`")
        or far(lab, settings, stored, ranked, "stored updates and waves on ranks")
        or difference(others[1], others[2], "waves in 1 and 2 processes")
    )


@named("ranks")
def ranks(lab: Lab, settings: Settings) -> str | None:
    """Ranks give the numbers of `serial`, up to rounding, and all ranks have the same model."""
    settings = in_float64(settings)
    require(settings.get("mode", "rounds") == "rounds")
    first, second = lab.on_ranks({**settings, "engine": "distributed"})
    if not equal(first.row, second.row):
        return "the models of two ranks differ"
    return far(lab, settings, lab.run(settings), first, "serial and ranks")


@named("resumed")
def resumed(lab: Lab, settings: Settings) -> str | None:
    """An interrupted and resumed run gives the bits of a whole run."""
    settings = {"engine": "serial", **settings, "checkpoint.every": 1}
    whole = lab.run(settings)
    require(len(whole.rounds) > 1)

    def interrupt(record: Any) -> None:
        raise KeyboardInterrupt

    with lab.folder() as folder:
        with contextlib.suppress(KeyboardInterrupt):
            run(settings, folder / "run", on_round=interrupt)
        try:
            again = run(settings, folder / "run", resume=True)
        except FedsimError as error:
            return f"cannot be resumed: {error}"
    return difference(whole, again, "whole and resumed")


@named("processes")
def processes(lab: Lab, settings: Settings) -> str | None:
    """The number of processes that `auto` uses changes no bit."""
    outcomes = {count: lab.run(settings, engine="auto", processes=count) for count in (1, 2, 4)}
    differences = (difference(outcomes[1], outcomes[n], f"1 and {n} processes") for n in (2, 4))
    return next(filter(None, differences), None)


@named("jobs")
def jobs(lab: Lab, settings: Settings) -> str | None:
    """The number of jobs, missing runs and shards change no bit of the runs of a comparison."""
    require(not settings.keys() & {"stop.patience", "stop.target"})
    plan = {"seed": [settings["seed"], settings["seed"] + 1]}
    with lab.folder() as folder:
        at_once = _compared(settings, plan, folder / "1", jobs=1)
        others = {"2 jobs": _compared(settings, plan, folder / "2", jobs=2)}
        missing = sorted((folder / "2" / "runs").iterdir())[0]
        shutil.rmtree(missing)
        others["2 jobs and one missing run"] = _compared(settings, plan, folder / "2", jobs=2)
        single = {"seed": plan["seed"][:1]}
        others["a part of the runs"] = _compared(settings, single, folder / "3", jobs=2)
    for how, rounds in others.items():
        for run_id, theirs in rounds.items():
            ours = at_once.get(run_id, at_once[min(at_once)])
            if json.dumps(ours) != json.dumps(theirs):
                return f"1 job and {how}: the records of {run_id} differ"
    return None


def _compared(settings: Settings, plan: Settings, out: Path, jobs: int) -> dict[str, Any]:
    """Run a comparison, and return the records of each run by its folder's name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet = {"records.curve": False, "records.figures": []}
        comparison = fedsim.compare({**quiet, **settings}, plan, out, jobs, progress=False)
    if comparison.failed:
        raise NotApplicable  # reported by the property `hash seed`
    return {f"seed{run.point['seed']}": [untimed(record) for record in run.history] for run in comparison.runs}


@named("nothing left")
def nothing_left(lab: Lab, settings: Settings) -> str | None:
    """Repeated runs in one process leave no tensor behind."""
    counts = []
    for _ in range(4):
        run({**settings, "engine": "batched", "processes": 1})
        gc.collect()
        counts.append(sum(isinstance(item, Tensor) for item in gc.get_objects()))
    return f"live tensors after each run: {counts}" if counts[1] < counts[2] < counts[3] else None


@named("threads")
def threads(lab: Lab, settings: Settings) -> str | None:
    """Runs in threads, or in another order, give the bits of runs one after another, or are refused."""
    experiments = [{"engine": "serial", **settings, "seed": settings["seed"] + k} for k in range(3)]
    expected = [run(table) for table in experiments]
    again = [run(table) for table in reversed(experiments)][::-1]
    outcomes: list[Outcome | Exception | None] = [None] * len(experiments)
    start = threading.Barrier(len(experiments))

    def work(place: int) -> None:
        start.wait()
        try:
            outcomes[place] = Outcome.of(fedsim.run({"records.curve": False, **experiments[place]}))
        except Exception as error:
            outcomes[place] = error

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        workers = [threading.Thread(target=work, args=[place]) for place in range(len(experiments))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for place, outcome in enumerate(outcomes):
        if found := difference(expected[place], again[place], "two orders"):
            return found
        if isinstance(outcome, Exception):
            if not isinstance(outcome, FedsimError):
                return f"in a thread: {outcome!r}"
        elif found := difference(expected[place], outcome, "one after another and in threads"):
            return found
    return None


@named("plain loop")
def plain_loop(lab: Lab, settings: Settings) -> str | None:
    """One worker trains like a plain loop of PyTorch."""
    kept = _reduced(settings, ("local.batch_size", "local.drop_last", "local.clip_norm", *_optimizer_keys(settings)))
    kept["workers"] = 1
    experiment = with_data(load_experiment(kept))
    train = _train(kept)
    shard = torch.from_numpy(fedsim.partition(train.targets, "iid", 1, seed=kept["seed"])[0])
    size = experiment.local.batch_size
    require(isinstance(size, int) and len(shard) >= size)

    def batches(round: int) -> Iterator[Any]:
        for epoch in itertools.count():
            parts = shard[batch_order(kept["seed"], round, 0, epoch, len(shard))].split(size)
            parts = parts[:-1] if experiment.local.drop_last and len(parts[-1]) < size else parts
            yield len(parts), map(train.gather, parts)

    expected = _plain(experiment, batches, train.targets)
    actual = lab.run(kept)
    return far(lab, kept, actual, Outcome(expected, {}, actual.rounds), "one worker and a plain loop")


@named("large batch")
def large_batch(lab: Lab, settings: Settings) -> str | None:
    """Workers that send gradients train like one large batch of all their samples."""
    kept = _reduced(settings, ()) | {"sync": "gradients", "local.batch_size": WHOLE_SHARD}
    if settings.get("local.algorithm", "sgd") == "sgd" and "local.lr" in settings:
        kept["local.lr"] = settings["local.lr"]
    experiment = with_data(load_experiment(kept))
    train = _train(kept)
    batch = train.gather(torch.arange(len(train)))
    require(_decomposes(experiment, batch))
    expected = _plain(experiment, lambda round: itertools.repeat((1, [batch])), train.targets)
    actual = lab.run(kept)
    return far(lab, kept, actual, Outcome(expected, {}, actual.rounds), "workers and one large batch")


def _reduced(settings: Settings, more: tuple[str, ...]) -> Settings:
    """Return the settings of data, model and local work alone."""
    prefixes = ("data.name", "data.form", "data.train", "data.shape", "data.classes", "model.", "task.")
    keys = {"rounds", "workers", "seed", "local.steps", "local.epochs", *more}
    kept = {key: value for key, value in settings.items() if key in keys or key.startswith(prefixes)}
    kept = {key: value for key, value in kept.items() if not key.startswith("model.lora.")}
    work = kept.get("local.steps", kept.get("local.epochs"))
    require(isinstance(work, int))
    return in_float64(kept)


def _optimizer_keys(settings: Settings) -> list[str]:
    """Return the keys of a client algorithm that `torch.optim` has too."""
    algorithm = settings.get("local.algorithm", "sgd")
    require(_torch_optimizer(algorithm) and algorithm != "muon")  # which PyTorch rounds to bfloat16
    own = (
        "local.schedule",
        "local.keep_optimizer_state",
        "local.accumulation_steps",
        "local.fragments",
        "local.momentum_at",
        "local.trainable",
    )
    return [key for key in settings if key.startswith("local.") and not key.startswith(own)]


def _torch_optimizer(name: str) -> Any:
    return next((kind for key, kind in vars(torch.optim).items() if key.lower() == name), None)


def _train(settings: Settings) -> fedsim.TensorData:
    data = {key: value for key, value in settings.items() if key.startswith("data.")}
    return loaded(data)[0].to(torch.device("cpu"), torch.float64)


def _plain(experiment: Experiment, batches: Callable[[int], Iterator[Any]], trained: Tensor) -> Tensor:
    """Train a model with an optimizer of PyTorch.

    `batches` yields the number of batches and an epoch's batches. `trained`: targets of all training samples.
    """
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(draw_key(experiment.seed, "model"))
        model = experiment.model.component().double().train()
    require(not any(isinstance(m, nn.Dropout) and m.p for m in model.modules()))
    rates = [getattr(m, "dropout", 0) for m in model.modules()]
    require(all(isinstance(rate, nn.Module) or not rate for rate in rates))
    local, params = experiment.local, dict(experiment.local.params)
    params.pop("momentum_at", None)
    if "beta1" in params:
        params["betas"] = params.pop("beta1"), params.pop("beta2")
    for round in range(1, experiment.rounds + 1):
        optimizer = _torch_optimizer(local.algorithm)(model.parameters(), **params)
        steps = 0
        for epoch, (_, parts) in enumerate(batches(round)):
            if (local.steps is None and epoch == local.epochs) or steps == local.steps:
                break
            for inputs, targets in parts:
                if steps == local.steps:
                    break
                optimizer.zero_grad()
                _loss(experiment, outputs_of(model, inputs), targets, trained).backward()
                if local.clip_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), local.clip_norm)
                optimizer.step()
                steps += 1
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def _loss(experiment: Experiment, outputs: Tensor, targets: Tensor, trained: Tensor) -> Tensor:
    """Return the training loss of a batch, with class weights if there are any, sample by sample."""
    task, weights = experiment.task.component, experiment.task.params.get("class_weights")
    if not weights:
        return task.loss(outputs, targets)
    if weights == "balanced":
        classes = dict(zip(*(values.tolist() for values in trained.unique(return_counts=True)), strict=True))
        weights = {label: len(trained) / (len(classes) * count) for label, count in classes.items()}
    losses = task.loss(outputs, targets, "none")
    return sum(weights[label] * loss for label, loss in zip(targets.tolist(), losses, strict=True)) / len(targets)


def _decomposes(experiment: Experiment, batch: Any) -> bool:
    """Whether the loss of a batch is the mean over its samples, as it is not with BatchNorm or padded tokens."""
    with torch.no_grad(), torch.random.fork_rng():
        model, loss = experiment.model.component().double().train(), experiment.task.component.loss
        even = slice(len(batch[1]) // 2 * 2)
        inputs, targets = (on_each(getitem, part, even) for part in batch)
        whole, by_two = (
            outputs_of(model, inputs),
            torch.cat([outputs_of(model, two) for two in split_inputs(inputs, 2)]),
        )
        drawn = torch.randn_like(whole)  # a new model may have the same loss for all targets
        parts = [loss(two, of_two) for two, of_two in zip(drawn.split(2), targets.split(2), strict=True)]
        apart = max(distance(whole, by_two), abs(float(loss(drawn, targets) - sum(parts) / len(parts))))
        return apart < 1e-12


PER_WORKER = [f"local.{key}" for key in ("lr", "momentum", "clip_norm", "steps", "epochs")]  # may be lists


@named("permuted")
def permuted(lab: Lab, settings: Settings) -> str | None:
    """Other numbers for the same workers change nothing, if nothing is drawn for each worker."""
    settings = _without_draws(settings)
    experiment, n = with_data(load_experiment(settings)), settings["workers"]
    train = _train(settings)
    params = experiment.partition.params
    try:
        drawn = fedsim.partition(train.targets, experiment.partition.name, n, seed=settings["seed"], **params)
    except (FedsimError, TypeError, ValueError):
        raise NotApplicable from None
    shards = [shard.tolist() for shard in drawn]
    order = random.Random(json.dumps(settings)).sample(range(n), n)
    settings = {key: value for key, value in settings.items() if not key.startswith("partition.")}
    settings |= {"partition.name": "given", "partition.shards": shards}
    if experiment.group_count:
        settings["groups"] = experiment.grouping.tolist()
    other = {**settings, "partition.shards": [shards[k] for k in order]}
    for key, value in settings.items():
        if key in ("aggregate.weights", "groups", *PER_WORKER) and isinstance(value, list):
            other[key] = [value[k] for k in order]
        if key == "attack.workers":
            other[key] = [order.index(k) for k in value]
    return far(lab, settings, lab.run(settings), lab.run(other), "workers and permuted workers")


def _without_draws(settings: Settings) -> Settings:
    """Return the experiment with whole shards as batches and without groups of keys that draw for each worker."""
    drawing = ("sampling.", "clock.", "privacy.", "data.augment", "data.local_test", "data.validation")
    prefixes = (*drawing, "stop.", "worker_ev")
    kept = {key: value for key, value in settings.items() if not key.startswith(prefixes)}
    for key in ("cohort", "downlink", "attack.fraction", "attack.resample", "attack.by_class"):
        kept.pop(key, None)
    require(kept.pop("mode", "rounds") == "rounds" or "policy.name" not in kept)
    kept = in_float64({**kept, "local.batch_size": WHOLE_SHARD})
    experiment = with_data(load_experiment(kept))
    require(experiment.in_rounds and experiment.local.component.sample_noise is None)
    require(all(form == "list" for form, _ in experiment.local.varying.values()))
    components = [*experiment.chain, experiment.attack.component, *experiment.rule.pre, experiment.rule.rule]
    require(not any(DRAWING & set(component.accepts) for component in components))
    with torch.random.fork_rng():
        model = experiment.model.component()
    require(not any(isinstance(m, nn.Dropout) and m.p for m in model.modules()))
    return kept


@named("replay")
def replayed(lab: Lab, settings: Settings) -> str | None:
    """`fedsim replay` shows the weights and the aggregate of the run."""
    tests = ("worker_evaluation.", "data.local_test_fraction")  # which overwrite the updates
    settings = {key: value for key, value in settings.items() if not key.startswith(tests)}
    settings = {"engine": "serial", **settings, "records.updates": [settings["rounds"]], "records.model": False}
    require(settings["rounds"] > 0)
    if not load_experiment(settings).in_rounds:
        return _replayed_combination(lab, settings)
    with lab.folder() as folder:
        rows = Rows()
        result = result_of(settings, folder / "run", callbacks=[rows])
        require(stored_rounds(folder / "run") == [settings["rounds"]] and len(result.history) == settings["rounds"])
        stored = load_round(folder / "run", allow_imports=True)
    experiment, record = result.experiment, result.history[-1]
    require(not experiment.rule.accepts("state") or settings["rounds"] == 1)  # a replay starts without a state
    require(experiment.rounds_of_gradients < settings["rounds"])  # else the record has means over the steps
    rule = settings.get("aggregate.rule", experiment.aggregate.rule)
    stage = rule if isinstance(rule, list) else {"rule": rule, **experiment.aggregate.params}
    answer = replay(stored, [stage])[0]
    require(record.weights is not None and answer.shares is not None)
    for worker, share in zip(record.cohort, record.weights, strict=True):
        if abs(share - answer.shares.get(worker, 0.0)) > 1e-5:
            return (
                f"worker {worker} has weight {share:.6g} in the run and {answer.shares.get(worker):.6g} in the replay"
            )
    plain = experiment.server == type(experiment.server)() and not experiment.privacy.component.active
    if plain and not experiment.rounds_of_gradients and not isinstance(experiment.local.component, UpdateCorrection):
        apart = distance(rows.rows[-1] - rows.rows[-2], answer.update)
        if apart > 1e-5:
            return f"the update of the run and that of the replay differ by {apart:.3g}"
    return None


def _replayed_combination(lab: Lab, settings: Settings) -> str | None:
    """`fedsim replay` gives the bits of what an asynchronous policy combined last in a round."""
    results: list[Tensor] = []
    apply = Combination._apply

    def watched(combination: Any, server: Any, *args: Any, **more: Any) -> Any:
        result = apply(combination, server, *args, **more)
        if more.get("remember", True) and more.get("place", -1) not in combination.attackers(server.round):
            results.append(result.update.clone())
        return result

    with lab.folder() as folder, mock.patch.object(Combination, "_apply", watched):
        experiment = result_of(settings, folder / "run").experiment
        require(stored_rounds(folder / "run") == [settings["rounds"]])
        stored = load_round(folder / "run", allow_imports=True)
    rule, params = experiment.aggregate.rule, experiment.aggregate.params
    answer = replay(stored, [{"rule": rule, **params} if params else rule])[0].update
    return None if equal(answer, results[-1]) else f"the run and its replay differ by {distance(answer, results[-1])}"


@named("race log", of_races=True, wants=("race",))
def race_log(lab: Lab, settings: Settings) -> str | None:
    """The clock gives the bits of a race whose log it replays."""
    require(settings.get("mode") == "race" and load_experiment(settings).policy.component.locking == "server")
    with lab.folder() as folder:
        raced = result_of({**settings, "race.runs": 1}, folder / "run")
        kept = {key: value for key, value in settings.items() if not key.startswith(("race.", "stop."))}
        log = {"mode": "clock", "engine": "serial", "clock.replay_log": str(folder / "run")}
        again = result_of({**kept, **log, "rounds": len(raced.history)})
    if not equal(raced.global_row, again.global_row):
        return f"a race and its replay differ by {distance(raced.global_row, again.global_row):.3g}"
    for ours, theirs in zip(raced.history, again.history, strict=True):
        if ours["asynchronous"] != theirs["asynchronous"]:
            return f"a race and its replay: round {ours.round} has {ours['asynchronous']} and {theirs['asynchronous']}"
    return None


class Rows(fedsim.Callback):
    """Keeps the global model before the first round and after each round."""

    def on_start(self, run: Any) -> None:
        self._run, self.rows = run, [run.global_row]

    def on_round(self, record: Any) -> None:
        self.rows.append(self._run.global_row)


@named("epsilon")
def epsilon(lab: Lab, settings: Settings) -> str | None:
    """The recorded epsilon is at least that of all noisy sums with one sample or worker, and at most the target."""
    experiment = with_data(load_experiment(settings))
    releases, target = experiment.releases(holders=1), experiment.privacy.target_epsilon
    require(releases is not None and (releases.noise or target) and (releases.effective_sampling is None or target))
    shards: dict[int, Any] = {}
    noises: list[float] = []

    class Shards(fedsim.Callback):
        def on_start(self, run: Any) -> None:
            noises.append(run.task.experiment.releases(holders=1).noise)
            shards.update({k: run.engine.shared.data.shards.of(k).tolist() for k in range(experiment.workers)})

    result = result_of({"engine": "serial", **settings}, callbacks=[Shards()])
    recorded = result.history[-1].metrics.get("epsilon")
    if target is not None and (recorded is None or recorded > target):
        return f"epsilon is recorded as {recorded}, more than privacy.target_epsilon = {target}"
    require(releases.effective_sampling is None)
    counts: dict[Any, int] = {}
    by_samples = experiment.local.component.sample_noise is not None
    for worker in (worker for record in result.history for worker in record.cohort):
        units = shards[worker] if by_samples else [f"worker {worker}"]
        for unit in units:
            counts[unit] = counts.get(unit, 0) + (_least_uses(experiment, len(units)) if by_samples else 1)
    require(counts and max(counts.values()) > 0)
    exact = _gaussian_epsilon(math.sqrt(max(counts.values())) / noises[0], experiment.privacy.delta)
    if recorded is None or recorded < exact * (1 - 1e-6):
        return f"epsilon is recorded as {recorded}, but {max(counts.values())} releases of one sample have {exact:.4g}"
    return None


def _least_uses(experiment: Experiment, samples: int) -> int:
    """Return how many batches of a round contain each sample of a shard at least."""
    local = experiment.local
    require(isinstance(local.steps, (int, type(None))) and isinstance(local.epochs, (int, type(None))))
    require(not local.drop_last)
    return local.epochs if local.steps is None else local.steps // math.ceil(samples / local.batch_size)


def _gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the exact epsilon of Gaussian noise with sensitivity / deviation = mu (Balle and Wang 2018)."""

    def log_normal(x: float) -> float:
        return float(torch.special.log_ndtr(torch.tensor(x, dtype=torch.double)))

    low, high = 0.0, mu * mu / 2 + 50 * mu + 1
    for _ in range(100):
        middle = (low + high) / 2
        first, second = log_normal(mu / 2 - middle / mu), middle + log_normal(-mu / 2 - middle / mu)
        low, high = (middle, high) if math.exp(first) - math.exp(second) > delta else (low, middle)
    return low


@named("printed", of_races=True)
def printed(lab: Lab, settings: Settings) -> str | None:
    """What a run prints and returns is what its folder has."""
    settings, shown = serially(settings), io.StringIO()
    with lab.folder() as folder:
        with contextlib.redirect_stdout(shown):
            result = result_of(settings, folder / "run", progress=True)
        stored = fedsim.load_run(folder / "run", allow_imports=True)
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        if not torch.equal(stored.global_row, result.global_row):
            return "the stored model differs from the returned one"
        returned = [untimed(record) for record in result.history]
        if json.dumps(_finite(returned)) != json.dumps(_finite([untimed(record) for record in stored.history])):
            return "the stored records differ from the returned ones"
    text = shown.getvalue().splitlines()
    begin = next(place for place, line in enumerate(text) if line.startswith("round "))
    columns = re.split(r"\s{2,}", text[begin].strip())
    rows = [line.split() for line in text[begin + 1 :] if re.match(r"\s+\d+\s", line)]
    if len(rows) != len(lines):
        return f"{len(rows)} rounds are printed, {len(lines)} are stored"
    for cells, line in zip(rows, lines, strict=True):
        numbers = {**line, "accuracy": line["test_accuracy"], "virtual s": line["virtual_seconds"], **line["metrics"]}
        numbers |= {"val loss": line["validation_loss"], "val accuracy": line["validation_accuracy"]}
        for column, cell in zip(columns, cells, strict=False):
            number = numbers.get(column, numbers.get(column.replace(" ", "_")))
            if isinstance(number, (int, float)) and re.fullmatch(r"-?\d+(\.\d+)?(e[+-]\d+)?", cell):
                digits = len(cell.partition("e")[0].partition(".")[2])
                unit = 10.0 ** (int(cell.partition("e")[2] or 0) - digits)
                if abs(float(cell) - number) > max(0.51 * unit, 1e-9 * abs(number)):
                    return f"{column} of round {line['round']} is printed as {cell} and stored as {number}"
    return None


def _finite(value: Any) -> Any:
    """Replace NaN, infinity and numbers that records drop by None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not abs(value) <= LARGEST else value


@named("timeline", wants=("clock", "policy.name"))
def timeline(lab: Lab, settings: Settings) -> str | None:
    """Training and waiting fill the rounds of the virtual clock, unless workers leave or are drawn."""
    settings, begun = serially(settings), 0.0
    require(settings.get("mode") == "clock")
    fewer = settings.get("cohort", settings["workers"]) < settings["workers"]
    fewer |= any(key.startswith("clock.departures") for key in settings)
    for line in lab.run(settings).rounds:
        end, spent = line["virtual_seconds"], line["timeline"]
        require(spent is not None)  # otherwise the round repeats a race, or has diverged
        for worker, *seconds in zip(spent["workers"], spent["training"], spent["waiting"], strict=True):
            missing = end - begun - sum(seconds)
            if missing < -1e-9 * end or (missing > 1e-9 * end and not fewer):
                return f"worker {worker} spent {sum(seconds)} of {end - begun} seconds in round {line['round']}"
        begun = end
    return None
