"""Function that compresses tensors, arrays and state_dicts without an experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fedsim.aggregation.containers import NestedForm, as_rows, checked_matrix
from fedsim.errors import ExperimentError
from fedsim.hints.attributes import takes_component
from fedsim.processing.processors import apply_chain, check_order, processor
from fedsim.system.global_settings import plain_arithmetic
from fedsim.system.precision import full_precision

Step = str | Callable[..., Any] | Mapping[str, Any]


@takes_component("processors")
@plain_arithmetic
def compress(update: Any, name: Step | Sequence[Step], *, seed: int = 0, **params: Any) -> tuple[Any, int]:
    """Compress an update as in a run, for example `compress(update, "top_k", ratio=0.01)`.

    Args:
        update: a floating-point tensor or NumPy array of any shape, or a dict (such as a state_dict) or list of these.
            `update` is not changed. Numbers of 2 bytes are compressed as float32. Add `cast` to send 2 bytes each.
        name: the processor: a registered name (see `fedsim.components("processors")`), "package.module:function", a
            function, or a list of these. An element of the list may also be a dict with its parameters:
            `{"name": "top_k", "k": 9}`.
        seed: seed of random draws.
        params: parameters of the processor `name`.

    Returns the update that the server decodes, with the structure, dtype and device of `update`, and the number of
    bytes to send.

    Raises ExperimentError (a ValueError) for an unknown processor or an invalid parameter.

    >>> fedsim.compress(torch.tensor([1.0, -3.0, 2.0]), "sign")
    (tensor([ 2., -2.,  2.]), 5)
    >>> fedsim.compress({"w": torch.ones(2, 2), "b": torch.zeros(2)}, ["sign", "cast"])
    ({'w': tensor([[0.6680, 0.6680],
            [0.6680, 0.6680]]), 'b': tensor([0.6680, 0.6680])}, 3)
    """
    steps: list[Any] = list(name) if isinstance(name, (list, tuple)) else [name]
    if params and steps != [name]:
        raise ExperimentError(
            f"{next(iter(params))}: in a list of processors, pass a processor's parameters in a dict, such as "
            '{"name": "top_k", "k": 9}'
        )
    chain = []
    for step in steps:
        table = {**(step if isinstance(step, Mapping) else {"name": step}), **params}
        registration = processor.get(table.pop("name", None), "processors.name")
        chain.append(processor.bind(registration, registration.check(table, "processors")))
    check_order(chain, "name")
    rows, form = as_rows([update], "update")
    row = checked_matrix(rows, "update")[0]
    row = row.to(torch.promote_types(row.dtype, torch.float32))
    shapes = [form.entries[place].shape for place in form.columns] if isinstance(form, NestedForm) else None
    with full_precision(row.device):
        nbytes = apply_chain(chain, row, (), {}, seed=seed, shapes=shapes)
    return form.rebuild(row), nbytes
