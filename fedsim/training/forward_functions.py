"""Functions that replace PyTorch's own in a forward pass: dropout, and max pooling with a faster gradient.

Dropout has counter-based random numbers: a mask is a function of (seed, round, worker, step, layer). Masks therefore
do not depend on the engine. The Philox key is derived from (seed, "layers", round, worker). The counter contains the
step in the worker's round and the number of the dropout call in the forward pass (the layer). The elements of all
samples of a batch are numbered consecutively. Each element has a random 32-bit word, and is kept if this word is below
round((1 - p) * 2^32). See `fedsim.core.philox`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedsim.core.philox import BLOCK_BYTES, BLOCKS_AT_ONCE_ON_GPU, Stream, bernoulli
from fedsim.core.randomness import draw_keys, preserve_random_state
from fedsim.data.tensors import in_order
from fedsim.system.devices import to_device
from fedsim.training.batches import BatchSource
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask

FEATURE_DROPOUTS = (F.dropout1d, F.dropout2d, F.dropout3d)  # draw once for each channel of each sample
DROPOUTS = (F.dropout, *FEATURE_DROPOUTS)
UNBATCHED_NDIM = {F.dropout1d: 2, F.dropout3d: 4}  # inputs with this ndim have no batch dimension

# Philox blocks that one call generates, for several steps: the overhead of a call equals that of about 2^13 blocks.
BLOCKS_PER_STACK = 1 << 15
BLOCKS_PER_ROW = 1 << 14  # many rows may train in turn, each with its own blocks
GPU_BLOCK_FACTOR = 32  # a device other than a CPU generates this many times as many blocks


@dataclass(frozen=True)
class Dropout:
    """One dropout call in a forward pass.

    Attributes:
        function: dropout function, such as torch.nn.functional.dropout; one of `DROPOUTS`.
        p: probability that an element (or a channel) is zeroed.
        shape: shape of the mask for one sample.
    """

    function: Callable[..., Tensor]
    p: float
    shape: tuple[int, ...]

    @classmethod
    def of(cls, function: Callable[..., Tensor], inputs_shape: torch.Size, p: float) -> Dropout:
        """Return the description of the call `function(inputs, p)`, for inputs of shape `inputs_shape`."""
        shape = tuple(inputs_shape[1:])
        if function in FEATURE_DROPOUTS:  # without a batch dimension, channels are the first dimension
            channels = shape[:1] if len(inputs_shape) != UNBATCHED_NDIM.get(function) else (1,)
            shape = (*channels, *[1] * (len(inputs_shape) - 2))
        return cls(function, p, shape)


class ForwardFunctions(TorchFunctionMode):
    """Context manager that replaces dropout by a multiplication with given factors, and speeds up max pooling.

    The factors are a scaled mask with the values 0 and 1 / (1 - p).

    Args:
        factors_of: `factors_of(dropout, samples)` returns the factors [samples, ...] for a dropout call, or None to
            omit dropout in this call.
    """

    def __init__(self, factors_of: Callable[[Dropout, int], Tensor | None]) -> None:
        super().__init__()
        self._factors_of = factors_of

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function not in DROPOUTS:
            return self.call_function(function, args, kwargs)
        inputs, p, training, inplace = _dropout_arguments(*args, **kwargs)
        if not (training and p):
            return inputs
        if not 0 < p <= 1:
            return function(*args, **kwargs)  # raises ValueError
        factors = self._factors_of(Dropout.of(function, inputs.shape, p), inputs.shape[0])
        return inputs if factors is None else multiplied(inputs, factors, inplace)

    def call_function(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a function that is not dropout, and return its result. Subclasses may replace the function."""
        result = function(*args, **kwargs)
        return with_gradient_in_order(result) if function is F.max_pool2d else result


class Recording(ForwardFunctions):
    """Context manager that omits dropout, and records each dropout call and its number of samples."""

    def __init__(self) -> None:
        super().__init__(self._note)
        self.dropouts: list[Dropout] = []
        self.samples: list[int] = []

    def _note(self, dropout: Dropout, samples: int) -> None:
        self.dropouts.append(dropout)
        self.samples.append(samples)


def multiplied(inputs: Tensor, factors: Tensor, inplace: bool) -> Tensor:
    """Return `inputs` times the dropout factors, computed in place if `inplace` is true."""
    if factors.dtype != inputs.dtype:
        factors = factors.to(inputs.dtype)
    return inputs.mul_(factors) if inplace else inputs * factors


def with_gradient_in_order(pooled: Tensor) -> Tensor:
    """Return the result of a max pooling, with a hook that converts its gradient to the images' memory format.

    On a CPU, images are channels_last, but the gradient of a linear layer after them is not. PyTorch would then copy
    all tensors of the pooling's backward pass, which takes seven times longer and slows the layers before.
    """
    if torch._C._functorch.is_functorch_wrapped_tensor(pooled):  # torch.func.vmap has no `in_order`
        return pooled
    if pooled.requires_grad and pooled.ndim == 4 and pooled.device.type == "cpu" and not pooled.is_contiguous():
        pooled.register_hook(in_order)
    return pooled


def _dropout_arguments(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, float, bool, bool]:
    return input, p, training, inplace


def layer_keys(seed: int, rounds: np.ndarray, workers: np.ndarray) -> np.ndarray:
    """Return a random seed for the dropout masks of each of n pairs of round and worker, int64 [n]."""
    return draw_keys(seed, "layers", rounds, workers)


def dropout_factors(
    keys: Tensor,
    first_step: Tensor | int,
    steps: int,
    batch: int,
    dropouts: Sequence[Dropout],
    dtype: torch.dtype,
    first_layer: int = 0,
) -> list[Tensor]:
    """Return the scaled mask of each dropout call, with the values 0 and 1 / (1 - p), as [steps, k, batch, ...].

    Args:
        keys: random seed of each of k workers, int64 [k]; see `layer_keys`.
        first_step: number of the first step in the worker's round; int, or int64 [] or [k] on the same device.
        steps: number of steps.
        batch: number of samples in a batch; a smaller batch uses the factors of the first samples.
        dropouts: dropout calls of a forward pass, in call order.
        dtype: dtype of the factors.
        first_layer: position of `dropouts[0]` among all dropout calls of a forward pass, from 0.
    """
    if not dropouts:
        return []
    step = torch.arange(steps, device=keys.device).unsqueeze(1) + first_step
    counts = [batch * math.prod(dropout.shape) for dropout in dropouts]
    masks = bernoulli(Stream(keys, step, first_layer), counts, [1 - dropout.p for dropout in dropouts])
    return [
        mask.to(dtype).mul_(0 if dropout.p == 1 else 1 / (1 - dropout.p)).unflatten(-1, (batch, *dropout.shape))
        for mask, dropout in zip(masks, dropouts, strict=True)
    ]


def blocks_of_step(dropouts: Sequence[Dropout], batch: int) -> int:
    """Return the number of Philox blocks for a worker's dropout masks in a step with `batch` samples."""
    return sum(-(-batch * math.prod(dropout.shape) // 4) for dropout in dropouts)


def mask_bytes(dropouts: Sequence[Dropout], batch: int, itemsize: int) -> int:
    """Return the memory, in bytes per worker, for the dropout masks of a step and their products.

    New masks are generated while the previous ones exist. For each element, there are two masks, a Boolean and its
    copy, and the product of a mask with an activation and the gradient of this product.
    """
    return 4 * blocks_of_step(dropouts, batch) * (4 * itemsize + 2)


def ahead_bytes(dropouts: Sequence[Dropout], batch: int, itemsize: int, workers: int) -> int:
    """Return the memory, in bytes, that masks need on a GPU in addition to `mask_bytes` for each worker.

    This is the memory for random integers, and for masks that are generated ahead of their steps.
    """
    if not dropouts:
        return 0
    ahead = BLOCKS_PER_STACK * GPU_BLOCK_FACTOR
    at_once = min(BLOCKS_AT_ONCE_ON_GPU, ahead + workers * blocks_of_step(dropouts, batch))
    return BLOCK_BYTES * at_once + 4 * ahead * (2 * itemsize + 2)


@dataclass
class FactorsAhead:
    """Dropout masks of k workers, generated for several steps at once.

    Args:
        keys: random seed of each worker, int64 [k]; see `layer_keys`.
        steps: maximum number of steps.
        batch: maximum number of samples in a batch.
        dropouts: dropout calls of a forward pass, in call order.
        dtype: dtype of the masks.
        first_step: step that gets the first masks, counted from 0 in each worker's round, int64 [k]; None for 0.
        blocks: approximate number of random blocks (of four 32-bit words) to generate at once on a CPU.
    """

    keys: Tensor
    steps: int
    batch: int
    dropouts: Sequence[Dropout]
    dtype: torch.dtype
    first_step: Tensor | None = None
    blocks: int = BLOCKS_PER_STACK

    def __post_init__(self) -> None:
        self._first_step = torch.zeros_like(self.keys) if self.first_step is None else self.first_step
        self._at_once = self.blocks * (1 if self.keys.device.type == "cpu" else GPU_BLOCK_FACTOR)
        self._drawn: list[tuple[Tensor, ...]] = []  # by dropout call and step: [rows, batch, ...]
        self._begin = self._end = self._rows = 0

    def of(self, step: int, rows: int) -> list[Tensor]:
        """Return the scaled masks [rows, batch, ...] of each dropout call in step number `step` (from 0).

        The masks are those of the first `rows` workers.
        """
        if not self.dropouts:
            return []
        if not self._begin <= step < self._end or rows > self._rows:
            first_step = self._first_step[:rows] + step
            of_a_step = rows * blocks_of_step(self.dropouts, self.batch)
            steps = max(1, min(self._at_once // max(1, of_a_step), self.steps - step))
            drawn = dropout_factors(self.keys[:rows], first_step, steps, self.batch, self.dropouts, self.dtype)
            self._drawn = [factors.unbind() for factors in drawn]
            self._begin, self._end, self._rows = step, step + steps, rows
        step_factors = [factors[step - self._begin] for factors in self._drawn]
        return step_factors if rows == self._rows else [factors[:rows] for factors in step_factors]


class RowDropout:
    """Dropout masks for workers that are trained one after another.

    Attributes:
        round: masks of the worker whose forward pass is running; None outside of a forward pass.
        module_calls: number of dropout calls made by modules such as nn.Dropout.
        by_modules: whether such modules make all dropout calls of the model. The value is set when `calls` is computed.
    """

    def __init__(self, task: RunTask, shared: SharedState, batch_source: BatchSource) -> None:
        self._task, self._shared, self._batch_source = task, shared, batch_source
        self.dtype, self.module_calls, self.by_modules = task.dtype, 0, False
        self.round: RoundDropout | None = None

    def new_module(self) -> nn.Module:
        """Return a new model whose dropout modules (such as nn.Dropout) get their masks from this object.

        Its nn.MaxPool2d modules become `MaxPool2d`, which has a faster gradient.
        """
        model = self._task.new_module()
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and type(module) in FUNCTIONS:
                module.__class__ = DROPOUT_MODULES[type(module)]  # keeps the module's hooks and name
                module.of_rows = self  # type: ignore[assignment]
            elif type(module) is nn.MaxPool2d:
                module.__class__ = MaxPool2d
        return model

    @cached_property
    def calls(self) -> tuple[Dropout, ...]:
        """Dropout calls of a training forward pass, in call order.

        The tuple is empty if the calls cannot be determined. Dropout then uses PyTorch's random generator.
        """
        train, self.module_calls = self._shared.data.train, 0
        inputs, targets = train.gather(torch.arange(min(self._task.schedule.largest_batch, len(train))))
        with preserve_random_state(self._task.device), torch.enable_grad(), Recording() as recording:
            try:
                loss = self._task.objective(self.new_module().train(), inputs, targets)
                calls = tuple(recording.dropouts)
                self.by_modules = self.module_calls == len(calls)
                if calls:
                    _backward_under_modes(loss)
            except torch.OutOfMemoryError:  # do not silently switch to other random numbers
                raise
            except Exception:
                return ()
        return calls if len(recording.dropouts) == len(calls) else ()

    def of(self, worker: int, round: int, steps: int | None = None) -> RoundDropout:
        """Return the dropout masks of a worker in a round.

        `steps` is the number of steps. The default is the number of steps that the worker trains in this round.
        """
        task, batch_source = self._task, self._batch_source
        steps = batch_source.steps(worker, round) if steps is None else steps
        keys = torch.from_numpy(layer_keys(task.experiment.seed, np.array([round]), np.array([worker])))
        batch = min(task.schedule.of(worker, round).batch_size, batch_source.size(worker))
        return RoundDropout(self, to_device(keys, task.device), steps, batch, round)


class RoundDropout:
    """Dropout masks of one worker in one round, for workers that are trained one after another.

    Args:
        of_rows: object that contains the model's dropout calls, common to all workers of the process.
        key: random seed of the worker in the round, int64 [1]; see `layer_keys`.
        steps: maximum number of steps.
        batch: maximum number of samples in a batch.
        round: number of the round.
    """

    def __init__(self, of_rows: RowDropout, key: Tensor, steps: int, batch: int, round: int) -> None:
        self.round, self._of_rows, self._key = round, of_rows, key
        self._ahead = FactorsAhead(key, steps, batch, of_rows.calls, of_rows.dtype, blocks=BLOCKS_PER_ROW)

    def factors(self, step: int, samples: int) -> list[Tensor]:
        """Return the scaled masks [samples, ...] of each recorded dropout call in step number `step`."""
        return [factors[0, :samples] for factors in self._ahead.of(step, 1)]

    def at(self, step: int, samples: int) -> AbstractContextManager[Any]:
        """Return a context manager in which forward passes use the dropout masks of step number `step`.

        `samples` is the number of samples in the batch.
        """
        return self._at(step, samples) if self._of_rows.calls else nullcontext()

    @contextmanager
    def _at(self, step: int, samples: int) -> Iterator[None]:
        self._step, self._layer, self._factors = step, 0, self.factors(step, samples)
        if not self._of_rows.by_modules:
            with ForwardFunctions(self.factors_of):
                yield
            return
        self._of_rows.round = self
        try:
            yield
        finally:
            self._of_rows.round = None

    def factors_of(self, dropout: Dropout, samples: int) -> Tensor:
        """Return the scaled mask [samples, ...] of `dropout`, the next dropout call in the forward pass."""
        layer, calls = self._layer, self._of_rows.calls
        self._layer += 1
        if layer < len(calls) and dropout == calls[layer] and len(self._factors[layer]) == samples:
            return self._factors[layer]
        return dropout_factors(self._key, self._step, 1, samples, [dropout], self._of_rows.dtype, layer)[0][0, 0]


class _DropoutModule(nn.modules.dropout._DropoutNd):
    """Dropout module that uses the mask of the current worker and step."""

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


class MaxPool2d(nn.MaxPool2d):
    """Max pooling with a faster gradient; see `with_gradient_in_order`."""

    def forward(self, input: Tensor) -> Any:
        pooled = super().forward(input)
        return pooled if self.return_indices else with_gradient_in_order(pooled)


def _backward_under_modes(loss: Tensor) -> None:
    """Run `loss.backward()` so that active torch function modes also see the functions called in the backward pass."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)
