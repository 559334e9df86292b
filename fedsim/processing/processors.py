"""Processors, which change each update before it is aggregated: clipping and noise (compressors: `compressors.py`).

A processor is a pure function from an update [d] to an update [d]. Its positional parameters receive these inputs by
name, and must not be changed. Its keyword-only parameters are its configuration:

    update   update of one worker, or its gradient with sync = "gradients", [d]
    draws    Draws on the device of the update, seeded by (seed, round, worker), by the position in the chain and, with
             sync = "gradients", by the step
    metrics  dict to which the processor may add numbers or one-element tensors. Their means over all updates of a round
             are recorded under their keys

A processor returns the new update [d], or (update, nbytes), where nbytes is the number of bytes to send. If a processor
returns no number, the number of the previous processor in the chain is kept. Before the first processor it is the size
of d numbers of the update's dtype. A `Compressor` of `codec.py` also defines how its messages are encoded.

A processor can set the attribute `sums` to true if its updates can be summed by secure aggregation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Annotated, Any

import torch
from torch import Tensor

from fedsim.core.numbers import Example, NonNegativeFloat, PositiveFloat
from fedsim.core.randomness import Draws
from fedsim.core.registry import Component, Registration, Registry
from fedsim.errors import ExperimentError, show
from fedsim.privacy import row_norms
from fedsim.processing.codec import Codec, Compressor, Sender, Shapes, Spec


@dataclass(frozen=True)
class UpdateProcessor(Component):
    """Processor with its parameters.

    Attributes:
        error_feedback: whether each worker adds the error that the processor made (the residual) to its next update.
        compresses: whether `error_feedback` is allowed. False for processors that do not compress, such as `clip`.
    """

    error_feedback: bool = False
    compresses: bool = True

    @classmethod
    def of(cls, registration: Registration, params: dict[str, Any], **settings: Any) -> UpdateProcessor:
        return super().of(registration, params, compresses=getattr(registration.target, "compresses", True), **settings)

    def __call__(self, **inputs: Any) -> tuple[Tensor, int | None]:
        """Apply the processor to an update. Returns the new update [d], and the number of bytes to send, or None.

        Raises ExperimentError if the processor returns an update of another shape or an invalid number of bytes.
        """
        result = self.on(inputs)
        update, nbytes = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        d = len(inputs["update"])
        if not isinstance(update, Tensor) or update.shape != (d,):
            actual = f"shape {list(update.shape)}" if isinstance(update, Tensor) else f"type {type(update).__name__}"
            raise ExperimentError(f"processor {self.name}: must return an update of shape [{d}], not of {actual}")
        if nbytes is not None and (type(nbytes) is not int or nbytes < 0):
            raise ExperimentError(f"processor {self.name}: the number of bytes must be an int >= 0, not {nbytes!r}")
        return update, nbytes


processor = Registry("processor", inputs=("update", "draws", "metrics"), component=UpdateProcessor)


def initial_states(chain: Sequence[UpdateProcessor], row: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """Return what a worker keeps for a chain of processors before its first update: zeros, by name.

    Error feedback keeps a residual [d], named `residual_{position}`. Memories are named `memory_{position}`.

    Args:
        chain: processors, in order.
        row: update of a worker, [d], of which only length, dtype and device count.
        shapes: shapes of the tensors that the update contains.
    """
    states = {
        f"residual_{position}": torch.zeros_like(row) for position, step in enumerate(chain) if step.error_feedback
    }
    for positions in (positions for segment in _segments(chain) for positions in _groups(chain, segment)):
        if codec := _codec(chain, positions, row, shapes):
            sizes = zip(positions, codec.memory_sizes(), strict=True)
            states |= {f"memory_{position}": row.new_zeros(size) for position, size in sizes if size}
    return states


def apply_chain(
    chain: Sequence[UpdateProcessor],
    row: Tensor,
    coordinates: Sequence[int],
    metrics: dict[str, Any],
    states: Mapping[str, Tensor] | None = None,
    shapes: Shapes | None = None,
    purpose: str = "process",
    *,
    seed: int,
    draws: Sequence[Draws] | None = None,
) -> int:
    """Apply a chain of processors to an update, in place, one after another.

    Of consecutive compressors, each compresses the numbers that the previous one sends, such as the k values of
    `top_k`. If a compressor has error feedback, let C be this compressor followed by the next compressors without error
    feedback. C is applied to p = update + e, where e is the worker's residual. The new residual is e = p - C(p) (Seide
    et al. 2014, Karimireddy et al. 2019).

    Args:
        chain: processors, in order.
        row: update of a worker, [d], which is changed.
        coordinates: (round, worker) or (round, step, worker).
        metrics: dict that receives the numbers that the processors record.
        states: what the worker keeps, named as by `initial_states`, which is changed.
        shapes: shapes of the tensors that the update contains. None: one flat vector.
        purpose: name of the draws. Updates to the server and parameters to the workers have different names.
        seed: seed of random draws, together with `purpose` and `coordinates`.
        draws: sources of random numbers, one per processor (see `draws_of_all`). None: they are created here.

    Returns the number of bytes to send for the processed update.
    """
    nbytes, states, shapes = row.nbytes, states or {}, shapes or [row.shape]
    draws = draws or draws_of_all(chain, seed, [coordinates], row.device, purpose)[0]
    for segment in _segments(chain):
        residual = states.get(f"residual_{segment[0]}")
        source = row if residual is None else residual.add_(row)
        for positions in _groups(chain, segment):
            if codec := _codec(chain, positions, row, shapes):
                senders = [Sender(draws[position], metrics, states.get(f"memory_{position}")) for position in positions]
                codec.restore(codec.parts(source, senders), out=row)
                nbytes = codec.nbytes
            else:
                update, declared = chain[positions[0]](update=source, draws=draws[positions[0]], metrics=metrics)
                nbytes = nbytes if declared is None else declared
                row.copy_(update)
            source = row
        if residual is not None:
            residual.sub_(row)
    return nbytes


def draws_of_all(
    chain: Sequence[UpdateProcessor],
    seed: int,
    coordinates: Sequence[Sequence[int]],
    device: torch.device,
    purpose: str = "process",
) -> list[tuple[Draws, ...]]:
    """Return the source of random numbers of each processor, for each of several updates with their `coordinates`.

    See `apply_chain` for the arguments. Use the results in this order (see `Draws.of_all`).
    """
    by_processor = [
        Draws.of_all(purpose, [(*of_update, position) for of_update in coordinates], seed=seed, device=device)
        for position in range(len(chain))
    ]
    return [tuple(draws[number] for draws in by_processor) for number in range(len(coordinates))]


def check_order(chain: Sequence[UpdateProcessor], place: str) -> None:
    """Raise ExperimentError if a compressor follows another one that leaves it nothing to compress.

    Args:
        chain: processors, in order.
        place: setting that contains the chain, for error messages.
    """
    for (first, second), number in zip(pairwise(chain), count(1), strict=False):
        before, after = first.function, second.function
        if not isinstance(before, Compressor) or not isinstance(after, Compressor) or second.error_feedback:
            continue
        if 0 < before.stage >= after.stage:
            raise ExperimentError(
                f"{place}[{number}] = {show(second.name)}: has nothing to compress after {first.name}, which sends "
                f"codes; put {second.name} before {first.name}, or omit one of them"
            )


def _segments(chain: Sequence[UpdateProcessor]) -> list[list[int]]:
    """Divide a chain into segments (lists of positions), in which only the first processor may have error feedback."""
    segments: list[list[int]] = []
    for position, step in enumerate(chain):
        if not segments or step.error_feedback or not step.compresses:
            segments.append([])
        segments[-1].append(position)
    return segments


def _groups(chain: Sequence[UpdateProcessor], positions: Sequence[int]) -> list[list[int]]:
    """Divide consecutive positions of a chain into groups. A group is a run of compressors, or one other processor."""
    groups: list[list[int]] = []
    for position in positions:
        alone = not isinstance(chain[position].function, Compressor)
        if not groups or alone or not isinstance(chain[groups[-1][-1]].function, Compressor):
            groups.append([])
        groups[-1].append(position)
    return groups


def _codec(chain: Sequence[UpdateProcessor], positions: Sequence[int], row: Tensor, shapes: Shapes) -> Codec | None:
    """Return the codec of the processors of a group (see `_groups`), or None if it is not a group of compressors."""
    functions = (chain[position].function for position in positions)
    compressors = tuple(function for function in functions if isinstance(function, Compressor))
    return Codec(compressors, Spec(len(row), row.dtype, shapes)) if compressors else None


@processor("clip")
def clip(update: Tensor, metrics: dict[str, Any], *, max_norm: PositiveFloat = 1.0) -> Tensor:
    """Clip an update x to an L2 norm of at most max_norm: x min(1, max_norm / |x|) (McMahan et al. 2018).

    Args:
        update: update of a worker, [d].
        metrics: receives `clipped_share`, the fraction of updates that are clipped.
        max_norm: maximum L2 norm, > 0.

    Returns the clipped update [d], whose norm exceeds max_norm by rounding at most. Cost: two passes over the update.

    >>> fedsim.processing.processors.clip(torch.tensor([3.0, 4.0]), {}, max_norm=1.0)
    tensor([0.6000, 0.8000])
    """
    factor = (max_norm / row_norms(update.unsqueeze(0))[0]).clamp(max=1)
    metrics["clipped_share"] = factor < 1
    return update * factor


clip.compresses = False  # error feedback is not allowed, because it would add again what is clipped


@processor("gaussian_noise")
def gaussian_noise(
    update: Tensor, draws: Draws, *, std: Annotated[NonNegativeFloat, Example(0.01)]
) -> tuple[Tensor, int]:
    """Add independent Gaussian noise to each number of an update (Gaussian mechanism, Dwork and Roth 2014).

    Differential privacy also requires bounded updates: put `clip` before `gaussian_noise` in the chain (McMahan et al.
    2018). No privacy budget is computed.

    Args:
        update: update of a worker, [d].
        draws: draws the noise.
        std: standard deviation of the noise, >= 0.

    Returns the noisy update [d] and its size in bytes, for d numbers. Cost: d draws, and one pass over the update.

    >>> draws = fedsim.Draws.of("example", seed=0)
    >>> fedsim.processing.processors.gaussian_noise(torch.ones(2), draws, std=0.0)
    (tensor([1., 1.]), 8)
    """
    noisy = update + std * draws.normal(len(update), dtype=update.dtype)
    return noisy, noisy.nbytes


clip.sums = gaussian_noise.sums = True  # allowed with aggregate.secure, because their updates can be summed encrypted
gaussian_noise.compresses = False  # error feedback is not allowed, because it would subtract the noise again
