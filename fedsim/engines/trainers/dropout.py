"""Dropout by counter-based draws: a mask is a function of (seed, round, worker, step, layer), on every engine.

A call of a dropout draws by the key of (seed, "layers", round, worker), the number of the step in the worker's round,
and the number of the call in the forward pass (the layer). An element is kept where the word with its
number, sample * elements of a sample + element, is below round((1 - p) * 2^32). See `fedsim.core.philox`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedsim.core.philox import Stream, bernoulli
from fedsim.core.randomness import draw_key, preserve_random_state
from fedsim.engines.shared_state import SharedState
from fedsim.engines.task import RunTask
from fedsim.engines.trainers.batches import BatchSource

FEATURE_DROPOUTS = (F.dropout1d, F.dropout2d, F.dropout3d)  # draw once for each channel of each sample
DROPOUTS = (F.dropout, *FEATURE_DROPOUTS)
WITHOUT_SAMPLES = {F.dropout1d: 2, F.dropout3d: 4}  # dimensions of an input that is one sample, by PyTorch's reading

# Blocks of random words that a call draws, for several steps: the call itself costs about as much as 2^13 blocks.
BLOCKS_OF_A_STACK = 1 << 15
BLOCKS_OF_A_ROW = 1 << 14  # many rows may train by turns, each with its own blocks
TIMES_OFF_CPU = 32


@dataclass(frozen=True)
class Dropout:
    """One call of a dropout in a forward pass.

    Attributes:
        function: which of `DROPOUTS`.
        p: probability of an element (or a channel) to be zeroed.
        shape: of what it draws for one sample.
    """

    function: Callable[..., Tensor]
    p: float
    shape: tuple[int, ...]

    @classmethod
    def of(cls, function: Callable[..., Tensor], inputs_shape: torch.Size, p: float) -> Dropout:
        shape = tuple(inputs_shape[1:])
        if function in FEATURE_DROPOUTS:  # without a dimension of samples, channels stand first
            channels = shape[:1] if len(inputs_shape) != WITHOUT_SAMPLES.get(function) else (1,)
            shape = (*channels, *[1] * (len(inputs_shape) - 2))
        return cls(function, p, shape)


class DropoutMode(TorchFunctionMode):
    """In a forward pass: multiplies by given factors where dropout is called. `other` calls all other functions.

    Args:
        factors_of: returns the factors [samples, ...] of a call and a number of samples; None: leave that dropout out.
    """

    def __init__(self, factors_of: Callable[[Dropout, int], Tensor | None]) -> None:
        super().__init__()
        self._factors_of = factors_of

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function not in DROPOUTS:
            return self.other(function, args, kwargs)
        inputs, p, training, inplace = _dropout_arguments(*args, **kwargs)
        if not (training and p):
            return inputs
        if not 0 < p <= 1:
            return function(*args, **kwargs)  # raises ValueError
        factors = self._factors_of(Dropout.of(function, inputs.shape, p), inputs.shape[0])
        return inputs if factors is None else multiplied(inputs, factors, inplace)

    def other(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call of any function but dropout."""
        return function(*args, **kwargs)


class Recording(DropoutMode):
    """Leaves dropout out of a forward pass, and notes where it would have been, and of how many samples."""

    def __init__(self) -> None:
        super().__init__(self._note)
        self.dropouts: list[Dropout] = []
        self.samples: list[int] = []

    def _note(self, dropout: Dropout, samples: int) -> None:
        self.dropouts.append(dropout)
        self.samples.append(samples)


def multiplied(inputs: Tensor, factors: Tensor, inplace: bool) -> Tensor:
    """The result of a dropout with these factors."""
    if factors.dtype != inputs.dtype:
        factors = factors.to(inputs.dtype)
    return inputs.mul_(factors) if inplace else inputs * factors


def _dropout_arguments(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, float, bool, bool]:
    return input, p, training, inplace


def layer_key(seed: int, round: int, worker: int) -> int:
    """The key of the dropout draws of a worker in a round."""
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
    """The factors of each dropout, 0 or 1 / (1 - p): [steps, k, batch, ...] for each.

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


@dataclass
class FactorsAhead:
    """The factors of k rows' dropouts step by step, drawn for several steps at once.

    Args:
        keys: `layer_key` of each row's worker, int64 [k].
        steps: how many steps there are at most.
        batch: how many samples a batch has at most.
        dropouts: the calls of dropout in a forward pass, in their order.
        dtype: of the factors.
        first_step: number of each row's first step in the worker's round, int64 [k].
        blocks: about how many blocks of random words to draw at once.
    """

    keys: Tensor
    steps: int
    batch: int
    dropouts: Sequence[Dropout]
    dtype: torch.dtype
    first_step: Tensor | None = None
    blocks: int = BLOCKS_OF_A_STACK

    def __post_init__(self) -> None:
        self._first_step = torch.zeros_like(self.keys) if self.first_step is None else self.first_step
        self._at_once = self.blocks * (1 if self.keys.device.type == "cpu" else TIMES_OFF_CPU)
        self._drawn: list[tuple[Tensor, ...]] = []  # of each dropout, of each step: [rows, batch, ...]
        self._begin = self._end = self._rows = 0

    def of(self, step: int, rows: int) -> list[Tensor]:
        """Return the factors [rows, batch, ...] of each dropout in a step (from 0), for the first `rows` rows."""
        if not self.dropouts:
            return []
        if not self._begin <= step < self._end or rows > self._rows:
            first_step = self._first_step[:rows] + step
            of_a_step = rows * sum(-(-self.batch * math.prod(dropout.shape) // 4) for dropout in self.dropouts)
            steps = max(1, min(self._at_once // max(1, of_a_step), self.steps - step))
            drawn = dropout_factors(self.keys[:rows], first_step, steps, self.batch, self.dropouts, self.dtype)
            self._drawn = [factors.unbind() for factors in drawn]
            self._begin, self._end, self._rows = step, step + steps, rows
        found = [factors[step - self._begin] for factors in self._drawn]
        return found if rows == self._rows else [factors[:rows] for factors in found]


class RowDropout:
    """The dropout of workers whose rows train one after another, in one process.

    Attributes:
        round: the round whose forward pass is under way, for the dropout modules of a model.
        module_calls: number of calls that these modules have made.
        by_modules: whether they make all `calls`; known with them.
    """

    def __init__(self, task: RunTask, shared: SharedState, batch_source: BatchSource) -> None:
        self._task, self._shared, self._batch_source = task, shared, batch_source
        self.dtype, self.module_calls, self.by_modules = task.dtype, 0, False
        self.round: RoundDropout | None = None

    def new_module(self) -> nn.Module:
        """A new module of the task, whose dropouts are those of the step that `RoundDropout.at` has set.

        Its dropout modules take their factors from this object. A function mode finds all calls of dropout, but every
        other call in the forward pass goes through it too, which costs a small model a tenth of its step.
        """
        model = self._task.new_module()
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and type(module) in FUNCTIONS:
                module.__class__ = DROPOUT_MODULES[type(module)]  # so that its hooks and its name stay
                module.of_rows = self  # type: ignore[assignment]
        return model

    @cached_property
    def calls(self) -> tuple[Dropout, ...]:
        """The calls of dropout in a forward pass in training, found out on the first samples of the data set.

        There are none if the model fails on these samples, which training will report. There are none either if the
        backward pass calls dropout again, as activation checkpoints do: they restore the state of PyTorch's generator,
        so dropout has to draw from it.
        """
        train, self.module_calls = self._shared.data.train, 0
        inputs, targets = train.gather(torch.arange(min(self._task.schedule.batch_size, len(train))))
        with preserve_random_state(self._task.device), torch.enable_grad(), Recording() as recording:
            try:
                loss = self._task.objective(self.new_module().train(), inputs, targets)
                calls = tuple(recording.dropouts)
                self.by_modules = self.module_calls == len(calls)
                if calls:
                    _backward_under_modes(loss)
            except torch.OutOfMemoryError:  # other draws without a word would be worse
                raise
            except Exception:
                return ()
        return calls if len(recording.dropouts) == len(calls) else ()

    def of(self, worker: int, round: int, steps: int | None = None) -> RoundDropout:
        """The dropout of a worker in a round, of so many steps if not of as many as the schedule has."""
        task, batch_source = self._task, self._batch_source
        steps = batch_source.steps(worker, round) if steps is None else steps
        key = torch.tensor([layer_key(task.experiment.seed, round, worker)], device=task.device)
        return RoundDropout(self, key, steps, min(task.schedule.batch_size, batch_source.size(worker)), round)


class RoundDropout:
    """The dropout of one worker in one round, where rows train one after another.

    Args:
        of_rows: has the calls of dropout that a forward pass is known to have; others draw factors when they come.
        key: `layer_key` of the worker in the round, int64 [1].
        steps, batch: how many steps the round has, and how many samples a batch, at most.
    """

    def __init__(self, of_rows: RowDropout, key: Tensor, steps: int, batch: int, round: int) -> None:
        self.round, self._of_rows, self._key = round, of_rows, key
        self._ahead = FactorsAhead(key, steps, batch, of_rows.calls, of_rows.dtype, blocks=BLOCKS_OF_A_ROW)

    def factors(self, step: int, samples: int) -> list[Tensor]:
        """What each dropout multiplies a batch of so many samples by, [samples, ...]."""
        return [factors[0, :samples] for factors in self._ahead.of(step, 1)]

    def at(self, step: int, samples: int) -> AbstractContextManager[Any]:
        """A context in which a forward pass has the dropout of this step; nothing where the model has none."""
        return self._at(step, samples) if self._of_rows.calls else nullcontext()

    @contextmanager
    def _at(self, step: int, samples: int) -> Iterator[None]:
        self._step, self._layer, self._factors = step, 0, self.factors(step, samples)
        if not self._of_rows.by_modules:
            with DropoutMode(self.factors_of):
                yield
            return
        self._of_rows.round = self
        try:
            yield
        finally:
            self._of_rows.round = None

    def factors_of(self, dropout: Dropout, samples: int) -> Tensor:
        """What the next call of a dropout multiplies by, [samples, ...]."""
        layer, calls = self._layer, self._of_rows.calls
        self._layer += 1
        if layer < len(calls) and dropout == calls[layer] and len(self._factors[layer]) == samples:
            return self._factors[layer]
        return dropout_factors(self._key, self._step, 1, samples, [dropout], self._of_rows.dtype, layer)[0][0, 0]


class _DropoutModule(nn.modules.dropout._DropoutNd):
    """A dropout module that multiplies by the factors of the current step."""

    of_rows: RowDropout
    function: Callable[..., Tensor]

    def forward(self, inputs: Tensor) -> Tensor:
        self.of_rows.module_calls += 1
        of_round = self.of_rows.round
        if of_round is None or not self.training or not 0 < self.p <= 1:
            return self.function(inputs, self.p, self.training, self.inplace)
        dropout = _dropout_of(self.function, inputs.shape, self.p)
        return multiplied(inputs, of_round.factors_of(dropout, inputs.shape[0]), self.inplace)


_dropout_of = lru_cache(maxsize=256)(Dropout.of)  # called twice in a step of a small model

FUNCTIONS = {nn.Dropout: F.dropout, nn.Dropout1d: F.dropout1d, nn.Dropout2d: F.dropout2d, nn.Dropout3d: F.dropout3d}
DROPOUT_MODULES = {
    cls: type(cls.__name__, (_DropoutModule, cls), {"function": staticmethod(function)})
    for cls, function in FUNCTIONS.items()
}


def _backward_under_modes(loss: Tensor) -> None:
    """`loss.backward()`, but function modes see what it calls, as they do not within a function that they handle."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)
