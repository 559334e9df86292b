"""Attacks in one line, without a simulation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from fedsim.aggregation.containers import as_row, as_rows
from fedsim.byzantine.strategy import Aggregate, attack_strategy, bind_attack
from fedsim.errors import ExperimentError, SettingWarning, show
from fedsim.system.precision import full_precision


def attack(
    honest: Any,
    n_byzantine: int,
    name: str | Callable[..., Tensor] = "alie",
    *,
    own: Any = None,
    last: Any = None,
    aggregate: Callable[[Tensor], Tensor] | None = None,
    seed: int = 0,
    **params: Any,
) -> Any:
    """The rows that Byzantine workers send: `attack(honest, 4, "min_max", dev="std")`.

    Args:
        honest: [h, d], h >= 1: the honest workers' updates, of any floating dtype and device; left unchanged. Or an
            array or a list of updates, as for `aggregate`; then `own`, `last` and the result have that form too.
        n_byzantine: b >= 0, how many Byzantine workers there are beside the honest ones.
        name: a registered attack, "package.module:function", or a function.
        own: [b, d], what the Byzantine workers' updates would be, had they followed the protocol. Where it is left
            out honest rows stand in, in turn: row j is honest row j mod h. Attacks on data send what they have trained
            (label_flipping) or a multiple of it (backdoor), so here they give `own` or a multiple of that.
        last: [d], the aggregated update of the round before, for free_rider.
        aggregate: the rule in use, for opt_alie and opt_ipm, which need it: a callable of the matrix [h + b, d], honest
            rows first, that leaves it unchanged and returns [d].
        seed: draws are a pure function of it; nothing else is seeded or consumed.
        params: the attack's own parameters.

    Returns the Byzantine rows [b, d], a new tensor with the dtype and device of `honest`.

    Raises ExperimentError (a ValueError) for an unknown attack, a wrong parameter, a wrong shape, no honest row, and
    where the attack's own constraints are broken. Warns (SettingWarning) if the attack does nothing for h and b.
    """
    plug = attack_strategy.get(name, "attack.name")
    bound = bind_attack(plug, plug.check(params, "attack", beside=["name"]))
    honest, rebuild = as_rows(honest, "honest")
    own = as_rows(own, "own")[0]
    _check_honest(honest)
    honest = honest.detach()
    if not isinstance(n_byzantine, Integral) or isinstance(n_byzantine, bool) or n_byzantine < 0:
        raise ExperimentError(f"n_byzantine = {show(n_byzantine)}: must be a whole number >= 0")
    (h, d), b = honest.shape, int(n_byzantine)
    if aggregate is not None and not callable(aggregate):
        raise ExperimentError(f"aggregate = {show(aggregate)}: must be a callable of the matrix of all rows")
    if line := bound.weakness(h + b, b):
        warnings.warn(line, SettingWarning, stacklevel=2)
    if own is None:
        own = honest[torch.arange(b, device=honest.device) % h]
    with full_precision(honest.device):
        rows = bound(
            honest,
            _checked("own", own, (b, d), honest),
            seed=seed,
            last=None if last is None else _checked("last", as_row(last, "last"), (d,), honest),
            aggregate=None if aggregate is None else _beside(honest, b, aggregate),
        )
    return rebuild(rows)


def _check_honest(honest: Tensor) -> None:
    if not isinstance(honest, Tensor) or honest.ndim != 2 or not honest.is_floating_point():
        described = f"{honest.dtype} {tuple(honest.shape)}" if isinstance(honest, Tensor) else type(honest).__name__
        raise ExperimentError(f"honest: must be a floating tensor [h, d], not {described}")
    if not len(honest):
        raise ExperimentError(f"honest: needs at least 1 honest row, there are 0 (shape {tuple(honest.shape)})")


def _checked(name: str, tensor: Tensor, shape: tuple[int, ...], honest: Tensor) -> Tensor:
    """`tensor` if it has this shape and is of the dtype and on the device of the honest rows."""
    if not isinstance(tensor, Tensor):
        raise ExperimentError(f"{name}: must be a tensor {tuple(shape)}, not a {type(tensor).__name__}")
    wanted, found = (
        f"{dtype} {tuple(shape)} on {device}"
        for dtype, shape, device in (
            (honest.dtype, shape, honest.device),
            (tensor.dtype, tensor.shape, tensor.device),
        )
    )
    if wanted != found:
        raise ExperimentError(f"{name}: must be {wanted} as the honest rows are, not {found}")
    return tensor


def _beside(honest: Tensor, n_byzantine: int, aggregate: Callable[[Tensor], Tensor]) -> Aggregate:
    """`aggregate` as a function of the Byzantine rows alone."""
    h, d = honest.shape
    matrix = torch.cat([honest, honest.new_zeros(n_byzantine, d)])

    def with_honest(byzantine: Tensor) -> Tensor:
        matrix[h:] = byzantine
        result = aggregate(matrix)
        if tuple(result.shape) != (d,):
            raise ExperimentError(f"aggregate: must return shape ({d},), not {tuple(result.shape)}")
        return result

    return with_honest
