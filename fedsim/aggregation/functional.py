"""Aggregation in one line, on tensors, arrays and state_dicts."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, cast, get_args

import torch
from torch import Tensor

from fedsim.aggregation.containers import as_rows, checked_matrix
from fedsim.aggregation.inputs import AggregationInputs, Nonfinite, screened
from fedsim.aggregation.numerics.columns import all_finite
from fedsim.aggregation.numerics.threads import alone_if_small
from fedsim.aggregation.pipeline import AggregationResult, Pipeline
from fedsim.aggregation.resolve import Stage, as_list, make_pipeline, resolve
from fedsim.core.suggestions import nearest
from fedsim.errors import ExperimentError, show
from fedsim.system.precision import full_precision

PLAIN = {int, float, str, bool, type(None)}  # types of parameters whose values cannot change


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
        updates: a tensor or NumPy array [n, d], any floating dtype and device; a list of n updates: tensors or arrays
            of any shape, dicts of them (state_dicts) or lists of them; or one dict of stacked tensors [n, ...]. They
            stay unchanged. All updates have the same entries, in any order. Entries that are not floating, such as
            BatchNorm's num_batches_tracked, are those of the first update. Entries of a dict that share memory
            in each update, such as tied weights, count once and share memory in the result.
        weights: [n], finite and >= 0; they need not sum to one. An error for a rule without a weighted form;
            None: equal weights.
        rule: a registered name (see `fedsim.rules()`), "package.module:function", a function, or a list of
            pre-aggregators that ends with a rule: `["nnm", "trimmed_mean"]`. A dict gives a stage its own
            parameters: `[{"rule": "bucketing", "s": 3}, "krum"]`.
        root: [d], or in the form of one update: the update of the server's own data (fltrust).
        losses: [n], each worker's loss (qfedavg).
        last: [d], or in the form of one update: the start of centered_clipping.
        seed: of random draws (bucketing, dnc, signguard).
        nonfinite: "error", "exclude" or "keep" rows that hold NaN or infinity; excluded rows count as Byzantine.
        params: parameters by name; each goes to every stage that has a parameter of this name.

    Returns the aggregate in the form, dtype and device of one update: [d] for a matrix [n, d].

    Raises ExperimentError (a ValueError) for an unknown rule, a wrong parameter, a wrong shape, impossible weights,
    rows that are not finite, or a constraint on n and f that does not hold.

    >>> updates = torch.tensor([[1.0, 2.0], [2.0, 3.0], [3.0, 1.0], [90.0, -90.0]])
    >>> fedsim.aggregate(updates, rule="median")
    tensor([2.5000, 1.5000])
    >>> fedsim.aggregate(updates, rule=["nnm", "trimmed_mean"], f=1)
    tensor([2., 2.])
    >>> fedsim.aggregate([{"w": row} for row in updates], weights=[1, 1, 2, 0])
    {'w': tensor([2.2500, 1.7500])}
    >>> fedsim.aggregate({"w": updates, "b": updates[:, 0]}, rule="median")
    {'w': tensor([2.5000, 1.5000]), 'b': tensor(2.5000)}
    """
    checked_nonfinite(nonfinite)
    pipeline = _pipeline(rule, params)
    updates, form = as_rows(updates, "updates")
    updates = checked_matrix(updates, "updates")
    n, d = updates.shape
    inputs = AggregationInputs(updates, checked_weights(weights, n, pipeline), seed=seed)
    inputs.root = None if root is None else _checked("root", form.row(root, "root"), (d,), updates.device)
    inputs.last = None if last is None else _checked("last", form.row(last, "last"), (d,), updates.device)
    if losses is not None:
        inputs.losses = _checked("losses", losses, (n,), "cpu").double()
    return form.rebuild(aggregate_inputs(inputs, pipeline, nonfinite).update)


def _pipeline(rule: Stage | Sequence[Stage], params: dict[str, Any]) -> Pipeline:
    """Return the pipeline of the arguments of `aggregate`.

    That of a registered rule with plain parameters is made once.
    """
    if type(rule) is str and ":" not in rule and all(type(value) in PLAIN for value in params.values()):
        return _registered(rule, **params)
    return make_pipeline(resolve(rule, params))


@functools.lru_cache(maxsize=256, typed=True)  # since f = True is an error, and equal to f = 1
def _registered(rule: str, /, **params: Any) -> Pipeline:
    return make_pipeline(resolve(rule, params))


def aggregate_inputs(inputs: AggregationInputs, pipeline: Pipeline, nonfinite: Nonfinite) -> AggregationResult:
    """Screen the updates and apply a pipeline to them. Raises ExperimentError, also if the result is not finite."""
    updates = inputs.updates
    with alone_if_small(updates.numel()), full_precision(updates.device):
        linear = pipeline.rule.linear  # then NaN and infinity in a row that counts are also in the result
        if pipeline.columnwise and (linear or updates.device.type != "cpu"):
            update = pipeline.by_columns(inputs.rows(), inputs)
            if math.isfinite(update.sum() if linear else update.sum() + updates.sum()):  # one wait for the device
                return AggregationResult(update)
        finite_inputs, _ = screened(inputs, nonfinite)
        result = pipeline(finite_inputs)
        if nonfinite != "keep" and not all_finite(result.update):
            dtype = result.update.dtype
            raise ExperimentError(
                f"{pipeline.name}: the result is not finite; updates have values up to "
                f"{float(finite_inputs.updates.abs().max()):.3g}, and {dtype} at most {torch.finfo(dtype).max:.3g}"
            )
        return result


def checked_nonfinite(nonfinite: Any) -> Nonfinite:
    """Raise ExperimentError, with the nearest right name, unless it is a policy for rows that are not finite."""
    if nonfinite not in get_args(Nonfinite):
        raise ExperimentError(f"nonfinite = {show(nonfinite)}: {nearest(str(nonfinite), get_args(Nonfinite))}")
    return cast(Nonfinite, nonfinite)


def pre_aggregate(updates: Any, rule: Stage | Sequence[Stage], *, seed: int = 0, **params: Any) -> Any:
    """Apply pre-aggregators to `updates` [n, d]; returns rows [m, d].

    Arguments and errors are those of `aggregate`. A list of updates gives a list of m updates, a dict of stacked
    tensors a dict of such.

    >>> fedsim.pre_aggregate(torch.tensor([[0.0], [1.0], [9.0]]), "nnm", f=1)
    tensor([[0.5000],
            [0.5000],
            [5.0000]])
    """
    pipeline = make_pipeline(resolve([*as_list(rule), "mean"], params))
    updates, form = as_rows(updates, "updates")
    inputs = AggregationInputs(checked_matrix(updates, "updates"), seed=seed)
    with alone_if_small(updates.numel()), full_precision(updates.device):
        return form.rebuild(pipeline.rows(screened(inputs, "error")[0]).block())


def checked_weights(weights: Tensor | Sequence[float] | None, n: int, pipeline: Pipeline) -> Tensor | None:
    """Weights as float64 [n] on the CPU; None if there are none. Raises ExperimentError if they are impossible."""
    if weights is None:
        return torch.ones(n, dtype=torch.double) if pipeline.needs_weights else None
    try:
        weights = torch.as_tensor(weights, dtype=torch.double, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise ExperimentError(f"weights: must be {n} numbers, not {show(weights)}") from None
    if not pipeline.accepts_weights:
        raise ExperimentError(f"weights: the rule {pipeline.name} has no weighted form")
    if weights.shape != (n,):
        raise ExperimentError(f"weights: {n} rows need shape ({n},), not {tuple(weights.shape)}")
    if not bool(((weights >= 0) & weights.isfinite()).all()) or not bool(weights.any()):
        raise ExperimentError("weights: must be finite, >= 0 and not all zero")
    return weights if bool(weights.sum().isfinite()) else weights / weights.max()


def _checked(name: str, value: Any, shape: tuple[int, ...], device: torch.device | str) -> Tensor:
    """`value` as a tensor of finite numbers on the device."""
    try:
        value = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise ExperimentError(f"{name}: must be numbers of shape {shape}, not {show(value)}") from None
    if tuple(value.shape) != shape:
        raise ExperimentError(f"{name}: must be of shape {shape}, not {tuple(value.shape)}")
    if not bool(value.isfinite().all()):
        raise ExperimentError(f"{name}: must be finite; {int((~value.isfinite()).sum())} of its numbers are not")
    return value.to(device)
