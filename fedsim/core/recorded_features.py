"""Record a model's features, the inputs of its final layer, during a forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from fedsim.errors import ExperimentError


class RecordedFeatures:
    """Features (inner activations) of a model in its last forward pass. Created by `recorded_features`."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def of(self, samples: int) -> Tensor:
        """Return the recorded features of a batch as [samples, f], with f features per sample."""
        if not self.tensors:
            raise ExperimentError(
                "model: the client algorithm needs features (hidden activations), but `forward` calls neither a "
                "method or module `features` nor an nn.Linear; add one of them"
            )
        features = self.tensors[-1]
        if features.ndim < 2 or len(features) != samples:
            shape = tuple(features.shape)
            raise ExperimentError(
                f"model: the features of {samples} samples must have shape [{samples}, ...], not {shape}"
            )
        return features.flatten(1)


@contextlib.contextmanager
def recorded_features(module: nn.Module) -> Iterator[RecordedFeatures]:
    """Inside the `with` block, record the features (inner activations) of the module's forward passes.

    The features are the output of `module.features` (a method or submodule). Without it, they are the input of the last
    nn.Linear.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    >>> with fedsim.core.recorded_features.recorded_features(model) as recorded:
    ...     outputs = model(torch.zeros(4, 3))
    >>> recorded.of(4).shape
    torch.Size([4, 5])
    """
    recorded, attribute = RecordedFeatures(), getattr(module, "features", None)

    def keep(_: nn.Module, inputs: tuple[Any, ...], output: Any = None) -> None:
        recorded.tensors.append(inputs[0] if output is None else output)

    with contextlib.ExitStack() as stack:
        if isinstance(attribute, nn.Module):
            stack.callback(attribute.register_forward_hook(keep).remove)
        elif callable(attribute):

            def features(*args: Any, **kwargs: Any) -> Any:
                recorded.tensors.append(attribute(*args, **kwargs))
                return recorded.tensors[-1]

            vars(module)["features"] = features  # hides the method of the class
            stack.callback(vars(module).pop, "features")
        else:
            for part in module.modules():
                if isinstance(part, nn.Linear):
                    stack.callback(part.register_forward_pre_hook(keep).remove)
        yield recorded
