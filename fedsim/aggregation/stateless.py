"""Aggregation in one line, on tensors, arrays and state_dicts."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from fedsim.aggregation.cohort import Cohort, Nonfinite, screened
from fedsim.aggregation.columns import all_finite
from fedsim.aggregation.containers import as_row, as_rows
from fedsim.aggregation.pipeline import Pipeline
from fedsim.aggregation.resolving import Stage, as_list, make_pipeline, resolve
from fedsim.aggregation.threads import alone_if_small
from fedsim.errors import ExperimentError, nearest, show
from fedsim.system.precision import full_precision


def aggregate(
    updates: Any,
    weights: Tensor | Sequence[float] | None = None,
    rule: Stage | Sequence[Stage] = "mean",
    *,
    root: Any = None,
    losses: Tensor | Sequence[float] | None = None,
    last: Any = None,
    seed: int = 0,
    nonfinite: Nonfinite = "error",
    **params: Any,
) -> Any:
    """Aggregate the rows of `updates` with a rule: `aggregate(updates, rule="krum", f=2)`.

    Args:
        updates: a tensor or NumPy array [n, d], any floating dtype and device; or a list of n updates: tensors or
            arrays of any shape, dicts of them (state_dicts) or lists of them. Left unchanged. Entries that are not
            floating, as BatchNorm's num_batches_tracked, are taken from the first update.
        weights: [n], finite and >= 0, need not sum to one. A rule without a weighted form refuses them; one that
            needs them takes equal ones where they are left out.
        rule: a registered name (see `fedsim.rules()`), "package.module:function", a function, or a list of
            pre-aggregators that ends in a rule: `["nnm", "trimmed_mean"]`. A stage with parameters of its own is a
            table: `[{"rule": "bucketing", "s": 3}, "krum"]`.
        root: [d], or of the form of one update, for rules that need the update of the server's own data (fltrust).
        losses: [n], for rules that need each worker's loss (qfedavg).
        last: [d], or of the form of one update, where centered_clipping starts.
        seed: of random draws (bucketing, dnc, signguard), which are a pure function of it.
        nonfinite: what becomes of rows that hold NaN or infinity: "error", "exclude" (they count among the f), "keep".
        params: parameters by name; each goes to every stage that has one of that name.

    Returns the aggregate, of the form, dtype and device of one update: [d] for a matrix [n, d].

    Raises ExperimentError (a ValueError) for an unknown rule, a wrong parameter, a wrong shape, impossible weights,
    rows that are not finite, or a constraint on n and f that does not hold.
    """
    if nonfinite not in get_args(Nonfinite):
        raise ExperimentError(f"nonfinite = {show(nonfinite)}: {nearest(str(nonfinite), get_args(Nonfinite))}")
    pipeline = _pipeline(rule, params)
    updates, rebuild = as_rows(updates, "updates")
    cohort = _checked_cohort(updates, weights, pipeline)
    n, d = updates.shape
    cohort.seed = seed
    cohort.root = _checked("root", as_row(root, "root"), (d,), updates)
    cohort.last = _checked("last", as_row(last, "last"), (d,), updates)
    if losses is not None:
        cohort.losses = _checked("losses", losses, (n,), updates)
        assert cohort.losses is not None
        cohort.losses = cohort.losses.cpu().double()
    with alone_if_small(updates.numel()), full_precision(updates.device):
        return rebuild(_aggregated(cohort, pipeline, nonfinite))


def _aggregated(cohort: Cohort, pipeline: Pipeline, nonfinite: Nonfinite) -> Tensor:
    linear = pipeline.rule.linear  # then a number that is not finite, in a row that counts, is so in the result
    if pipeline.columnwise and (linear or cohort.updates.device.type != "cpu"):
        update = pipeline.by_columns(cohort)
        if math.isfinite(update.sum() if linear else update.sum() + cohort.updates.sum()):  # one wait for the device
            return update
    kept, _ = screened(cohort, nonfinite)
    update = pipeline(kept).update
    if nonfinite != "keep" and not all_finite(update):
        raise ExperimentError(
            f"{pipeline.name}: the result is not finite; the updates hold values up to "
            f"{float(kept.updates.abs().max()):.3g}, and {update.dtype} ends at {torch.finfo(update.dtype).max:.3g}"
        )
    return update


def pre_aggregate(updates: Any, rule: Stage | Sequence[Stage], *, seed: int = 0, **params: Any) -> Any:
    """The rows [m, d] that pre-aggregators make of `updates` [n, d]: `pre_aggregate(updates, "nnm", f=2)`.

    Arguments and errors are those of `aggregate`. A list of updates gives a list of m updates.
    """
    pipeline = make_pipeline(resolve([*as_list(rule), "mean"], params))
    updates, rebuild = as_rows(updates, "updates")
    cohort = _checked_cohort(updates, None, pipeline)
    cohort.seed = seed
    with alone_if_small(updates.numel()), full_precision(updates.device):
        return rebuild(pipeline.rows(screened(cohort, "error")[0]).block())


def _pipeline(rule: Stage | Sequence[Stage], params: dict[str, Any]) -> Pipeline:
    """What `rule` and `params` stand for; a registered rule with the same parameters is looked up once."""
    if isinstance(rule, str) and ":" not in rule:
        with contextlib.suppress(TypeError):  # a parameter that cannot be a key
            return _remembered(rule, **params)
    return make_pipeline(resolve(rule, params))


@functools.lru_cache(maxsize=64, typed=True)  # 2 and 2.0 are not the same f
def _remembered(rule: str, /, **params: Any) -> Pipeline:
    return make_pipeline(resolve(rule, params))


def _checked_cohort(updates: Tensor, weights: Tensor | Sequence[float] | None, pipeline: Pipeline) -> Cohort:
    if not isinstance(updates, Tensor):
        raise ExperimentError(f"updates: must be a floating tensor [n, d], not a {type(updates).__name__}")
    if updates.ndim != 2 or not len(updates) or not updates.is_floating_point():
        raise ExperimentError(
            f"updates: must be a floating tensor [n, d] with n >= 1, not {updates.dtype} {tuple(updates.shape)}"
        )
    updates = updates.detach()
    if weights is not None:
        weights = _checked_weights(weights, updates, pipeline)
    elif pipeline.needs_weights:
        weights = torch.ones(len(updates), dtype=torch.double)
    return Cohort(updates, weights)


def _checked_weights(weights: Tensor | Sequence[float], updates: Tensor, pipeline: Pipeline) -> Tensor:
    try:
        weights = torch.as_tensor(weights, dtype=torch.double, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise ExperimentError(f"weights: must be {len(updates)} numbers, not {show(weights)}") from None
    if not pipeline.takes_weights:
        raise ExperimentError(f"weights: the rule {pipeline.name} has no weighted form")
    if weights.shape != (len(updates),):
        raise ExperimentError(f"weights: {len(updates)} rows need shape ({len(updates)},), not {tuple(weights.shape)}")
    if not bool(((weights >= 0) & weights.isfinite()).all()) or not bool(weights.any()):
        raise ExperimentError("weights: must be finite, >= 0 and not all zero")
    return weights if bool(weights.sum().isfinite()) else weights / weights.max()


def _checked(
    name: str, value: Tensor | Sequence[float] | None, shape: tuple[int, ...], updates: Tensor
) -> Tensor | None:
    if value is None:
        return None
    try:
        value = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise ExperimentError(f"{name}: must be numbers of shape {shape}, not {show(value)}") from None
    if tuple(value.shape) != shape:
        raise ExperimentError(f"{name}: must be of shape {shape}, not {tuple(value.shape)}")
    if not bool(value.isfinite().all()):
        raise ExperimentError(f"{name}: must be finite; {int((~value.isfinite()).sum())} of its numbers are not")
    return value.to(updates.device)
