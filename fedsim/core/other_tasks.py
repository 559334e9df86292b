"""Learning tasks whose targets are no class labels: measured values, and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedsim.core.learning_task import Reduction, described, learning_task, shape_of
from fedsim.errors import DataError, ExperimentError


@dataclass(frozen=True)
class Regression:
    """The task that `regression` makes, with the name of its loss."""

    loss_name: Literal["mse", "l1", "huber"] = "mse"
    delta: float = 1.0

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        outputs, targets = outputs.reshape(targets.shape), targets.to(outputs.dtype)
        if self.loss_name == "huber":
            losses = F.huber_loss(outputs, targets, reduction="none", delta=self.delta)
        else:
            losses = (F.mse_loss if self.loss_name == "mse" else F.l1_loss)(outputs, targets, reduction="none")
        return losses.mean() if reduction == "mean" else losses.reshape(len(losses), -1).mean(1)

    def check_outputs(self, outputs: Tensor, targets: Tensor, classes: int) -> None:
        """Raise ExperimentError unless there is one output for each target."""
        shape, wanted = shape_of(outputs), tuple(targets.shape)
        if shape != wanted and not (targets.ndim == 1 and shape == (*wanted, 1)):
            one = " or [batch, 1]" if targets.ndim == 1 else ""
            raise ExperimentError(f"must return numbers of the shape of the targets, {list(wanted)}{one}, not {shape}")


@learning_task("regression")
@learning_task("mse")
def regression(
    *, loss: Literal["mse", "l1", "huber"] = "mse", delta: Annotated[float, Field(gt=0)] = 1.0
) -> Regression:
    """Numbers as targets: the mean of a loss of the difference of each output and its target. There is no accuracy.

    Outputs have the shape of the targets, [batch] or [batch, outputs]; [batch, 1] stands for [batch]. Cost: a few
    passes over the outputs.

    Args:
        loss: of a difference x, "mse": x^2; "l1": |x|; "huber": x^2 / 2 up to |x| = delta, and beyond it
            delta (|x| - delta / 2) (Huber 1964). As in `torch.nn.functional`.
        delta: of "huber", > 0.

    >>> task = fedsim.core.other_tasks.regression(loss="huber", delta=1.0)
    >>> task.loss(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 0.0]), "none")
    tensor([0.5000, 2.5000])
    """
    if delta != 1 and loss != "huber":
        raise ExperimentError(f"task.delta = {delta}: is a parameter of task.loss = huber, not of {loss}; omit it")
    return Regression(loss, delta)


@learning_task("next_token")
@dataclass(frozen=True)
class NextToken:
    """A token for each place of a sequence: the mean cross entropy of all tokens, and the accuracy of tokens.

    Outputs are logits [batch, length, classes] for targets [batch, length]. A data set holds as targets the inputs one
    place later. Bengio et al. 2003. The loss of a test is the mean of all its tokens; the train loss of a round weights
    each batch by its number of samples, as of other tasks. Cost: a few passes over the outputs.

    Args:
        ignore: targets of this value do not count, such as padding. The loss of a batch without other targets is 0.

    >>> task = fedsim.core.other_tasks.NextToken()
    >>> outputs, targets = torch.zeros(1, 3, 4), torch.tensor([[0, 3, -100]])
    >>> task.loss(outputs, targets), task.correct(outputs, targets)
    (tensor(1.3863), tensor([[ True, False, False]]))
    """

    ignore: int = -100

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=self.ignore, reduction="none")
        sums, counts = losses.view(targets.shape).sum(1), self.counts(targets)
        return sums.sum() / counts.sum().clamp(min=1) if reduction == "mean" else sums / counts.clamp(min=1)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(-1) == targets) & (targets != self.ignore)

    def counts(self, targets: Tensor) -> Tensor:
        return (targets != self.ignore).sum(1)

    def check_outputs(self, outputs: Tensor, targets: Tensor, classes: int) -> None:
        """Raise DataError for other targets, and ExperimentError for another shape and for too few classes."""
        if targets.ndim != 2 or targets.is_floating_point():
            raise DataError(
                f"the task next_token needs a token for each position, int64 [batch, length], not {described(targets)}"
            )
        shape, wanted = shape_of(outputs), list(targets.shape)
        if not isinstance(outputs, Tensor) or outputs.ndim != 3 or outputs.shape[:2] != targets.shape:
            raise ExperimentError(
                f"must return logits [batch, length, classes], for targets of the shape {wanted} not {shape}"
            )
        if classes > outputs.shape[2]:
            raise ExperimentError(f"has {outputs.shape[2]} classes of tokens, but the targets go up to {classes - 1}")
