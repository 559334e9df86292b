"""Inputs of a model: one tensor, or several as a dict (passed by keyword) or as a tuple (passed by position)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor

from fedsim.errors import ExperimentError

Inputs = Tensor | dict[str, Tensor] | tuple[Tensor, ...]  # the first dimension of each tensor is that of the samples


def leaves(inputs: Inputs) -> Sequence[Tensor]:
    """Return all tensors of the inputs."""
    if isinstance(inputs, Tensor):
        return (inputs,)
    return tuple(inputs.values()) if isinstance(inputs, dict) else inputs


def named(inputs: Inputs) -> dict[str, Tensor]:
    """Return all tensors of the inputs by name: `inputs`, or `inputs.image` and `inputs.table`, or `inputs.0`, ...."""
    if isinstance(inputs, Tensor):
        return {"inputs": inputs}
    pairs = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
    return {f"inputs.{name}": tensor for name, tensor in pairs}


def on_each(function: Callable[..., Any], inputs: Inputs, *args: Any) -> Any:
    """Return `function(tensor, *args)` for each tensor of the inputs, as one result, a dict or a tuple like `inputs`.

    >>> fedsim.core.model_inputs.on_each(len, {"image": torch.zeros(2, 1, 8, 8), "table": torch.zeros(2, 3)})
    {'image': 2, 'table': 2}
    """
    if isinstance(inputs, Tensor):
        return function(inputs, *args)
    if isinstance(inputs, dict):
        return {name: function(tensor, *args) for name, tensor in inputs.items()}
    return tuple([function(tensor, *args) for tensor in inputs])


def on_image(function: Callable[..., Tensor], inputs: Inputs, place: str, *args: Any) -> Inputs:
    """Replace the input by `function(input, *args)`; of several inputs, only the one that is a batch of images.

    Images are floating-point tensors [batch, channels, height, width]. Raises ExperimentError, which begins with
    `place`, unless exactly one of several inputs is an image.
    """
    if isinstance(inputs, Tensor):
        return function(inputs, *args)
    images = [tensor for tensor in leaves(inputs) if tensor.ndim == 4 and tensor.is_floating_point()]
    if len(images) != 1:
        raise ExperimentError(
            f"{place} needs images [channels, height, width]: exactly one of several inputs, not {shapes_of(inputs)}"
        )
    return on_each(lambda tensor: function(tensor, *args) if tensor is images[0] else tensor, inputs)


def concatenated(several: Sequence[Inputs]) -> Inputs:
    """Concatenate the samples of several inputs, which have the same names."""
    if isinstance(several[0], Tensor):
        return torch.cat(several)  # type: ignore[arg-type]
    columns = [named(inputs) for inputs in several]
    joined = iter([torch.cat([column[name] for column in columns]) for name in columns[0]])
    return on_each(lambda _: next(joined), several[0])


def split_inputs(inputs: Inputs, size: int) -> Sequence[Inputs]:
    """Divide the inputs of several samples into batches of `size` samples. The last batch may be smaller."""
    if isinstance(inputs, Tensor):
        return inputs.split(size)
    starts = range(0, len(leaves(inputs)[0]), size)
    return [on_each(getitem, inputs, slice(start, start + size)) for start in starts]


def shapes_of(inputs: Inputs) -> str:
    """Format the shape of a batch: `(4, 1, 28, 28)`, or `image (4, 1, 28, 28), table (4, 3)` for several inputs."""
    if isinstance(inputs, Tensor):
        return str(tuple(inputs.shape))
    return ", ".join(f"{name.removeprefix('inputs.')} {tuple(t.shape)}" for name, t in named(inputs).items())


def outputs_of(model: Callable[..., Any], inputs: Inputs) -> Any:
    """Run a model, and return its outputs: a tensor, or what else `forward` returns.

    Several inputs are passed by keyword (a dict) or by position (a tuple). If the model returns an object or a dict
    like those of Hugging Face's transformers, the outputs are its `loss` if the model has computed it, else its
    `logits`. A loss that is one number is repeated for each sample.

    >>> class Model(torch.nn.Module):
    ...     def forward(self, image, table):
    ...         return {"logits": image.mean((1, 2, 3)) + table.sum(1)}
    >>> inputs = {"image": torch.ones(2, 1, 8, 8), "table": torch.ones(2, 3)}
    >>> fedsim.core.model_inputs.outputs_of(Model(), inputs)
    tensor([4., 4.])
    """
    if isinstance(inputs, Tensor):
        outputs = model(inputs)
    else:
        outputs = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    # Tuples such as those of GoogLeNet have further logits, which the loss should use too.
    return outputs if isinstance(outputs, (Tensor, tuple)) else _loss_or_logits(outputs, inputs)


def _loss_or_logits(outputs: Any, inputs: Inputs) -> Any:
    named = (
        outputs if isinstance(outputs, Mapping) else {key: getattr(outputs, key, None) for key in ("loss", "logits")}
    )
    if (loss := named.get("loss")) is not None:
        return loss if loss.ndim else loss.expand(len(leaves(inputs)[0]))
    logits = named.get("logits")
    return outputs if logits is None else logits
