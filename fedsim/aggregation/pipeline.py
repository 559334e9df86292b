"""From the workers' updates to one row: screening, pre-aggregators, and a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation.columns import bad_rows, column_blocks, combine
from fedsim.aggregation.gram import Gram
from fedsim.aggregation.rule import BoundRule, Mix, bind_rule, pre_aggregator, rule
from fedsim.devices import wide_dtype
from fedsim.errors import ExperimentError, nearest, show
from fedsim.randomness import numpy_generator
from fedsim.registry import Plug

Nonfinite = Literal["error", "exclude", "keep"]
Stage = str | dict[str, Any]

SHOWN = 5  # rows named in an error


@dataclass(frozen=True)
class Pipeline:
    """Pre-aggregators, if any, and the rule that ends them; pickles to other processes."""

    pre: tuple[BoundRule, ...]
    rule: BoundRule

    @property
    def name(self) -> str:
        """`nnm + trimmed_mean`."""
        return " + ".join(stage.name for stage in (*self.pre, self.rule))

    @property
    def columnwise(self) -> bool:
        """Whether each column of the result depends on that column of the updates alone."""
        return self.rule.columnwise and not self.pre

    @property
    def takes_weights(self) -> bool:
        return "weights" in self.rule.takes and not self.pre

    @property
    def needs_weights(self) -> bool:
        return self.takes_weights and self.rule.takes["weights"]

    def takes(self, name: str) -> bool:
        """Whether any stage takes what is called so."""
        return any(name in stage.takes for stage in (*self.pre, self.rule))

    def __call__(self, cohort: Cohort) -> Outcome:
        """What the rule makes of a cohort's updates."""
        rows = Rows(cohort.updates)
        for stage in self.pre:
            mix = stage(lambda name, rows=rows: cohort.menu(name, rows), cohort.f_for(stage))
            rows = rows.mixed(mix.coefficients)
        if self.rule.columnwise:
            return Outcome(self._by_columns(rows, cohort), self._linear_shares(rows, cohort))
        result = self.rule(lambda name: cohort.menu(name, rows), cohort.f_for(self.rule))
        result, state = result if isinstance(result, tuple) else (result, {})
        if isinstance(result, Tensor):
            return Outcome(result, state=state)
        return Outcome(rows.row(result), rows.shares(result), state)

    def _by_columns(self, rows: Rows, cohort: Cohort) -> Tensor:
        result = cohort.updates.new_empty(cohort.updates.shape[1])
        for block in column_blocks(len(result)):
            part = rows.block(block)
            result[block] = self.rule(
                lambda name, part=part: part if name == "updates" else cohort.menu(name, rows), cohort.f_for(self.rule)
            )
        return result

    def shares(self, cohort: Cohort) -> Tensor | None:
        """The coefficient with which each row goes into the result [n], where the rule is linear in all columns."""
        return self._linear_shares(Rows(cohort.updates), cohort) if self.columnwise else None

    def _linear_shares(self, rows: Rows, cohort: Cohort) -> Tensor | None:
        if not self.rule.linear:
            return None
        units = torch.eye(len(rows), dtype=wide_dtype(cohort.updates.device), device=cohort.updates.device)
        shares = self.rule(lambda name: units if name == "updates" else cohort.menu(name, rows))
        return rows.shares(Mix(shares.double().cpu()))

    def rehearse(self, n: int) -> None:
        """Try it on n short rows, so that a constraint that n and f break is found out before anything is trained.

        Raises the ExperimentError that a stage raises; what else goes wrong may be due to the rows.
        """
        updates = torch.randn(n, 8, generator=torch.Generator().manual_seed(0), dtype=torch.double)
        ones = torch.ones(n, dtype=torch.double)
        cohort = Cohort(updates, ones if self.needs_weights else None, root=updates[0], losses=ones)
        try:
            self(cohort)
        except ExperimentError as error:
            raise ExperimentError(*(f"aggregate.rule, with a cohort of {n}: {line}" for line in error.lines)) from None
        except Exception:
            return


@dataclass(frozen=True)
class Outcome:
    """What an aggregation gave.

    Attributes:
        update: [d].
        shares: the coefficient with which each row went into it, float64 [n]; None where a rule has no such thing.
        state: what a rule with a state wants to see next time.
    """

    update: Tensor
    shares: Tensor | None = None
    state: dict[str, Tensor] = field(default_factory=dict)


class Rows:
    """The updates, or rows that pre-aggregators mix of them; these are made block by block, as they are needed."""

    def __init__(self, updates: Tensor, mixing: Tensor | None = None, gram: Callable[[], Gram] | None = None) -> None:
        self._updates, self._mixing = updates, mixing
        self._make_gram = gram or (lambda: Gram(updates))

    def __len__(self) -> int:
        return len(self._updates) if self._mixing is None else len(self._mixing)

    @cached_property
    def gram(self) -> Gram:
        return self._make_gram()

    def mixed(self, matrix: Tensor) -> Rows:
        """The rows matrix [m', m] @ rows."""
        mixing = matrix if self._mixing is None else matrix @ self._mixing
        return Rows(self._updates, mixing, lambda: self.gram.mixed(matrix))

    def block(self, columns: slice = slice(None)) -> Tensor:
        """The rows at these columns."""
        part = self._updates[:, columns]
        return part if self._mixing is None else self._mixing.to(part.device, part.dtype) @ part

    def row(self, mix: Mix) -> Tensor:
        """The one row [d] that a mix of these rows is."""
        if mix.then is None:
            row = combine(self._of_updates(mix.coefficients), self._updates)
            return row if mix.base is None else row + mix.base
        matrix = self._of_updates(mix.coefficients).to(self._updates.device, self._updates.dtype)
        result = self._updates.new_empty(self._updates.shape[1])
        chosen = matrix.any(0).nonzero().flatten()
        for block in column_blocks(len(result)):
            result[block] = mix.then(_matmul(matrix, chosen, self._updates[:, block]))
        return result

    def shares(self, mix: Mix) -> Tensor:
        """The coefficient of each update in a mix, [n]."""
        coefficients = self._of_updates(mix.coefficients)
        return coefficients if coefficients.ndim == 1 else coefficients.mean(0)

    def _of_updates(self, coefficients: Tensor) -> Tensor:
        return coefficients if self._mixing is None else coefficients @ self._mixing


def _matmul(matrix: Tensor, chosen: Tensor, block: Tensor) -> Tensor:
    """matrix @ block, where only the rows `chosen` of the block count; mere choices of rows cost no arithmetic."""
    if bool((matrix.count_nonzero(1) == 1).all()) and bool(((matrix == 0) | (matrix == 1)).all()):
        return block[matrix.argmax(1)]
    return matrix[:, chosen] @ block[chosen]


@dataclass
class Cohort:
    """Everything that a rule may be given about one aggregation; see `fedsim.aggregation.rule`."""

    updates: Tensor
    weights: Tensor | None = None
    root: Tensor | None = None
    losses: Tensor | None = None
    workers: list[int] | None = None
    rng: np.random.Generator | None = None
    state: dict[str, Tensor] | None = None  # None: nobody will see it again
    last: Tensor | None = None
    excluded: int = 0  # rows that were screened out, which count among the f
    gram: Gram | None = None  # of the updates, if it has been computed already

    def __post_init__(self) -> None:
        if self.workers is None:
            self.workers = list(range(len(self.updates)))

    def f_for(self, stage: BoundRule) -> int | None:
        return None if stage.f is None else max(0, stage.f - self.excluded)

    def menu(self, name: str, rows: Rows) -> Any:
        """What a stage takes under this name, where `rows` have come so far."""
        if name == "updates":
            return rows.block()
        if name == "gram":
            return self.gram if self.gram is not None and rows._mixing is None else rows.gram
        if name == "rng":
            self.rng = self.rng or numpy_generator(0, "aggregate")
            return self.rng
        if name == "workers":
            return self.workers if len(rows) == len(self.updates) else list(range(len(rows)))
        value = getattr(self, name)
        if value is None and name == "root":
            raise ExperimentError("this rule needs root [d], the update that the server's own data gives")
        if value is None and name == "losses":
            raise ExperimentError("this rule needs losses [n], each worker's loss at the global row")
        return value


def screened(cohort: Cohort, nonfinite: Nonfinite) -> tuple[Cohort, list[int]]:
    """The cohort without rows that hold a NaN or an infinity, and which rows those were; it may be the same cohort.

    Raises ExperimentError where there are any and the policy is "error", or where no row is left.
    """
    bad = [] if nonfinite == "keep" else bad_rows(cohort.updates)
    if not bad:
        return cohort, []
    assert cohort.workers is not None
    counted = [row for row in bad if cohort.weights is None or cohort.weights[row] > 0]
    if nonfinite == "error" and counted:
        bad = counted
        named = ", ".join(str(cohort.workers[row]) for row in bad[:SHOWN]) + (", ..." if len(bad) > SHOWN else "")
        raise ExperimentError(
            f"{len(bad)} of {len(cohort.updates)} updates hold NaN or infinity (rows of workers {named}); "
            'nonfinite = "exclude" leaves such rows out'
        )
    good = [row for row in range(len(cohort.updates)) if row not in set(bad)]
    if not good:
        raise ExperimentError(f"all {len(bad)} updates hold NaN or infinity; none is left to aggregate")
    kept = Cohort(
        updates=cohort.updates[good],
        weights=None if cohort.weights is None else cohort.weights[good],
        root=cohort.root,
        losses=None if cohort.losses is None else cohort.losses[good],
        workers=[cohort.workers[row] for row in good],
        rng=cohort.rng,
        state=cohort.state,
        last=cohort.last,
        excluded=cohort.excluded + len(bad),
    )
    return kept, bad


def resolve(
    stages: Stage | Sequence[Stage],
    params: dict[str, Any],
    place: str = "rule",
    beside: Sequence[str] = (),
    background: dict[str, Any] | None = None,
) -> list[tuple[Plug, dict[str, Any]]]:
    """A rule, or a list of pre-aggregators and a rule, with every parameter checked.

    Args:
        stages: names, "package.module:function", or tables {rule = name, parameters}.
        params: parameters by name, each of which goes to every stage that has one of that name.
        place: what an error calls the table that holds `params`.
        beside: other keys of that table, for hints.
        background: further parameters, which no stage need have; zero leaves a stage's own default as it is.

    Returns a list of (plug, its checked parameters), the rule last.

    Raises ExperimentError, one line per problem.
    """
    tables = [{"rule": stage} if isinstance(stage, str) else dict(stage) for stage in _as_list(stages)]
    if not tables:
        raise ExperimentError(f"{_key(place)} = []: needs a rule, such as \"mean\"")
    for table in tables:
        if not isinstance(table.get("rule"), str):
            raise ExperimentError(f"{_key(place)}: a stage is a name or a table with the key rule, not {show(table)}")
    plugs = [_stage_plug(table["rule"], is_last=table is tables[-1], place=place) for table in tables]
    known = {name for plug in plugs for name in plug.parameters.model_fields}
    free = any(plug.parameters.model_config.get("extra") == "allow" for plug in plugs)
    unknown = [] if free else [name for name in params if name not in known]
    if unknown:
        where = f"{place}." if place != "rule" else ""
        kind = f"unknown key (the rule is {' + '.join(plug.name for plug in plugs)})"
        keys = list(dict.fromkeys([*beside, *sorted(known)]))
        lines = [f"{where}{name} = {show(params[name])}: {kind}; {nearest(name, keys)}" for name in unknown]
        raise ExperimentError(*lines)
    resolved = []
    for plug, table in zip(plugs, tables, strict=True):
        own = {name: value for name, value in table.items() if name != "rule"}
        takes_any = plug.parameters.model_config.get("extra") == "allow"
        fields = plug.parameters.model_fields
        further = {name: value for name, value in (background or {}).items() if name in fields}
        shared = {name: value for name, value in further.items() if value or fields[name].is_required()}
        shared |= {name: value for name, value in params.items() if takes_any or name in fields}
        resolved.append((plug, plug.check({**shared, **own}, "" if place == "rule" else place, beside=beside)))
    if len(plugs) > 1 and plugs[-1].takes.get("weights"):
        raise ExperimentError(f"{_key(place)}: {plugs[-1].name} needs weights, which mixed rows do not have; use mean")
    return resolved


def make_pipeline(resolved: Sequence[tuple[Plug, dict[str, Any]]]) -> Pipeline:
    """The pipeline of what `resolve` gave."""
    bound = [bind_rule(plug, params) for plug, params in resolved]
    return Pipeline(tuple(bound[:-1]), bound[-1])


def _as_list(stages: Stage | Sequence[Stage]) -> list[Stage]:
    return [stages] if isinstance(stages, (str, dict)) else list(stages)


def _key(place: str) -> str:
    return place if place == "rule" else f"{place}.rule"


def _stage_plug(name: str, *, is_last: bool, place: str) -> Plug:
    key = _key(place)
    if not is_last and name in rule.names() and name not in pre_aggregator.names():
        raise ExperimentError(
            f"{key}: {name} ends a list; before it come pre-aggregators: {', '.join(pre_aggregator.names())}"
        )
    if is_last and name in pre_aggregator.names() and name not in rule.names():
        raise ExperimentError(
            f'{key} = {show(name)}: a pre-aggregator makes rows of rows; follow it by a rule, as in ["{name}", "mean"]'
        )
    return (rule if is_last else pre_aggregator).get(name, key)


def aggregate(
    updates: Tensor,
    weights: Tensor | Sequence[float] | None = None,
    rule: Stage | Sequence[Stage] = "mean",
    *,
    root: Tensor | None = None,
    losses: Tensor | Sequence[float] | None = None,
    last: Tensor | None = None,
    seed: int = 0,
    nonfinite: Nonfinite = "error",
    **params: Any,
) -> Tensor:
    """Aggregate the rows of `updates` with a rule: `aggregate(updates, rule="krum", f=2)`.

    Args:
        updates: [n, d], any floating dtype and device; left unchanged.
        weights: [n], finite and >= 0, need not sum to one. A rule without a weighted form refuses them; one that
            needs them takes equal ones where they are left out.
        rule: a registered name (see `fedsim.rules()`), "package.module:function", or a list of pre-aggregators that
            ends in a rule: `["nnm", "trimmed_mean"]`. A stage with parameters of its own is a table:
            `[{"rule": "bucketing", "s": 3}, "krum"]`.
        root: [d], for rules that need the update that the server's own data gives (fltrust).
        losses: [n], for rules that need each worker's loss (qfedavg).
        last: [d], where centered_clipping starts.
        seed: of random draws (bucketing, dnc, signguard), which are a pure function of it.
        nonfinite: what becomes of rows that hold NaN or infinity: "error", "exclude" (they count among the f), "keep".
        params: parameters by name; each goes to every stage that has one of that name.

    Returns the aggregate [d], with the dtype and device of `updates`.

    Raises ExperimentError (a ValueError) for an unknown rule, a wrong parameter, a wrong shape, impossible weights,
    rows that are not finite, or a constraint on n and f that does not hold.
    """
    pipeline = make_pipeline(resolve(rule, params))
    cohort = _checked_cohort(updates, weights, pipeline)
    n, d = updates.shape
    cohort.rng = numpy_generator(seed, "aggregate")
    cohort.root = _checked("root", root, (d,), updates)
    cohort.last = _checked("last", last, (d,), updates)
    if losses is not None:
        cohort.losses = _checked("losses", torch.as_tensor(losses), (n,), updates)
        assert cohort.losses is not None
        cohort.losses = cohort.losses.double()
    kept, _ = screened(cohort, nonfinite)
    return pipeline(kept).update


def pre_aggregate(updates: Tensor, rule: Stage | Sequence[Stage], *, seed: int = 0, **params: Any) -> Tensor:
    """The rows [m, d] that pre-aggregators make of `updates` [n, d]: `pre_aggregate(updates, "nnm", f=2)`.

    Arguments and errors are those of `aggregate`.
    """
    pipeline = make_pipeline(resolve([*_as_list(rule), "mean"], params))
    cohort = _checked_cohort(updates, None, pipeline)
    cohort.rng = numpy_generator(seed, "aggregate")
    rows = Rows(screened(cohort, "error")[0].updates)
    for stage in pipeline.pre:
        rows = rows.mixed(stage(lambda name, rows=rows: cohort.menu(name, rows), stage.f).coefficients)
    return rows.block()


def _checked_cohort(updates: Tensor, weights: Tensor | Sequence[float] | None, pipeline: Pipeline) -> Cohort:
    if updates.ndim != 2 or not len(updates) or not updates.is_floating_point():
        raise ExperimentError(
            f"updates: must be a floating tensor [n, d] with n >= 1, not {updates.dtype} {tuple(updates.shape)}"
        )
    updates = updates.detach()
    if weights is not None:
        weights = _checked_weights(weights, updates, pipeline)
    elif pipeline.needs_weights:
        weights = torch.ones(len(updates), dtype=torch.double, device=updates.device)
    return Cohort(updates, weights)


def _checked_weights(weights: Tensor | Sequence[float], updates: Tensor, pipeline: Pipeline) -> Tensor:
    weights = torch.as_tensor(weights, dtype=torch.double, device=updates.device)
    if not pipeline.takes_weights:
        raise ExperimentError(f"weights: the rule {pipeline.name} has no weighted form")
    if weights.shape != (len(updates),):
        raise ExperimentError(f"weights: {len(updates)} rows need shape ({len(updates)},), not {tuple(weights.shape)}")
    if not bool(((weights >= 0) & weights.isfinite()).all()) or not bool(weights.any()):
        raise ExperimentError("weights: must be finite, >= 0 and not all zero")
    return weights


def _checked(name: str, value: Tensor | None, shape: tuple[int, ...], updates: Tensor) -> Tensor | None:
    if value is None:
        return None
    if tuple(value.shape) != shape or not bool(value.isfinite().all()):
        raise ExperimentError(f"{name}: must be finite, of shape {shape}, not {tuple(value.shape)}")
    return value.to(updates.device)
