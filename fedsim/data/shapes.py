"""The shape of a data set's samples, from which the task, the model and the dimensions of the model follow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import getitem

from torch import Tensor

from fedsim.core.learning_task import Binary, Classification, LearningTask, output_count
from fedsim.core.model_inputs import on_each, shapes_of
from fedsim.data.tensors import TensorData, compact
from fedsim.errors import ExperimentError, plural

FEWEST_PIXELS = 16  # sides of the smallest images for which the model `net` is chosen
MOST_CLASSES = 100  # with more classes, most of them must have samples, or their number must be set


@dataclass(frozen=True)
class SampleShape:
    """Properties of a data set's training samples that determine the task and the dimensions of the model.

    Attributes:
        inputs: shape of one input.
        classes: the highest training label or target token plus one; 0 for floating-point targets.
        targets: shape of one target.
        tokens: the highest token of the inputs plus one; 0 if inputs are floating-point numbers.
        gaps: whether the labels are so high and so few that they are probably not consecutive classes.
        whole: the highest target plus one if the targets are floating-point numbers that may be labels, otherwise 0.
        several: names of the inputs with their shapes if there are several, otherwise "". `inputs` is then empty.
    """

    inputs: tuple[int, ...]
    classes: int
    targets: tuple[int, ...] = ()
    tokens: int = 0
    gaps: bool = False
    whole: int = 0
    several: str = ""

    @classmethod
    def of(cls, train: TensorData) -> SampleShape:
        """Return the shape of training samples."""
        inputs, shape, several, tokens = train.inputs, tuple[int, ...](), "", 0
        if isinstance(inputs, Tensor):
            shape = tuple(inputs.shape[1:])
            tokens = 0 if train.dtype.is_floating_point else int(compact(inputs).cpu().numpy().max()) + 1
        else:
            several = shapes_of(on_each(getitem, inputs, 0))
        classes = train.classes if train.targets.is_floating_point() else max(train.classes, 1)
        many = train.has_integers and classes > MOST_CLASSES
        gaps = many and classes > 2 * len(train.targets.unique())
        whole = whole_classes(train.targets)
        return cls(shape, classes, tuple(train.targets.shape[1:]), tokens, gaps, whole, several)

    def __str__(self) -> str:
        if self.several:
            return f"several inputs ({self.several})"
        if self.tokens:
            return plural(self.inputs[0], "token") if len(self.inputs) == 1 else f"integers {list(self.inputs)}"
        if len(self.inputs) == 3:
            channels, height, width = self.inputs
            return f"an image of {height}x{width} pixels with {plural(channels, 'channel')}"
        return plural(self.inputs[0], "number") if len(self.inputs) == 1 else f"numbers {list(self.inputs)}"

    @property
    def task(self) -> str:
        """Name of the learning task for the targets."""
        if not self.classes:
            return "regression"
        is_text = bool(self.targets) if self.several else self.tokens and self.targets == self.inputs
        return "next_token" if is_text else "classification"

    @property
    def model(self) -> str:
        """Name of the default model: a network for tokens, for square images that are not too small, or for numbers."""
        if self.tokens:
            return "char_lstm"
        return "net" if self._is_square and self.inputs[1] >= FEWEST_PIXELS else "mlp"

    @property
    def _is_square(self) -> bool:
        return len(self.inputs) == 3 and self.inputs[1] == self.inputs[2]

    def dimensions(self, task: LearningTask) -> dict[str, int]:
        """Return the parameters that a model takes from the data, by name (see `fedsim.models.base.DIMENSIONS`)."""
        classes = max(self.classes, self.tokens) if self.tokens and self.targets else self.classes
        classes = classes or (self.whole if isinstance(task, (Binary, Classification)) else 0)
        outputs = output_count(task, classes, math.prod(self.targets))
        values = {"classes": outputs, "outputs": outputs}
        if self.tokens:
            if not self.inputs:
                raise ExperimentError(
                    "data: each input is a single integer, like a class label; pass (inputs, targets), in this order, "
                    "or floating-point inputs"
                )
            return {**values, "vocabulary": self.tokens, "context": self.inputs[-1], "last_only": not self.targets}
        if self.several:
            return values
        values["inputs"] = math.prod(self.inputs)
        if len(self.inputs) == 3:
            values["channels"] = self.inputs[0]
        return {**values, "size": self.inputs[1]} if self._is_square else values


def whole_classes(targets: Tensor) -> int:
    """Return the highest target plus one if targets [n] are floating-point, whole and not negative, otherwise 0."""
    if targets.ndim != 1 or not targets.is_floating_point() or not len(targets):
        return 0
    return int(targets.max()) + 1 if bool(((targets >= 0) & (targets % 1 == 0) & (targets < 2**24)).all()) else 0
