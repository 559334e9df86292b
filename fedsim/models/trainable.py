"""Selection of the trained parameters (by name patterns or low-rank adapters), and initial weights from a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from fedsim.core.name_patterns import matching
from fedsim.errors import FedsimError, one_line, show
from fedsim.system.devices import free_memory
from fedsim.system.files import read_bounded

ADAPTERS = "lora_a", "lora_b"


class LoRALinear(nn.Linear):
    """Linear layer with a frozen weight W and a trained low-rank term: x (W + (alpha / rank) B A)^T + bias.

    A [rank, inputs] (`lora_a`) is initialized like the weight of `nn.Linear`, and B [outputs, rank] (`lora_b`) with
    zeros, so at first the layer computes the same as the layer that it replaces. Hu et al. 2022 (LoRA).
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float

    @classmethod
    def convert(cls, layer: nn.Linear, rank: int, alpha: float) -> None:
        """Convert a linear layer to a LoRALinear in place. Its parameters stay the same objects and are frozen."""
        layer.requires_grad_(False)
        layer.lora_a = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        layer.lora_b = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
        layer.scale = alpha / rank  # type: ignore[assignment]
        nn.init.kaiming_uniform_(layer.lora_a, a=math.sqrt(5))
        layer.__class__ = cls

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + F.linear(F.linear(input, self.lora_a), self.lora_b) * self.scale


def add_adapters(module: nn.Module, rank: int, alpha: float, targets: Sequence[str]) -> None:
    """Freeze a model and add low-rank adapters to the linear layers whose names match one of the patterns `targets`.

    Raises ExperimentError if a pattern matches no linear layer.
    """
    layers = {name: layer for name, layer in module.named_modules() if type(layer) is nn.Linear}
    chosen = matching(targets, list(layers), "model.lora.targets", "linear layer")
    module.requires_grad_(False)
    for name in chosen:
        LoRALinear.convert(layers[name], rank, alpha)
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0  # its fast path in tests would read the weights without the adapters


def train_only(module: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze all parameters of a model except low-rank adapters and parameters whose names match one of the patterns.

    Raises ExperimentError if a pattern matches no parameter.
    """
    parameters = dict(module.named_parameters())
    chosen = matching(patterns, list(parameters), "local.trainable", "parameter")
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in chosen or name.endswith(ADAPTERS))
    for part in module.modules():
        if isinstance(part, nn.GroupNorm) and part.affine and part.bias.requires_grad > part.weight.requires_grad:
            part.register_forward_pre_hook(_contiguous)


def _contiguous(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Return contiguous copies of a GroupNorm's inputs.

    PyTorch 2.13 crashes if the inputs are channels_last and only the bias of the module has a gradient.
    """
    return (inputs[0].contiguous(),)


def share_frozen(module: nn.Module, shared: dict[str, nn.Parameter]) -> None:
    """Share frozen parameters between models, to save memory.

    A frozen parameter whose name is in `shared` is replaced by the parameter stored there. Other frozen parameters are
    added to `shared`.
    """
    replaced = {p: shared.setdefault(name, p) for name, p in module.named_parameters() if not p.requires_grad}
    for part in module.modules():
        part._parameters.update({name: replaced[p] for name, p in part._parameters.items() if p in replaced})


def load_weights(
    module: nn.Module, path: Path, place: str, error_class: type[FedsimError], *, optional: tuple[str, ...] = ()
) -> None:
    """Load a model's parameters and buffers from a safetensors file.

    Args:
        module: model whose parameters and buffers are overwritten.
        path: the file.
        place: start of the error message, such as the key that contains the path.
        error_class: class of the exception that is raised if the file cannot be read or does not fit the model.
        optional: suffixes of parameter names that may be missing in the file.
    """
    if path.suffix in (".pt", ".pth", ".bin", ".pkl"):
        raise error_class(
            f"{place}: must be a .safetensors file, because reading a pickle can run code; convert it with "
            "safetensors.torch.save_file(model.state_dict(), FILE)"
        )
    try:
        stored = load(read_bounded(path, free_memory() / 2, path.parent))
    except OSError as error:
        raise error_class(f"{place}: cannot be read: {error.strerror}") from None
    except (ValueError, SafetensorError) as error:
        raise error_class(f"{place}: is damaged: {one_line(error)}") from None
    tensors = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    for name in dict.fromkeys([*tensors, *stored]):
        there, here = (list(of[name].shape) if name in of else "missing" for of in (stored, tensors))
        if there != here and not (there == "missing" and name.endswith(optional)):
            raise error_class(
                f"{place}: the shape of {show(name)} is {there} in the file, but {here} in the model; use the settings "
                "of `model` with which the file was written"
            )
        if there != "missing" and not stored[name].isfinite().all():
            raise error_class(f"{place}: {show(name)} contains NaN or infinity in the file; use another file")
    with torch.no_grad():
        module.load_state_dict(stored, strict=False)
