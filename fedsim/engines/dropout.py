"""Dropout by counter-based draws: a mask is a function of (seed, round, worker, step, layer), on every engine.

What one call of a dropout draws goes by the key of (seed, "layers", round, worker), the number of the step in the
worker's round, and the number of the call in the forward pass (the layer). An element is kept where the word with its
number, sample * elements of a sample + element, is below round((1 - p) * 2^32). See `fedsim.philox`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedsim.engines.feed import Feed
from fedsim.engines.job import Memory, Task
from fedsim.engines.stacked_operations import Dropout, PreparedDropout, Recording
from fedsim.philox import Stream, bernoulli
from fedsim.randomness import draw_key, random_state_kept
from fedsim.training import Objective

# Blocks of random words drawn at once, for some steps ahead: a call costs about as much as 2^13 blocks do.
BLOCKS_OF_A_STACK = 1 << 15
BLOCKS_OF_A_ROW = 1 << 13  # of which many may be in turns
TIMES_OFF_CPU = 32


def layer_key(seed: int, round: int, worker: int) -> int:
    """The key of all that the dropouts of a worker draw in a round."""
    return draw_key(seed, "layers", round, worker)


def dropout_factors(
    keys: Tensor,
    first_step: Tensor | int,
    steps: int,
    batch: int,
    dropouts: Sequence[Dropout],
    dtype: torch.dtype,
    first_layer: int = 0,
) -> list[Tensor]:
    """What each dropout multiplies its inputs by, 0 or 1 / (1 - p): [steps, k, batch, ...] for each.

    On the device of the keys, without reading from it or copying to it, so a captured graph may hold this call.

    Args:
        keys: `layer_key` of each row's worker, int64 [k].
        first_step: number of the first of the steps in the workers' round; int64 [] or [k] on the same device, or int.
        steps: how many steps.
        batch: how many samples; of a smaller batch the factors are the first ones of these.
        dropouts: the calls of dropout in a forward pass, in their order.
        dtype: of the factors.
        first_layer: number of the first of these calls.
    """
    if not dropouts:
        return []
    step = torch.arange(steps, device=keys.device).unsqueeze(1) + first_step
    counts = [batch * math.prod(dropout.shape) for dropout in dropouts]
    kept = bernoulli(Stream(keys, step, first_layer), counts, [1 - dropout.p for dropout in dropouts])
    return [
        mask.to(dtype).mul_(0 if dropout.p == 1 else 1 / (1 - dropout.p)).unflatten(-1, (batch, *dropout.shape))
        for mask, dropout in zip(kept, dropouts, strict=True)
    ]


class FactorsAhead:
    """The factors of k rows' dropouts step by step, drawn for several steps at once.

    Args:
        keys: `layer_key` of each row's worker, int64 [k].
        steps: how many steps there are at most.
        batch: how many samples a batch has at most.
        dropouts: the calls of dropout in a forward pass, in their order.
        dtype: of the factors.
        blocks: of random words that are drawn at once, about.
        first_step: number of each row's first step in the worker's round, int64 [k].
    """

    def __init__(
        self,
        keys: Tensor,
        steps: int,
        batch: int,
        dropouts: Sequence[Dropout],
        dtype: torch.dtype,
        blocks: int = BLOCKS_OF_A_STACK,
        first_step: Tensor | None = None,
    ) -> None:
        self._keys, self._steps, self._batch, self._dropouts, self._dtype = keys, steps, batch, dropouts, dtype
        self._blocks = blocks if keys.device.type == "cpu" else blocks * TIMES_OFF_CPU
        self._first_step = torch.zeros_like(keys) if first_step is None else first_step
        self._drawn: list[Tensor] = []
        self._begin = self._end = self._rows = 0

    def of(self, step: int, rows: int) -> list[Tensor]:
        """The factors of step number `step`, from 0, for the first `rows` rows: [rows, batch, ...] for each dropout."""
        if not self._dropouts:
            return []
        if not self._begin <= step < self._end or rows > self._rows:
            blocks = rows * sum(-(-self._batch * math.prod(dropout.shape) // 4) for dropout in self._dropouts)
            steps = max(1, min(self._blocks // max(1, blocks), self._steps - step))
            first_step = self._first_step[:rows] + step
            of_rows = self._keys[:rows], first_step, steps
            self._drawn = dropout_factors(*of_rows, self._batch, self._dropouts, self._dtype)
            self._begin, self._end, self._rows = step, step + steps, rows
        return [factors[step - self._begin, :rows] for factors in self._drawn]


class RoundDropout:
    """The dropout of one worker in one round, where rows train one after another.

    Args:
        key: `layer_key` of the worker in the round, int64 [1].
        steps, batch: how many steps the round has, and how many samples a batch, at most.
        dropouts: the calls of dropout that a forward pass is known to have; others are drawn when they come.
        dtype: of the factors.
    """

    def __init__(
        self, key: Tensor, steps: int, batch: int, dropouts: Sequence[Dropout], dtype: torch.dtype, round: int
    ) -> None:
        self.round, self.key, self.dropouts, self.dtype = round, key, dropouts, dtype
        self._ahead = FactorsAhead(key, steps, batch, dropouts, dtype, BLOCKS_OF_A_ROW)

    def factors(self, step: int, samples: int) -> list[Tensor]:
        """What each dropout multiplies a batch of so many samples by, [samples, ...]."""
        return [factors[0, :samples] for factors in self._ahead.of(step, 1)]

    def at(self, step: int, samples: int) -> AbstractContextManager[Any]:
        """A context in which a forward pass has the dropout of this step; nothing where the model has none."""
        if not self.dropouts:
            return contextlib.nullcontext()
        return DrawnDropout(self, step, self.factors(step, samples))


class RowDropout:
    """The dropout of workers whose rows train one after another, in one process."""

    def __init__(self, task: Task, memory: Memory, feed: Feed) -> None:
        self._task, self._memory, self._feed = task, memory, feed

    @cached_property
    def dropouts(self) -> tuple[Dropout, ...]:
        """The calls of dropout in a forward pass; none where PyTorch has to draw them."""
        return recorded_dropouts(self._task, self._memory, self._task.schedule.batch_size)

    def of(self, worker: int, round: int, steps: int | None = None) -> RoundDropout:
        """The dropout of a worker in a round, of so many steps if not of as many as the schedule has."""
        task, feed = self._task, self._feed
        steps = feed.steps(worker, round) if steps is None else steps
        key = torch.tensor([layer_key(task.seed, round, worker)], device=task.device)
        batch = min(task.schedule.batch_size, feed.size(worker))
        return RoundDropout(key, steps, batch, self.dropouts, task.dtype, round)


class DrawnDropout(PreparedDropout):
    """In a forward pass of one row: dropout by factors drawn before, or now where a call is not as it was recorded."""

    def __init__(self, dropout: RoundDropout, step: int, factors: Sequence[Tensor]) -> None:
        super().__init__(())
        self._dropout, self._step, self._prepared, self._layer = dropout, step, factors, 0

    def factors_of(self, dropout: Dropout, samples: int) -> Tensor:
        layer, of_round = self._layer, self._dropout
        self._layer += 1
        if layer < len(of_round.dropouts) and dropout == of_round.dropouts[layer]:
            factors = self._prepared[layer]
            if len(factors) == samples:
                return factors
        drawn = dropout_factors(of_round.key, self._step, 1, samples, [dropout], of_round.dtype, layer)
        return drawn[0][0, 0]


def recorded_dropouts(task: Task, memory: Memory, samples: int) -> tuple[Dropout, ...]:
    """The calls of dropout in a forward pass in training, found out on the first samples of the data set.

    None are given where the model cannot be run on them, which training will come to, and where the backward pass calls
    dropout again (checkpoints of activations), which then has to draw from PyTorch's generator, whose state they keep.
    """
    inputs, targets = memory.train.gather(torch.arange(min(samples, len(memory.train))))
    with random_state_kept(task.device), torch.enable_grad(), Recording() as recording:
        try:
            loss = Objective(task.precision)(task.new_module().train(), inputs, targets)
            dropouts = tuple(recording.dropouts)
            if dropouts:
                _backward_under_modes(loss)
        except torch.OutOfMemoryError:  # no property of the model, and other draws would not be noticed
            raise
        except Exception:
            return ()
    return dropouts if len(recording.dropouts) == len(dropouts) else ()


def _backward_under_modes(loss: Tensor) -> None:
    """`loss.backward()`, but function modes see what it calls, as they do not within a function that they handle."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)
