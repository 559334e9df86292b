"""Function that computes the updates of Byzantine workers without an experiment."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from fedsim.aggregation.containers import as_rows, checked_matrix
from fedsim.byzantine.base import Aggregate, attack_strategy
from fedsim.errors import ExperimentError, SettingWarning, show
from fedsim.hints.attributes import takes_component
from fedsim.system.global_settings import plain_arithmetic
from fedsim.system.precision import full_precision

CALLER = 4  # stack level of the line that calls `attack`, which has two decorators


@takes_component("attack", n_byzantine="attack.f")
@plain_arithmetic
def attack(
    honest: Any,
    name: str | Callable[..., Tensor],
    n_byzantine: int,
    *,
    own_updates: Any = None,
    last: Any = None,
    aggregate: Callable[[Tensor], Tensor] | None = None,
    weights: Sequence[float] | Tensor | None = None,
    byzantine_weights: Sequence[float] | Tensor | None = None,
    seed: int = 0,
    **params: Any,
) -> Any:
    """Return the updates that Byzantine workers send, for example `attack(honest, "min_max", 4, dev="std")`.

    Args:
        honest: updates of the h honest workers, [h, d], h >= 1, of any floating-point dtype and device. `honest` is not
            changed. It may also be a list of updates, as for `aggregate`. Then `own_updates`, `last` and the result
            have the same structure.
        name: the attack: a registered name (see `fedsim.components("attacks")`), "package.module:function", or a
            function.
        n_byzantine: number b of Byzantine workers, >= 0.
        own_updates: updates that the b Byzantine workers computed by training, [b, d]. None: copies of the first b
            honest updates (starting again with the first if b > h).
        last: aggregated update of the previous round (for free_rider), [d].
        aggregate: aggregation rule (for opt_alie and opt_ipm), as a function that maps all updates [h + b, d], honest
            updates first, to the aggregate [d].
        seed: seed of random draws.
        params: parameters of the attack.

    Returns the Byzantine updates [b, d], a new tensor with the dtype and device of `honest`.

    Raises ExperimentError (a ValueError) for an unknown attack, an invalid parameter or shape, or without honest
    updates. Warns (SettingWarning) if the attack has no effect for h and b.

    >>> honest = torch.tensor([[1.0, 2.0], [3.0, 2.0]])
    >>> fedsim.attack(honest, "ipm", 2, eps=0.5)
    tensor([[-1., -1.],
            [-1., -1.]])
    """
    registration = attack_strategy.get(name, "attack.name")
    bound = attack_strategy.bind(registration, registration.check(params, "attack", beside=["name"]))
    honest, form = as_rows(honest, "honest")
    own_updates, _ = as_rows(own_updates, "own_updates", form)
    honest = checked_matrix(honest, "honest")
    if not isinstance(n_byzantine, Integral) or isinstance(n_byzantine, bool) or n_byzantine < 0:
        raise ExperimentError(f"n_byzantine = {show(n_byzantine)}: must be a whole number >= 0")
    (h, d), b = honest.shape, int(n_byzantine)
    if aggregate is not None and not callable(aggregate):
        example = f"functools.partial(fedsim.aggregate, name={show(aggregate)}, ...)"
        raise ExperimentError(
            f"aggregate = {show(aggregate)}: must be a function of the updates [n, d] of all workers, such as {example}"
        )
    if line := bound.weakness(h + b, b):
        warnings.warn(line, SettingWarning, stacklevel=CALLER)
    if own_updates is None:
        if not bound.alters_rows and bound.poison is not None and b:
            line = f"{bound.name}: poisons data, not updates; train with fedsim.run, or pass own_updates"
            warnings.warn(line, SettingWarning, stacklevel=CALLER)
        own_updates = honest[torch.arange(b, device=honest.device) % h]
    with full_precision(honest.device):
        rows, _ = bound(
            honest,
            _checked("own_updates", own_updates, (b, d), honest),
            seed=seed,
            last=None if last is None else _checked("last", form.row(last, "last"), (d,), honest),
            aggregate=None if aggregate is None else _with_honest(honest, b, aggregate),
            weights=_checked_weights("weights", weights, h),
            byzantine_weights=_checked_weights("byzantine_weights", byzantine_weights, b),
        )
    return form.rebuild(rows)


def _checked_weights(name: str, weights: Sequence[float] | Tensor | None, n: int) -> Tensor:
    """Return `weights` as a float64 tensor [n] on the CPU. Raises ExperimentError unless they are n numbers > 0."""
    values = torch.ones(n) if weights is None else torch.as_tensor(weights, device="cpu")
    if values.shape != (n,) or not bool((values > 0).all()):
        raise ExperimentError(f"{name} = {show(values.tolist())}: must be {n} numbers > 0")
    return values.double()


def _checked(name: str, tensor: Tensor, shape: tuple[int, ...], honest: Tensor) -> Tensor:
    """Return `tensor`. Raises ExperimentError if its shape is wrong, or its dtype or device is not that of `honest`."""
    if not isinstance(tensor, Tensor):
        raise ExperimentError(f"{name}: must be a tensor of shape {tuple(shape)}, not {type(tensor).__name__}")
    wanted = f"{honest.dtype} {tuple(shape)} on {honest.device}"
    actual = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
    if wanted != actual:
        raise ExperimentError(f"{name}: must be {wanted} like the honest updates, not {actual}")
    return tensor


def _with_honest(honest: Tensor, n_byzantine: int, aggregate: Callable[[Tensor], Tensor]) -> Aggregate:
    """Return a function of the Byzantine updates that aggregates them together with the honest updates."""
    h, d = honest.shape
    matrix = torch.cat([honest, honest.new_zeros(n_byzantine, d)])

    def of_byzantine(byzantine: Tensor) -> Tensor:
        matrix[h:] = byzantine
        result = aggregate(matrix)
        if tuple(result.shape) != (d,):
            raise ExperimentError(f"aggregate: must return a tensor of shape ({d},), not {tuple(result.shape)}")
        return result

    return of_byzantine
