"""The features of a model: what its last layers classify."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from fedsim.errors import ExperimentError


class RecordedFeatures:
    """The features of one forward pass, once it has ended."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def of(self, samples: int) -> Tensor:
        """The features [samples, f]. Raises ExperimentError if the forward pass computed none of that shape."""
        if not self.found:
            raise ExperimentError(
                "model: has no features; its forward must call a method or module `features`, or an nn.Linear"
            )
        features = self.found[-1]
        if features.ndim < 2 or len(features) != samples:
            shape = tuple(features.shape)
            raise ExperimentError(f"model: the features of {samples} samples must be [{samples}, ...], not {shape}")
        return features.flatten(1)


@contextlib.contextmanager
def recorded_features(module: nn.Module) -> Iterator[RecordedFeatures]:
    """Record the features of the forward pass in the block.

    They are what `module.features` returns, a method or a module that forward calls. A module without it has the input
    of the last nn.Linear that forward calls.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    >>> with fedsim.core.recorded_features.recorded_features(model) as recorded:
    ...     outputs = model(torch.zeros(4, 3))
    >>> recorded.of(4).shape
    torch.Size([4, 5])
    """
    recorded, own = RecordedFeatures(), getattr(module, "features", None)

    def keep(_: nn.Module, inputs: tuple[Any, ...], output: Any = None) -> None:
        recorded.found.append(inputs[0] if output is None else output)

    with contextlib.ExitStack() as stack:
        if isinstance(own, nn.Module):
            stack.callback(own.register_forward_hook(keep).remove)
        elif callable(own):

            def features(*args: Any, **kwargs: Any) -> Any:
                recorded.found.append(own(*args, **kwargs))
                return recorded.found[-1]

            vars(module)["features"] = features  # before the method of the class
            stack.callback(vars(module).pop, "features")
        else:
            for part in module.modules():
                if isinstance(part, nn.Linear):
                    stack.callback(part.register_forward_pre_hook(keep).remove)
        yield recorded
