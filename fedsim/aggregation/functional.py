"""Functions that aggregate tensors, arrays and state_dicts without an experiment."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast, get_args

import torch
from torch import Tensor

from fedsim.aggregation.containers import Form, MatrixForm, as_rows, checked_matrix
from fedsim.aggregation.inputs import AggregationInputs, Nonfinite, screened
from fedsim.aggregation.numerics.columns import NonfiniteError, all_finite, reading
from fedsim.aggregation.numerics.threads import alone_if_small
from fedsim.aggregation.pipeline import AggregationResult, Pipeline
from fedsim.aggregation.resolve import Stage, as_list, make_pipeline, resolve
from fedsim.errors import ExperimentError, show
from fedsim.hints.attributes import takes_component
from fedsim.hints.meanings import nearest
from fedsim.system.global_settings import plain_arithmetic
from fedsim.system.precision import full_precision

POLICIES = get_args(Nonfinite)
PLAIN = {int, float, str, bool, type(None)}  # types of immutable parameters, for which pipelines are cached


@takes_component("aggregate", "rule")
@plain_arithmetic
def aggregate(
    updates: Any,
    name: Stage | Sequence[Stage] = "mean",
    *,
    weights: Tensor | Sequence[float] | None = None,
    root: Any = None,
    losses: Tensor | Sequence[float] | None = None,
    last: Any = None,
    own: int | None = None,
    seed: int = 0,
    nonfinite: Nonfinite = "error",
    **params: Any,
) -> Any:
    """Aggregate n updates to one with a rule, for example `aggregate(updates, "krum", f=2)`.

    Args:
        updates: a tensor or NumPy array [n, d] of any floating-point dtype and device, n lists of d numbers, or a list
            or iterator of n updates, which are tensors or arrays of any shape, or dicts (such as state_dicts) or lists
            of these. `updates` is not changed. All updates have the same entries, in any order. Entries that are not
            floating-point, such as BatchNorm's num_batches_tracked, are taken from the first update. Entries of a dict
            that share memory in all updates, such as tied weights, count once and share memory in the result.
        name: the rule: a registered name (see `fedsim.components("rules")`), "package.module:function", a function, or
            a list of pre-aggregators followed by a rule, such as `["nnm", "trimmed_mean"]`. An element of the list may
            also be a dict with its own parameters: `[{"name": "bucketing", "s": 3}, "krum"]`.
        weights: weight of each update, [n], finite, >= 0 and not all zero, with any sum. None: equal weights. Rules
            that do not support weights raise an error.
        root: update computed on the server's own data (for fltrust), [d] or with the structure of one update.
        losses: loss of each worker (for qfedavg), [n].
        last: previous aggregate, where centered_clipping starts, [d] or with the structure of one update.
        own: position of the aggregating worker's own row (for clipped_gossip, ios and bridge).
        seed: seed of random draws (for bucketing, dnc and signguard).
        nonfinite: how to treat updates that contain NaN or infinity: "error", "exclude" or "keep". Excluded updates
            count as Byzantine. Updates with weight 0 may contain NaN. With "keep", the result may contain NaN, and
            rules that cannot compare such updates (`caf`, `dnc`, `medoid`) raise an error. On a GPU, "error" never
            waits for a check: rules that read norms or distances of all updates on the host raise the error. The result
            of other rules then contains NaN or infinity: `mean` and `weighted_mean` where an update with a weight > 0
            does, and rules such as `median` everywhere.
        params: parameters by name. The rule and each pre-aggregator receive the parameters that they have.

    Returns the aggregate with the structure, dtype and device of one update: [d] for a matrix [n, d].

    Raises ExperimentError (a ValueError) for an unknown rule, an invalid parameter, shape or weight, a NaN or infinity
    in the updates (on a GPU, see `nonfinite`), or a violated constraint on n and f.

    In a run: `fedsim.rounds.aggregator.RuleByColumns.aggregate` applies the rule.

    >>> updates = torch.tensor([[1.0, 2.0], [2.0, 3.0], [3.0, 1.0], [90.0, -90.0]])
    >>> fedsim.aggregate(updates, "median")
    tensor([2.5000, 1.5000])
    >>> fedsim.aggregate(updates, ["nnm", "trimmed_mean"], f=1)
    tensor([2., 2.])
    >>> fedsim.aggregate([{"w": row} for row in updates], weights=[1, 1, 2, 0])
    {'w': tensor([2.2500, 1.7500])}
    """
    checked_nonfinite(nonfinite)
    pipeline = _pipeline(name, params)
    form: Form = MatrixForm(is_array=False)
    if not isinstance(updates, Tensor):
        updates, form = as_rows(updates, "updates")
    updates = checked_matrix(updates, "updates")
    n, d = updates.shape
    inputs = AggregationInputs(updates, checked_weights(weights, n, pipeline), seed=seed)
    inputs.root = None if root is None else _checked("root", form.row(root, "root"), (d,), updates.device)
    inputs.last = None if last is None else _checked("last", form.row(last, "last"), (d,), updates.device)
    if own is not None and (type(own) is not int or not 0 <= own < n):
        raise ExperimentError(f"own = {show(own)}: must be the position of one of {n} updates, from 0 to {n - 1}")
    inputs.own = own
    if losses is not None:
        inputs.losses = _checked("losses", losses, (n,), "cpu").double()
    return form.rebuild(aggregate_inputs(inputs, pipeline, nonfinite).update)


def _pipeline(name: Stage | Sequence[Stage], params: dict[str, Any]) -> Pipeline:
    """Return a pipeline that applies the rule `name` (and pre-aggregators, if any) with the parameters `params`."""
    if type(name) is str and ":" not in name and all(type(value) in PLAIN for value in params.values()):
        return _registered(name, **params)
    return make_pipeline(resolve(name, params))


@functools.lru_cache(maxsize=256, typed=True)  # typed, because f = True is an error although True == 1
def _registered(name: str, /, **params: Any) -> Pipeline:
    return make_pipeline(resolve(name, params))


def aggregate_inputs(inputs: AggregationInputs, pipeline: Pipeline, nonfinite: Nonfinite) -> AggregationResult:
    """Apply an aggregation rule to its inputs, and return the result.

    `nonfinite` says what to do with updates that contain NaN or infinity: "error", "exclude" or "keep" (see
    `aggregate`). Raises ExperimentError if the rule cannot be applied, or on a CPU if the result is not finite (unless
    `nonfinite` is "keep"). On a GPU, a result that has overflowed is returned.
    """
    updates = inputs.updates
    with _setting(updates, pipeline):
        # A second attempt draws the same numbers. It raises an error again, unless updates are excluded.
        with contextlib.suppress(ExperimentError):
            if (result := _without_check(replace(inputs), pipeline, nonfinite)) is not None:
                return result
        if nonfinite != "keep" and updates.device.type != "cpu":
            _require_finite("root", inputs.root)
            _require_finite("last", inputs.last)
        finite_inputs, _ = screened(inputs, nonfinite)
        result = pipeline(finite_inputs)
        if nonfinite != "keep" and not all_finite(result.update):
            dtype = result.update.dtype
            pipeline.require_finite_result(result.update)
            raise ExperimentError(
                f"{pipeline.name}: the result is not finite: updates contain values up to "
                f"{float(finite_inputs.updates.abs().max()):.3g}, and the maximum of {dtype} is "
                f"{torch.finfo(dtype).max:.3g}; scale the updates down"
            )
        return result


def _setting(updates: Tensor, pipeline: Pipeline) -> contextlib.AbstractContextManager[None]:
    """Return a context manager for the aggregation: one thread for small updates on a CPU, full precision on a GPU."""
    if updates.device.type == "cpu":
        return alone_if_small(updates.numel())
    return full_precision(updates.device, convolutions=not pipeline.built_in)


def _without_check(inputs: AggregationInputs, pipeline: Pipeline, nonfinite: Nonfinite) -> AggregationResult | None:
    """Aggregate without checking the updates for NaN and infinity first. Return None if they must be checked first."""
    updates, is_linear = inputs.updates, pipeline.columnwise and pipeline.rule.linear
    on_gpu = updates.device.type != "cpu"
    if nonfinite == "keep" or not (is_linear or on_gpu):
        return None
    if pipeline.columnwise:
        result = AggregationResult(pipeline.by_columns(inputs.rows(), inputs))
    else:
        unchecked, are_finite = pipeline.without_check(inputs)
        if are_finite or unchecked is None:
            return unchecked
        result = unchecked
    if not is_linear and updates.numel():  # NaN or infinity in any update makes the whole result NaN
        largest = torch.linalg.vector_norm(updates, torch.inf)
        result = replace(result, update=result.update.add(largest, alpha=0))
    if on_gpu and nonfinite == "error":  # a linear rule passes on NaN and infinity in a row with a weight > 0
        return result
    return result if all_finite(result.update) else None


def checked_nonfinite(nonfinite: Any) -> Nonfinite:
    """Return `nonfinite`. Raises ExperimentError unless it is "error", "exclude" or "keep"."""
    if nonfinite not in POLICIES:
        raise ExperimentError(f"nonfinite = {show(nonfinite)}: {nearest(str(nonfinite), POLICIES)}")
    return cast(Nonfinite, nonfinite)


@takes_component("aggregate", "rule")
@plain_arithmetic
def pre_aggregate(updates: Any, name: Stage | Sequence[Stage], *, seed: int = 0, **params: Any) -> Any:
    """Apply one or more pre-aggregators to `updates` [n, d]. Returns the transformed updates [m, d].

    Arguments and errors are the same as for `aggregate`. For a list of n updates, the result is a list of m updates.

    >>> fedsim.pre_aggregate(torch.tensor([[0.0], [1.0], [9.0]]), "nnm", f=1)
    tensor([[0.5000],
            [0.5000],
            [5.0000]])
    """
    pipeline = make_pipeline(resolve([*as_list(name), "mean"], params))
    updates, form = as_rows(updates, "updates")
    inputs = AggregationInputs(checked_matrix(updates, "updates"), seed=seed)
    with _setting(updates, pipeline):
        if updates.device.type != "cpu" and pipeline.built_in:
            with contextlib.suppress(NonfiniteError), reading():
                return form.rebuild(pipeline.rows(inputs).block())  # NaN spreads to all mixed rows
        return form.rebuild(pipeline.rows(screened(inputs, "error")[0]).block())


def checked_weights(weights: Tensor | Sequence[float] | None, n: int, pipeline: Pipeline) -> Tensor | None:
    """Return weights as a float64 tensor [n] on the CPU.

    If `weights` is None, returns ones if the rule requires weights, otherwise None.

    Raises ExperimentError if the weights are invalid or the rule does not support weights.
    """
    if weights is None:
        return torch.ones(n, dtype=torch.double) if pipeline.needs_weights else None
    try:
        weights = torch.as_tensor(weights, dtype=torch.double, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise ExperimentError(f"weights: must be {n} numbers, not {show(weights)}") from None
    if not pipeline.accepts_weights:
        raise ExperimentError(f"weights: the rule {pipeline.name} does not support weights; omit them")
    if weights.shape != (n,):
        raise ExperimentError(f"weights: must have shape ({n},) for {n} updates, not {tuple(weights.shape)}")
    if not bool(((weights >= 0) & weights.isfinite()).all()) or not bool(weights.any()):
        raise ExperimentError(f"weights = {show(weights.tolist())}: must be finite, >= 0 and not all zero")
    return weights if bool(weights.sum().isfinite()) else weights / weights.max()


def _checked(name: str, value: Any, shape: tuple[int, ...], device: torch.device | str) -> Tensor:
    """Return `value` as a tensor on `device`.

    Raises ExperimentError if it has another shape, or if it is on a CPU and not finite.
    """
    try:
        value = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise ExperimentError(f"{name}: must be numbers of shape {shape}, not {show(value)}") from None
    if tuple(value.shape) != shape:
        raise ExperimentError(f"{name}: must have shape {shape}, not {tuple(value.shape)}")
    value = value.to(device)
    if value.device.type == "cpu":
        _require_finite(name, value)
    return value


def _require_finite(name: str, value: Tensor | None) -> None:
    """Raise ExperimentError unless `value` is finite or None. Waits for a GPU."""
    if value is not None and not bool(value.isfinite().all()):
        count = int((~value.isfinite()).sum())
        raise ExperimentError(f"{name}: must be finite; {count} of its values are NaN or infinite")
