"""Application of several aggregation rules to the stored updates of one round, for `fedsim replay`."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedsim.aggregation import AggregationInputs, Gram, Pipeline, make_pipeline, resolve, screened
from fedsim.aggregation import rule as rules_by_name
from fedsim.aggregation.resolve import FORMS
from fedsim.asynchronous.combination import inputs_of_combination
from fedsim.config.experiment import Experiment
from fedsim.config.load import load_experiment
from fedsim.core.import_policy import reading_stored_run
from fedsim.core.text_wrapping import hang
from fedsim.errors import ExperimentError, RecordError, called, cut, plural, show
from fedsim.records.formatting import label
from fedsim.records.history import not_a_run
from fedsim.records.reader import read_partition
from fedsim.records.run_folder import EXPERIMENT
from fedsim.rounds.aggregator import inputs_of
from fedsim.system.files import is_file, require_regular, to_json, user_path
from fedsim.training.weights import weights_for_rule

FILE = re.compile(r"updates-(\d+)\.safetensors$")
MOST_BYTES = 2**40  # maximum size of a file of updates, which is memory-mapped
FLOATS, WHOLE = (torch.float32, torch.float64), (torch.int64,)
STORED = {  # dtypes and shape by name; "m" is any length
    "updates": (FLOATS, "nd"),
    "workers": (WHOLE, "n"),
    "byzantine": ((torch.bool,), "n"),
    "moment": (WHOLE, "m"),  # seeds the rule's random draws: (round,), (round, step), or that of `Combination`
    # only of synchronous rounds
    "samples": (WHOLE, "n"),
    "cohort_weights": (FLOATS, "n"),
    # only of asynchronous policies
    "version": (WHOLE, "1"),  # number of updates of the global model before the combination
    "receiver": (WHOLE, "1"),  # worker that combines, on a graph
    "f": (WHOLE, "1"),  # number of Byzantine neighbours that its rule must tolerate
    "weights": (FLOATS, "n"),
    "staleness": (WHOLE, "n"),
    # only for rules that use them
    "root": (FLOATS, "d"),
    "losses": (FLOATS, "n"),
    "last": (FLOATS, "d"),
    "models": (FLOATS, "nd"),
    "own": (WHOLE, "1"),
}
REQUIRED, OF_RULES = {"updates", "workers", "byzantine", "moment"}, {"root", "losses", "last", "models", "own"}
STATE = "state."  # prefix of the tensors that the rule returned in the previous aggregation
CHOSEN = 1e-6  # a worker counts as chosen if its coefficient exceeds this fraction of the largest coefficient


@dataclass(frozen=True)
class Replayed:
    """Result of one aggregation rule, applied to the stored updates of a round.

    Attributes:
        rule: name and parameters of the rule.
        update: aggregated update [d].
        shares: coefficient of each worker's update in the result, by worker ID. Several updates of one worker count
            together. None if the result is not a linear combination of the updates.
        byzantine_share: sum of the absolute coefficients of Byzantine workers, divided by that of all workers; None
            if `shares` is None.
        distance: Euclidean distance between the aggregated update and the mean of the honest updates.
        angle: angle between these two vectors, in degrees; NaN if one of them is zero.
        seconds: time that the rule took.
    """

    rule: str
    update: Tensor
    shares: dict[int, float] | None
    byzantine_share: float | None
    distance: float
    angle: float
    seconds: float

    @property
    def chosen(self) -> list[int] | None:
        """IDs of the workers whose updates contribute to the result; None if unknown."""
        if self.shares is None:
            return None
        most = max((abs(share) for share in self.shares.values()), default=0.0)
        return [worker for worker, share in self.shares.items() if abs(share) > CHOSEN * most]


@dataclass(frozen=True)
class StoredRound:
    """Updates of one round, loaded from a run folder.

    With an asynchronous policy, these are the vectors of the last combination in the round, on a graph that of the last
    honest worker that combined vectors. The vectors are gradients, updates or, on a graph, differences of models. The
    workers of the policy `basgd` are its buffers.

    Attributes:
        experiment: experiment of the run.
        round: number of the round.
        tensors: inputs of the aggregation rule by name, such as "updates" [n, d].
        names: name of each worker. Empty: the workers have no names.
    """

    experiment: Experiment
    round: int
    tensors: dict[str, Tensor]
    names: Sequence[str | None] = ()

    @property
    def workers(self) -> list[int]:
        """IDs of the workers that sent an update."""
        return self.tensors["workers"].tolist()

    @property
    def byzantine(self) -> list[int]:
        """IDs of the Byzantine workers that sent an update."""
        return list(dict.fromkeys(self.tensors["workers"][self.tensors["byzantine"]].tolist()))

    @property
    def place(self) -> str:
        """The round and, with an asynchronous policy, the update, the worker that combines, and the staleness."""
        parts, tensors = [f"round {self.round}"], self.tensors
        if "version" in tensors:
            parts.append(f"update {int(tensors['version']) + 1}")
        if "receiver" in tensors:
            parts.append(f"at worker {called(int(tensors['receiver']), self.names)}")
        if "staleness" in tensors:
            least, most = int(tensors["staleness"].min()), int(tensors["staleness"].max())
            parts.append(f"staleness {least}" + f" to {most}" * (most > least))
        return ", ".join(parts)

    @property
    def f(self) -> int:
        """Number of Byzantine updates that a rule must tolerate."""
        return int(self.tensors["f"]) if "f" in self.tensors else self.experiment.f

    @property
    def own(self) -> int | None:
        """Position of the row of the worker that combines, on a graph; None if a server combines."""
        return int(self.tensors["own"]) if "own" in self.tensors else None

    @property
    def dry_inputs(self) -> dict[str, Any]:
        """Inputs that a rule needs for `Pipeline.dry_run`, in addition to its own ones."""
        models = {"models": torch.zeros(len(self.workers), 8).double()} if "models" in self.tensors else {}
        return {"own": self.own, **models}

    @property
    def honest_mean(self) -> Tensor:
        """Mean of the honest workers' updates, float64 [d]."""
        return self.tensors["updates"][~self.tensors["byzantine"]].double().mean(0)


def stored_rounds(folder: str | Path) -> list[int]:
    """Return the numbers of the rounds whose updates are stored in the run folder, in ascending order."""
    return sorted(int(match.group(1)) for path in user_path(folder).iterdir() if (match := FILE.match(path.name)))


def load_round(folder: str | Path, round: int | None = None, *, allow_imports: bool = False) -> StoredRound:
    """Load the stored updates of one round of a run.

    Args:
        folder: run folder.
        round: number of the round; None for the last stored round.
        allow_imports: whether the run's experiment may use any importable object; see `load_experiment`.

    Raises RecordError if the updates of this round are missing or damaged.
    """
    folder = user_path(folder)
    if not is_file(folder / EXPERIMENT):
        raise RecordError(not_a_run(folder))
    rounds = stored_rounds(folder)
    if not rounds:
        raise RecordError(
            f"{folder}: has no stored updates; to store those of rounds 1 and 5, for example, repeat the run with "
            "'records.updates=[1,5]'"
        )
    round = rounds[-1] if round is None else round
    if round not in rounds:
        stored = ", ".join(map(str, rounds))
        raise RecordError(f"{folder}: has no updates of round {round}; stored rounds: {stored}")
    path = folder / f"updates-{round:05d}.safetensors"
    with reading_stored_run():
        experiment = load_experiment(folder / EXPERIMENT, allow_imports=allow_imports)
    try:
        require_regular(path, MOST_BYTES, inside=folder)
        tensors = load_file(path)
    except (OSError, SafetensorError, ValueError) as error:  # ValueError: a dtype that PyTorch does not support
        raise RecordError(f"{path}: cannot be read: {cut(str(error))}") from None
    if problem := _problem_with(tensors, experiment):
        raise RecordError(f"{path}: is damaged: {problem}")
    return StoredRound(experiment, round, tensors, read_partition(folder).names)


def _problem_with(tensors: dict[str, Tensor], experiment: Experiment) -> str | None:
    """Return what is wrong with the stored tensors of a round; None if they are valid."""
    by_probability = experiment.aggregate.weights == "inverse_probability"
    of_rounds = {"samples"} | ({"cohort_weights"} if by_probability else set())
    required = REQUIRED | (of_rounds if experiment.in_rounds else {"version"})
    if missing := required - set(tensors):
        return f"it lacks {', '.join(sorted(missing))}"
    n, d = (*tensors["updates"].shape, 0, 0)[:2]
    if tensors["updates"].ndim != 2 or not n or not d:
        return f"updates: must be [n, d] with at least one row, not {list(tensors['updates'].shape)}"
    for name in (name for name in STORED if name in tensors):
        kinds, shape = STORED[name]
        wanted = [{"n": n, "d": d, "1": 1, "m": tensors[name].numel()}[size] for size in shape]
        if tensors[name].dtype not in kinds or list(tensors[name].shape) != wanted:
            actual = f"{str(tensors[name].dtype).removeprefix('torch.')} {list(tensors[name].shape)}"
            return f"{cut(name)}: must be {kinds[0]} {wanted}, not {actual}".replace("torch.", "")
    workers = tensors["workers"]
    duplicates = experiment.in_rounds and len(workers.unique()) < n
    if duplicates or not 0 <= int(workers.min()) <= int(workers.max()) < experiment.workers:
        return f"workers: must be {n} worker IDs from 0 to {experiment.workers - 1}, without duplicates in a round"
    limits = dict.fromkeys(("samples", "moment", "version", "staleness", "f"), math.inf)
    for name, limit in (limits | {"own": n, "receiver": experiment.workers}).items():
        if name in tensors and not 0 <= int(tensors[name].min()) <= int(tensors[name].max()) < limit:
            return f"{name}: must be at least 0" + (f" and less than {limit}" if limit < math.inf else "")
    return None


def replay(stored: StoredRound, rules: Sequence[Any] | None = None) -> list[Replayed]:
    """Apply several aggregation rules to the updates of a stored round, and return one result per rule.

    The number of Byzantine workers that each rule assumes, and the weights, are those of the experiment. Updates with
    NaN or infinity are excluded, unless the rule is the experiment's own and `aggregate.nonfinite` is "keep".

    Args:
        stored: stored round.
        rules: rules to apply. Each is a name, a list as in `aggregate.rule`, or a dict with the key "rule". None: all
            `applicable_rules`, without those that refuse these updates.

    Raises ExperimentError if a rule is unknown or cannot be applied.
    """
    refusals = (ExperimentError,) if rules is None else ()
    rules = applicable_rules(stored) if rules is None else rules
    pipelines = [_pipeline(rule, stored.f) for rule in rules]
    for pipeline in pipelines:
        pipeline.dry_run(len(stored.workers), **stored.dry_inputs)
    grams: dict[int, Gram] = {}  # by number of updates
    results = []
    for rule, pipeline in zip(rules, pipelines, strict=True):
        keeps = stored.experiment.nonfinite == "keep" and pipeline.name == stored.experiment.rule.name
        cohort, _ = screened(_cohort(stored, pipeline), "keep" if keeps else "exclude")
        if pipeline.accepts("gram"):
            n = len(cohort.updates)
            cohort.gram = grams[n] = grams.get(n) or Gram(cohort.updates)
        with contextlib.suppress(*refusals):
            results.append(_measured(stored, pipeline, cohort, label(rule)))
    return results


def applicable_rules(stored: StoredRound) -> list[str]:
    """Return the names of all rules that can be applied to a stored round without further parameters."""
    names = []
    for registration in rules_by_name:
        required = {name for name, field in registration.parameters.model_fields.items() if field.is_required()}
        lacking = OF_RULES & set(registration.takes) - set(stored.tensors)
        if required <= {"f"} and not lacking:
            with contextlib.suppress(ExperimentError):
                pipeline = _pipeline(registration.name, stored.f)
                pipeline.dry_run(len(stored.workers), workers=stored.workers, **stored.dry_inputs)
                names.append(registration.name)
    return names


def _pipeline(rule: Any, f: int) -> Pipeline:
    params = {}
    if isinstance(rule, dict):
        rule, params = rule.get("rule"), {name: value for name, value in rule.items() if name != "rule"}
    if not isinstance(rule, (str, list)):
        raise ExperimentError(f"rules: {show(rule)} must be {FORMS}")
    return make_pipeline(resolve(rule, params, background={"f": f}))


def _cohort(stored: StoredRound, pipeline: Pipeline) -> AggregationInputs:
    tensors, experiment, workers = stored.tensors, stored.experiment, stored.workers
    given: dict[str, Any] = {name: tensors.get(name) for name in ("root", "losses", "last", "models", "staleness")}
    moment, updates = tuple(tensors["moment"].tolist()), tensors["updates"]
    if not experiment.in_rounds:
        state = {name.removeprefix(STATE): tensor for name, tensor in tensors.items() if name.startswith(STATE)}
        given["own"] = stored.own
        given["state"] = state if pipeline.name == experiment.rule.name else {}
        return inputs_of_combination(experiment, pipeline, moment, updates, workers, tensors.get("weights"), **given)
    samples = tensors["samples"].tolist()
    weights = weights_for_rule(experiment, pipeline, workers, samples, lambda: tensors["cohort_weights"].double())
    return inputs_of(experiment, moment, updates=updates, workers=workers, weights=weights, **given)


def _measured(stored: StoredRound, pipeline: Pipeline, cohort: AggregationInputs, label: str) -> Replayed:
    started = time.perf_counter()
    outcome = pipeline(cohort)
    seconds = time.perf_counter() - started
    shares: dict[int, float] | None = None
    byzantine_share: float | None = None
    if outcome.shares is not None and cohort.workers is not None:
        shares, attackers, byzantine = dict.fromkeys(stored.workers, 0.0), set(stored.byzantine), 0.0
        for worker, share in zip(cohort.workers, outcome.shares.tolist(), strict=True):
            shares[worker] += share
            byzantine += abs(share) * (worker in attackers)
        total = float(outcome.shares.abs().sum())
        byzantine_share = byzantine / total if total else 0.0
    update, honest = outcome.update.double(), stored.honest_mean
    cosine = float(update @ honest / (update.norm() * honest.norm()))
    angle = float(torch.rad2deg(torch.tensor(cosine, dtype=torch.double).clamp(-1, 1).acos()))
    distance = float((update - honest).norm())
    return Replayed(label, outcome.update, shares, byzantine_share, distance, angle, seconds)


def replay_table(stored: StoredRound, results: Sequence[Replayed], columns: int | None = None) -> str:
    """Return the results as a text table, at most `columns` characters wide."""
    width = max(len("rule"), *(len(result.rule) for result in results))
    attackers = ", ".join(called(worker, stored.names) for worker in stored.byzantine)
    byzantine = f"[{attackers}]" if attackers else "none"
    lines = [
        f"{stored.place}: {plural(len(stored.workers), 'update')}, of Byzantine workers {byzantine}; "
        f"|honest mean| = {float(stored.honest_mean.norm()):.4g}",
        f"{'rule':<{width}}  {'distance':>10}  {'angle':>7}  {'byzantine':>9}  {'ms':>8}  workers that counted",
    ]
    for result in results:
        byzantine = "" if result.byzantine_share is None else f"{100 * result.byzantine_share:.1f} %"
        figures = (
            f"{result.rule:<{width}}  {result.distance:>10.4g}  {result.angle:>6.1f}°  {byzantine:>9}  "
            f"{1000 * result.seconds:>8.2f}  "
        )
        lines.append(hang(figures, _described(result, stored.names), columns))
    return "\n".join(lines)


def replay_json(stored: StoredRound, results: Sequence[Replayed]) -> str:
    """Return the results as JSON text, without the aggregated updates."""
    fields = ("rule", "shares", "byzantine_share", "distance", "angle", "seconds")
    rules = [{field: getattr(result, field) for field in fields} for result in results]
    arrivals: dict[str, Any] = {}
    if not stored.experiment.in_rounds:
        tensors = {name: stored.tensors[name] for name in ("workers", "staleness") if name in stored.tensors}
        places = {name: int(stored.tensors[name]) for name in ("version", "receiver") if name in stored.tensors}
        arrivals = places | {name: tensor.tolist() for name, tensor in tensors.items()}
    return to_json({"round": stored.round, "byzantine": stored.byzantine, **arrivals, "rules": rules})


def _described(result: Replayed, names: Sequence[str | None]) -> str:
    if result.shares is None or result.chosen is None:
        return "(no weights of whole updates)"
    if not result.chosen:
        return "none"
    values = [result.shares[worker] for worker in result.chosen]
    chosen = [called(worker, names) for worker in result.chosen]
    if len(values) == 1:
        return f"worker {called(result.chosen[0], names)}"
    if max(values) - min(values) <= CHOSEN * abs(max(values)):
        every = len(values) == len(result.shares)
        return f"{'all' if every else 'workers ' + ', '.join(chosen)}, equally"
    shares = [f"{worker} ({value:.3f})" for worker, value in zip(chosen, values, strict=True)]
    return f"workers {', '.join(shares)}"
