"""Philox 4x32-10, a counter-based random number generator, in integer arithmetic of PyTorch.

Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3". A block of four 32-bit words is a
function of a 64-bit key and a 128-bit counter alone: any block can be computed at any time, with the same result on
every device. Words are kept in int64 tensors, since PyTorch does not multiply unsigned integers of 32 bits. A key
stands for (seed, purpose, coordinates), see `fedsim.core.randomness.draw_key`; the counter is

    (number of the block, step, layer, 0)

`step` and `layer` are two numbers below 2^32 that distinguish streams of one key; the caller chooses their meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MASK = 0xFFFFFFFF  # of 32 bits
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
BLOCKS_AT_ONCE = 1 << 15  # on a CPU: they stay in cache, and the calls cost little beside the arithmetic
BLOCKS_AT_ONCE_ON_GPU = 1 << 22  # 32 MiB for each of some ten tensors

Words = tuple[Tensor, Tensor, Tensor, Tensor]


class Stream(NamedTuple):
    """The addresses of streams of random words. All fields broadcast against each other.

    Attributes:
        keys: int64 [...], 64 bits each.
        step, layer: int or int64 [...], from 0 to 2^32 - 1.
    """

    keys: Tensor
    step: Tensor | int = 0
    layer: Tensor | int = 0


def blocks(counter: Words, keys: Tensor) -> Words:
    """The four words of each block, int64 from 0 to 2^32 - 1; counter words and 64-bit keys are broadcast."""
    c0, c1, c2, c3 = counter
    low, high = keys & MASK, (keys >> 32) & MASK
    for round in range(ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # modulo 2^64, whose upper half the mask keeps
        c0 = ((second >> 32) ^ c1 ^ (low + round * KEY_STEPS[0])) & MASK
        c2 = ((first >> 32) ^ c3 ^ (high + round * KEY_STEPS[1])) & MASK
        c1, c3 = second, first
    return c0, c1 & MASK, c2, c3 & MASK


def words(stream: Stream, count: int) -> Tensor:
    """The first `count` words of each stream, int64 [..., count], from 0 to 2^32 - 1, on the device of the keys.

    More words of a stream begin with the same ones. Cost: about 5 ns a word on a CPU core; 100 kernels on a GPU.
    """
    return converted(stream, count, lambda words: words)[..., :count]


def converted(stream: Stream, count: int, convert: Callable[[Tensor], Tensor]) -> Tensor:
    """The result of `convert` on the first words of each stream, at least `count` of them: a multiple of four.

    `convert` maps words [..., 4 m] to numbers [..., m k], with k the same for all m. It is called on one part of the
    words after another, so that the words of a long stream are never all in memory.
    """
    numbers = torch.arange(-(-count // 4), device=stream.keys.device)
    parts = [convert(torch.stack(part, -1).flatten(-2)) for _, part in _in_parts(stream, numbers)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def bernoulli(stream: Stream, counts: Sequence[int], probabilities: Sequence[float]) -> list[Tensor]:
    """Booleans that are true with a probability, [..., count]: one tensor for each count, from consecutive layers.

    The first is drawn from `stream.layer`, the next from the layer after it. A boolean is true if its word is below
    round(probability * 2^32), so 0 and 1 are exact. Nothing is copied from the host.
    """
    sizes, device = [-(-count // 4) for count in counts], stream.keys.device

    def for_each_block(values: Sequence[int]) -> Tensor:
        return torch.cat([torch.full((n,), value, device=device) for n, value in zip(sizes, values, strict=True)])

    numbers = torch.cat([torch.arange(size, device=device) for size in sizes])
    layers, bounds = for_each_block(range(len(counts))), for_each_block([round(p * 2**32) for p in probabilities])
    parts = [
        torch.stack([word < bounds[some] for word in part], -1).flatten(-2)
        for some, part in _in_parts(stream, numbers, layers)
    ]
    found = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).split([4 * size for size in sizes], -1)
    return [part[..., :count] for part, count in zip(found, counts, strict=True)]


def words_per_uniform(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.float64 else 1


def to_uniform(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers from [0, 1) with as many bits as the type holds: multiples of 2^-24 in float32.

    One of each word, or in float64, with multiples of 2^-53, one of two words.
    """
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    if words_per_uniform(dtype) == 2:
        first, second = _pairs(words)
        return ((first << bits - 32) | (second >> 64 - bits)).to(dtype) * 2.0**-bits
    return (words >> 32 - bits).to(dtype) * 2.0**-bits


def to_normal(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Two standard normal numbers of two words, by the method of Box and Muller; at most 6.7 in size.

    Computed in float64 for float64, else in float32. Devices differ only in the rounding of logarithm, sine and cosine.
    """
    first, second = (word.to(torch.promote_types(dtype, torch.float32)) for word in _pairs(words))
    radius = first.add_(1).mul_(2.0**-32).log_().mul_(-2).sqrt_()
    angle = second.mul_(2 * math.pi * 2.0**-32)
    return torch.stack([radius * angle.cos(), angle.sin_().mul_(radius)], -1).flatten(-2).to(dtype)


def to_integers(words: Tensor, high: int) -> Tensor:
    """Integers from 0 to high - 1, for 1 <= high <= 2^31, one of two words: floor(x high / 2^64) of their 64 bits x."""
    first, second = _pairs(words)
    return (first * high + (second * high >> 32)) >> 32


def to_keys(words: Tensor) -> Tensor:
    """Integers of 63 bits, for sorting, one of two words."""
    first, second = _pairs(words)
    return (first << 31) | (second >> 1)


def permutations(stream: Stream, sizes: Tensor, longest: int) -> Tensor:
    """A permutation of range(size) for each stream, int64 [..., longest]; behind it are the numbers up to `longest`.

    `sizes` is int64 [...]. The numbers are sorted by random keys of 63 bits. Cost: O(longest log longest) a stream.
    """
    order = to_keys(words(stream, 2 * longest))
    beyond = torch.arange(longest, device=order.device) >= sizes.unsqueeze(-1)
    return order.masked_fill_(beyond, torch.iinfo(torch.int64).max).sort(stable=True).indices


def _pairs(words: Tensor) -> tuple[Tensor, Tensor]:
    return words[..., ::2], words[..., 1::2]


def shuffles(stream: Stream, sizes: Tensor, begins: Tensor, n_blocks: int) -> tuple[Tensor, Tensor]:
    """Permutations of range(size), one for each stream, in one tensor: the same as those of `permutations`.

    If sizes differ, this computes fewer unused words. All work is done on the device of the keys.

    Args:
        stream: its keys and steps are [streams].
        sizes: int64 [streams], on the device of the keys.
        begins: the sum of ceil(size / 2) over the streams before each, int64 [streams], on the same device.
        n_blocks: that sum over all streams.

    Returns the permutations, int64 [2 n_blocks], and the number of the stream of each of their entries. A permutation
    of odd size is followed by one more entry, the size.
    """
    device, keys, step, layer = sizes.device, *(_tensor(part, sizes.device).expand(sizes.shape) for part in stream)
    numbers = torch.arange(n_blocks, device=device)
    of_block = torch.searchsorted(begins, numbers, right=True).sub_(1)
    numbers -= begins[of_block]
    at_once = BLOCKS_AT_ONCE if device.type == "cpu" else BLOCKS_AT_ONCE_ON_GPU
    zero = torch.zeros((), dtype=torch.int64, device=device)
    order = torch.empty(2 * n_blocks, dtype=torch.int64, device=device)
    for start in range(0, n_blocks, at_once):
        some = slice(start, start + at_once)
        of_some = of_block[some]
        drawn = blocks((numbers[some], step[of_some], layer[of_some], zero), keys[of_some])
        order[2 * start : 2 * (start + at_once)] = to_keys(torch.stack(drawn, -1).flatten())
    entries = (2 * numbers.unsqueeze(1) + torch.arange(2, device=device)).flatten()
    of_entry = torch.stack([of_block, of_block], -1).flatten()
    order.masked_fill_(entries >= sizes[of_entry], torch.iinfo(torch.int64).max)
    sorted_by_key = order.sort(stable=True).indices
    within_streams = of_entry[sorted_by_key].sort(stable=True).indices
    return entries[sorted_by_key[within_streams]], of_entry


def _in_parts(stream: Stream, numbers: Tensor, layers: Tensor | None = None) -> Iterator[tuple[slice, Words]]:
    """The words of the blocks with these numbers [n] of each stream, [..., some] for some of the blocks at a time.

    `layers` [n], if given, are added to the layer of the stream.
    """
    keys, step, layer = (_tensor(part, stream.keys.device).unsqueeze(-1) for part in stream)
    zero = torch.zeros((), dtype=torch.int64, device=keys.device)
    streams = math.prod(np.broadcast_shapes(keys.shape, step.shape, layer.shape))
    at_once = (BLOCKS_AT_ONCE if keys.device.type == "cpu" else BLOCKS_AT_ONCE_ON_GPU) // max(1, streams)
    for start in range(0, max(1, len(numbers)), max(1, at_once)):
        some = slice(start, start + max(1, at_once))
        yield some, blocks((numbers[some], step, layer if layers is None else layer + layers[some], zero), keys)


def _tensor(part: Tensor | int, device: torch.device) -> Tensor:
    return part if isinstance(part, Tensor) else torch.full((), part, dtype=torch.int64, device=device)
