"""Random transforms of torchvision as augmentations of whole batches."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedsim.core.randomness import seed_globally
from fedsim.data.augmentation import augmentation
from fedsim.errors import ExperimentError, one_line, show
from fedsim.hints.names import closest
from fedsim.system import packages

# beginnings of the names of random transforms
RANDOM = "Rand", "AugMix", "AutoAugment", "ColorJitter", "ElasticTransform", "Gaussian", "TrivialAugment"


class BatchTransform:
    """Augmentation by a torchvision transform. Subclasses are dataclasses, whose fields are its arguments."""

    made_by: Any
    name: str

    def __post_init__(self) -> None:
        self._transform = self._checked(self.made_by, **self._arguments)

    @property
    def _arguments(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def __call__(self, images: Tensor, generator: torch.Generator, normalisation: tuple[Tensor, Tensor]) -> Tensor:
        mean, deviation = normalisation
        with seed_globally(generator, images.device):
            pixels = self._checked(self._transform, images * deviation + mean)
        if not isinstance(pixels, Tensor) or pixels.shape != images.shape:
            shape = list(getattr(pixels, "shape", ()))
            raise ExperimentError(
                f"data.augment: torchvision:{self.name} changes images {list(images.shape)} to {shape}; an "
                "augmentation must keep their shape"
            )
        return (pixels - mean) / deviation

    def _checked(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except Exception as error:
            raise ExperimentError(f"data.augment: torchvision:{self.name} fails: {one_line(error)}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.name, self._arguments)


@augmentation.family("torchvision")
@functools.cache
def torchvision_transform(name: str) -> Any:
    """Random transform NAME of torchvision.transforms.v2, such as RandomAffine, applied equally to a whole batch.

    Parameters such as an angle are drawn once per batch. (`crop`, `flip` and `cutout` draw them for each image.) The
    transform gets pixels in [0, 1], before normalisation, and must keep the shape of the images. Its random numbers
    depend only on (seed, round, worker, step).
    """
    packages.import_torchvision()
    module = importlib.import_module("torchvision.transforms.v2")
    classes = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, module.Transform) and key.startswith(RANDOM)
    }
    if name not in classes:
        hints = [f"; did you mean {show(key)}?" for key in closest(name, classes)]
        raise LookupError("no such random transform in torchvision.transforms.v2" + "".join(hints[:1]))
    fields = []
    for p in inspect.signature(classes[name], eval_str=True).parameters.values():
        default = dataclasses.field() if p.default is p.empty else dataclasses.field(default=p.default)
        fields.append((p.name, Any if p.annotation is p.empty else p.annotation, default))
    namespace = {"made_by": classes[name], "name": name, "__doc__": torchvision_transform.__doc__}
    return dataclasses.make_dataclass(
        name, fields, bases=(BatchTransform,), namespace=namespace, kw_only=True, eq=False
    )


def _made(name: str, arguments: dict[str, Any]) -> BatchTransform:
    return torchvision_transform(name)(**arguments)
