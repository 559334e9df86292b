"""One stored round taken through many rules: what would each have made of it?"""

from __future__ import annotations

import contextlib
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

from fedsim.aggregation import Cohort, Gram, Pipeline, make_pipeline, resolve, screened
from fedsim.aggregation import rule as rules_by_name
from fedsim.engines import Engine
from fedsim.errors import ExperimentError, RecordError, cut, printable, show
from fedsim.experiment import Experiment
from fedsim.loading import load_experiment
from fedsim.preparation import Setting
from fedsim.records import EXPERIMENT, RoundRecord
from fedsim.system.files import is_file, require_regular, to_json
from fedsim.wrapping import hang

FILE = re.compile(r"updates-(\d+)\.safetensors$")
MOST_BYTES = 2**40  # of a file of updates, which is mapped, not read
FLOATS, WHOLE = (torch.float32, torch.float64), (torch.int64,)
KEPT = {  # by name: types, and shape
    "updates": (FLOATS, "nd"),
    "workers": (WHOLE, "n"),
    "samples": (WHOLE, "n"),
    "byzantine": ((torch.bool,), "n"),
}
KEPT_BY_SOME = {"root": (FLOATS, "d"), "losses": (FLOATS, "n")}
COUNTS = 1e-6  # a share of at least so much of the largest makes a row one of the chosen


@dataclass(frozen=True)
class Replayed:
    """What a rule made of a round.

    Attributes:
        rule: as it was asked for.
        update: [d].
        shares: the coefficient with which each worker's row went into it, by worker; None where a rule has no such.
        byzantine_share: the Byzantine workers' part of the sum of absolute coefficients; None likewise.
        distance: |update - honest mean|.
        angle: between the update and the honest mean, in degrees; NaN where one of them is zero.
        seconds: that the rule took, without the products of all pairs that the rules share.
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
        """The workers that counted."""
        if self.shares is None:
            return None
        most = max((abs(share) for share in self.shares.values()), default=0.0)
        return [worker for worker, share in self.shares.items() if abs(share) > COUNTS * most]


@dataclass(frozen=True)
class StoredRound:
    """The updates of one round, as the rule was given them; see `RunFolder.updates`."""

    experiment: Experiment
    round: int
    tensors: dict[str, Tensor]

    @property
    def workers(self) -> list[int]:
        return self.tensors["workers"].tolist()

    @property
    def byzantine(self) -> list[int]:
        """The Byzantine workers among them."""
        return self.tensors["workers"][self.tensors["byzantine"]].tolist()

    @property
    def f(self) -> int:
        """How many Byzantine rows the experiment's rule was to withstand."""
        return self.experiment.f

    @property
    def honest_mean(self) -> Tensor:
        return self.tensors["updates"][~self.tensors["byzantine"]].double().mean(0)


def stored_rounds(folder: str | Path) -> list[int]:
    """The rounds of a run whose updates it has kept, ascending."""
    return sorted(int(match.group(1)) for path in Path(folder).iterdir() if (match := FILE.match(path.name)))


def load_round(folder: str | Path, round: int | None = None, *, allow_imports: bool = False) -> StoredRound:
    """One kept round of a run; the last one where `round` is left out.

    `allow_imports`: whether the run's experiment may name whatever can be imported; see `load_experiment`.

    Raises RecordError where the folder has none, not this one, or a damaged one.
    """
    folder = Path(folder)
    if not is_file(folder / EXPERIMENT):
        raise RecordError(f"{folder}: is not a run folder (it has no {EXPERIMENT})")
    kept = stored_rounds(folder)
    if not kept:
        raise RecordError(f"{folder}: keeps no round's updates; run it with records.updates=[1,5], say")
    round = kept[-1] if round is None else round
    if round not in kept:
        raise RecordError(f"{folder}: keeps the updates of rounds {', '.join(map(str, kept))}, not of {round}")
    path = folder / f"updates-{round:05d}.safetensors"
    experiment = load_experiment(folder / EXPERIMENT, allow_imports=allow_imports)
    try:
        require_regular(path, MOST_BYTES, inside=folder)
        tensors = load_file(path)
    except (OSError, SafetensorError, ValueError) as error:  # ValueError: of a type that PyTorch has not
        raise RecordError(f"{path}: cannot be read: {cut(printable(str(error)))}") from None
    if problem := _problem_with(tensors, experiment):
        raise RecordError(f"{path}: {problem}")
    return StoredRound(experiment, round, tensors)


def _problem_with(tensors: dict[str, Tensor], experiment: Experiment) -> str | None:
    """In what these tensors are not what `RunFolder.updates` writes; None where they are."""
    missing = set(KEPT) - set(tensors)
    if missing:
        return f"lacks {', '.join(sorted(missing))}"
    n, d = (*tensors["updates"].shape, 0, 0)[:2]
    if tensors["updates"].ndim != 2 or not n or not d:
        return f"updates: must be [n, d] with a row at least, not {list(tensors['updates'].shape)}"
    for name, (kinds, shape) in {**KEPT, **KEPT_BY_SOME}.items():
        wanted = [{"n": n, "d": d}[size] for size in shape]
        if name not in tensors:
            continue
        if tensors[name].dtype not in kinds or list(tensors[name].shape) != wanted:
            found = f"{str(tensors[name].dtype).removeprefix('torch.')} {list(tensors[name].shape)}"
            return f"{cut(name)}: must be {kinds[0]} {wanted}, not {found}".replace("torch.", "")
    workers = tensors["workers"]
    if len(workers.unique()) < n or not 0 <= int(workers.min()) <= int(workers.max()) < experiment.workers:
        return f"workers: must be {n} different ones, from 0 to {experiment.workers - 1}"
    if int(tensors["samples"].min()) < 0:
        return "samples: must be at least 0"
    return None


def replay(stored: StoredRound, rules: Sequence[Any]) -> list[Replayed]:
    """What each of `rules` (names, lists as in `aggregate.rule`, tables) would have made of a stored round.

    Rules that go by distances share one product of all pairs. f is what the experiment's rule was to withstand, weights
    are those that the experiment would have given, and a rule with a state starts afresh. Rows that are not finite are
    left out.

    Raises ExperimentError for an unknown rule, or one whose constraint does not hold; before any has run.
    """
    pipelines = [_pipeline(rule, stored.f) for rule in rules]
    for pipeline in pipelines:
        pipeline.rehearse(len(stored.workers))
    gram: Gram | None = None
    results = []
    for rule, pipeline in zip(rules, pipelines, strict=True):
        cohort, bad = screened(_cohort(stored, pipeline), "exclude")
        if pipeline.takes("gram"):
            gram = gram or Gram(cohort.updates)
            cohort.gram = gram
        results.append(_measured(stored, pipeline, cohort, bad, _label(rule)))
    return results


def applicable_rules(stored: StoredRound) -> list[str]:
    """The names of all rules that can do with what was stored, no parameter but f, and as many rows as there are."""
    names = []
    for plug in rules_by_name:
        required = {name for name, field in plug.parameters.model_fields.items() if field.is_required()}
        lacking = {"root", "losses"} & set(plug.takes) - set(stored.tensors)
        if required <= {"f"} and not lacking:
            with contextlib.suppress(ExperimentError):
                _pipeline(plug.name, stored.f).rehearse(len(stored.workers))
                names.append(plug.name)
    return names


def _pipeline(rule: Any, f: int) -> Pipeline:
    params = {}
    if isinstance(rule, dict):
        rule, params = rule.get("rule"), {name: value for name, value in rule.items() if name != "rule"}
    if not isinstance(rule, (str, list)):
        raise ExperimentError(f"rules: {show(rule)} is not a rule; give a name, or a list of names and tables")
    return make_pipeline(resolve(rule, params, background={"f": f}))


def _label(rule: Any) -> str:
    """A rule as it was asked for: `nnm + multi_krum (m = 2)`."""
    if isinstance(rule, list):
        return " + ".join(map(_label, rule))
    if not isinstance(rule, dict):
        return str(rule)
    params = ", ".join(f"{name} = {show(value)}" for name, value in rule.items() if name != "rule")
    return _label(rule["rule"]) + (f" ({params})" if params else "")


def _cohort(stored: StoredRound, pipeline: Pipeline) -> Cohort:
    tensors, experiment = stored.tensors, stored.experiment
    weights = experiment.aggregate.weights or ("samples" if pipeline.needs_weights else "uniform")
    values: Tensor | None = torch.ones(len(tensors["updates"]), dtype=torch.double)
    if weights == "samples":
        values = tensors["samples"].double()
    elif isinstance(weights, list):
        values = torch.tensor([weights[worker] for worker in stored.workers], dtype=torch.double)
    elif not pipeline.needs_weights:
        values = None
    return Cohort(
        updates=tensors["updates"],
        weights=values if pipeline.takes_weights else None,
        root=tensors.get("root"),
        losses=tensors.get("losses"),
        workers=stored.workers,
        seed=experiment.seed,
        moment=(stored.round,),
        local_lr=experiment.local_lr,
        sync="gradients" if stored.round <= experiment.rounds_of_gradients else "parameters",
    )


def _measured(stored: StoredRound, pipeline: Pipeline, cohort: Cohort, bad: list[int], label: str) -> Replayed:
    started = time.perf_counter()
    outcome = pipeline(cohort)
    seconds = time.perf_counter() - started
    shares: dict[int, float] | None = None
    byzantine_share: float | None = None
    if outcome.shares is not None and cohort.workers is not None:
        shares = dict.fromkeys(stored.workers, 0.0)
        shares |= zip(cohort.workers, outcome.shares.tolist(), strict=True)
        total = sum(map(abs, shares.values()))
        byzantine = sum(abs(shares[worker]) for worker in stored.byzantine)
        byzantine_share = byzantine / total if total else 0.0
    update, honest = outcome.update.double(), stored.honest_mean
    cosine = float(update @ honest / (update.norm() * honest.norm()))
    angle = float(torch.rad2deg(torch.tensor(cosine, dtype=torch.double).clamp(-1, 1).acos()))
    distance = float((update - honest).norm())
    return Replayed(label, outcome.update, shares, byzantine_share, distance, angle, seconds)


def replay_table(stored: StoredRound, results: Sequence[Replayed], columns: int | None = None) -> str:
    """The results as lines of a table, broken so as not to need more than so many columns."""
    width = max(len("rule"), *(len(result.rule) for result in results))
    lines = [
        f"round {stored.round}: {len(stored.workers)} updates, of Byzantine workers {stored.byzantine or 'none'}; "
        f"|honest mean| = {float(stored.honest_mean.norm()):.4g}",
        f"{'rule':<{width}}  {'distance':>10}  {'angle':>7}  {'byzantine':>9}  {'ms':>8}  workers that counted",
    ]
    for result in results:
        byzantine = "" if result.byzantine_share is None else f"{100 * result.byzantine_share:.1f} %"
        figures = (
            f"{result.rule:<{width}}  {result.distance:>10.4g}  {result.angle:>6.1f}°  {byzantine:>9}  "
            f"{1000 * result.seconds:>8.2f}  "
        )
        lines.append(hang(figures, _described(result), columns))
    return "\n".join(lines)


def replay_json(stored: StoredRound, results: Sequence[Replayed]) -> str:
    """The results as JSON, without the updates themselves."""
    fields = ("rule", "shares", "byzantine_share", "distance", "angle", "seconds")
    rules = [{field: getattr(result, field) for field in fields} for result in results]
    return to_json({"round": stored.round, "byzantine": stored.byzantine, "rules": rules})


def _described(result: Replayed) -> str:
    if result.shares is None or result.chosen is None:
        return "(each coordinate by itself)"
    if not result.chosen:
        return "none"
    values = [result.shares[worker] for worker in result.chosen]
    if max(values) - min(values) <= COUNTS * abs(max(values)):
        return ("all" if len(values) == len(result.shares) else ", ".join(map(str, result.chosen))) + ", equally"
    return ", ".join(f"{worker} ({result.shares[worker]:.3f})" for worker in result.chosen)


def kept_updates(setting: Setting, engine: Engine, record: RoundRecord) -> dict[str, Tensor]:
    """What the rule was given in the round that has just ended, on the CPU; see `RunFolder.updates`.

    Where gradients are aggregated that is the last step's gradients of the whole cohort. Nothing in a process that
    writes nothing.
    """
    memory, cohort, rule = engine.memory, record["cohort"], setting.task.rule
    gathered = engine.round_rows(cohort, record["round"])
    if gathered is None:
        return {}
    (rows, losses), n = gathered, len(cohort)
    kept = {
        "updates": rows[:n],
        "workers": torch.tensor(cohort),
        "samples": torch.tensor([memory.shards.size(worker) for worker in cohort]),
        "byzantine": torch.tensor([worker in setting.task.byzantine for worker in cohort]),
    }
    if rule.takes("root"):
        kept["root"] = rows[-1]
    if rule.takes("losses"):
        kept["losses"] = losses[:n]
    return {name: tensor.cpu().clone() for name, tensor in kept.items()}
