"""Philox 4x32-10, a counter-based random number generator, in PyTorch integer arithmetic.

Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3". A block of four 32-bit words depends
only on a 64-bit key and a 128-bit counter. Any block can therefore be computed at any time, with the same result on
every device. Words are stored in int64 tensors, because PyTorch cannot multiply unsigned 32-bit integers. The key is a
hash of (seed, purpose, coordinates), see `fedsim.core.randomness.draw_key`. The counter is

    (block number, step, layer, 0)

`step` and `layer` are integers below 2^32 that distinguish the streams of one key. The caller chooses their meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

MASK = 0xFFFFFFFF  # 32 bits
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
BLOCKS_AT_ONCE = 1 << 15  # on a CPU: small enough for the cache, large enough to hide the call overhead
BLOCKS_AT_ONCE_ON_GPU = 1 << 22  # 32 MiB for each of about ten tensors
BLOCK_BYTES = 64  # memory for each block while blocks are computed: eight int64 tensors

Words = tuple[Tensor, Tensor, Tensor, Tensor]


class Stream(NamedTuple):
    """One or several streams of random 32-bit integers. All attributes broadcast against each other.

    Streams with different (key, step, layer) are independent.

    Attributes:
        keys: random seeds of 64 bits, int64 [...].
        step, layer: numbers from 0 to 2^32 - 1, which distinguish streams of the same key. int or int64 [...].
    """

    keys: Tensor
    step: Tensor | int = 0
    layer: Tensor | int = 0


def blocks(counter: Words, keys: Tensor) -> Words:
    """Return four random 32-bit integers (as int64) for each counter and key: the function Philox4x32.

    `counter` is a 128-bit number as four 32-bit integers. The counters and the 64-bit `keys` broadcast.
    """
    *counter_words, _ = torch.broadcast_tensors(*counter, keys)
    if keys.device.type != "cpu":
        return _rounds(counter_words, keys)
    arrays = [np.atleast_1d(word.numpy()) for word in counter_words]  # NumPy is about twice as fast as PyTorch on a CPU
    results = _rounds(arrays, np.atleast_1d(keys.numpy()))
    c0, c1, c2, c3 = (torch.from_numpy(result).view_as(counter_words[0]) for result in results)
    return c0, c1, c2, c3


def _rounds(counter: Sequence[Any], keys: Any) -> tuple[Any, Any, Any, Any]:
    """Compute `blocks` for tensors or NumPy arrays. All words of the counter have the same shape."""
    c0, c1, c2, c3 = counter
    low, high = keys & MASK, keys >> 32
    for round in range(ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # modulo 2^64; `>> 32` and MASK select the upper half
        c0, c2 = second >> 32, first >> 32
        c0 ^= c1
        c0 ^= low + round * KEY_STEPS[0]
        c0 &= MASK
        c2 ^= c3
        c2 ^= high + round * KEY_STEPS[1]
        c2 &= MASK
        c1, c3 = second, first
    c1 &= MASK
    c3 &= MASK
    return c0, c1, c2, c3


def words(stream: Stream, count: int) -> Tensor:
    """Return the first `count` random 32-bit integers of each stream, int64 [..., count], on the device of the keys.

    A larger `count` gives the same integers, followed by more. Cost: about 5 ns per integer on one CPU core.
    """
    return converted(stream, count, lambda words: words)[..., :count]


def converted(stream: Stream, count: int, convert: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the numbers that `convert` computes from the random 32-bit integers of each stream.

    Args:
        stream: one or several streams.
        count: how many random integers to convert, rounded up to a multiple of four.
        convert: function from integers [..., 4 m] to numbers [..., k m], for a constant k and every m. It is called
            several times for long streams, to save memory.
    """
    numbers = torch.arange(-(-count // 4), device=stream.keys.device)
    parts = [convert(torch.stack(part, -1).flatten(-2)) for _, part in _in_parts(stream, numbers)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def bernoulli(stream: Stream, counts: Sequence[int], probabilities: Sequence[float]) -> list[Tensor]:
    """Draw Booleans from `stream` that are true with given probabilities.

    Returns one tensor [..., count] for each pair of `counts` and `probabilities`. Probabilities 0 and 1 are exact.
    """
    sizes, device = [-(-count // 4) for count in counts], stream.keys.device

    def for_each_block(values: Sequence[int]) -> Tensor:
        return torch.cat([torch.full((n,), value, device=device) for n, value in zip(sizes, values, strict=True)])

    numbers = torch.cat([torch.arange(size, device=device) for size in sizes])
    layers, bounds = for_each_block(range(len(counts))), for_each_block([round(p * 2**32) for p in probabilities])
    parts = [
        torch.stack([word < bounds[span] for word in part], -1).flatten(-2)
        for span, part in _in_parts(stream, numbers, layers)
    ]
    padded = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).split([4 * size for size in sizes], -1)
    return [part[..., :count] for part, count in zip(padded, counts, strict=True)]


def words_per_uniform(dtype: torch.dtype) -> int:
    """Return how many random 32-bit integers `to_uniform` needs for one number of this dtype."""
    return 2 if dtype == torch.float64 else 1


def to_uniform(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert random 32-bit integers to uniform numbers of type `dtype` in [0, 1).

    float32 uses one integer per number, float64 two.
    """
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    if words_per_uniform(dtype) == 2:
        first, second = _pairs(words)
        return ((first << bits - 32) | (second >> 64 - bits)).to(dtype) * 2.0**-bits
    return (words >> 32 - bits).to(dtype) * 2.0**-bits


def to_normal(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert pairs of random 32-bit integers to pairs of standard normal numbers of type `dtype` (Box-Muller)."""
    first, second = (word.to(torch.promote_types(dtype, torch.float32)) for word in _pairs(words))
    radius = first.add_(1).mul_(2.0**-32).log_().mul_(-2).sqrt_()
    angle = second.mul_(2 * math.pi * 2.0**-32)
    return torch.stack([radius * angle.cos(), angle.sin_().mul_(radius)], -1).flatten(-2).to(dtype)


def to_integers(words: Tensor, high: int) -> Tensor:
    """Convert pairs of random 32-bit integers to random integers from 0 to high - 1."""
    first, second = _pairs(words)
    return (first * high + (second * high >> 32)) >> 32


def to_keys(words: Tensor) -> Tensor:
    """Convert pairs of random 32-bit integers to random 63-bit integers."""
    first, second = _pairs(words)
    return (first << 31) | (second >> 1)


def permutations(stream: Stream, sizes: Tensor, longest: int) -> Tensor:
    """Return a random permutation of range(size) for each stream, int64 [..., longest].

    If a size is below `longest`, the numbers from size to longest - 1 follow in order. `sizes` is int64 [...]. Cost:
    O(longest log longest) per stream.
    """
    order = to_keys(words(stream, 2 * longest))
    beyond = torch.arange(longest, device=order.device) >= sizes.unsqueeze(-1)
    return order.masked_fill_(beyond, torch.iinfo(torch.int64).max).sort(stable=True).indices


def _pairs(words: Tensor) -> tuple[Tensor, Tensor]:
    return words[..., ::2], words[..., 1::2]


def shuffles(stream: Stream, sizes: Tensor, begins: Tensor, n_blocks: int) -> tuple[Tensor, Tensor]:
    """Return one random permutation of range(size) per stream, all in one tensor.

    The permutations equal those of `permutations`, but are computed faster if the sizes differ.

    Args:
        stream: keys and steps of shape [streams].
        sizes: int64 [streams], on the device of the keys.
        begins: sum of ceil(size / 2) over all previous streams, int64 [streams], on the same device.
        n_blocks: sum of ceil(size / 2) over all streams.

    Returns the permutations, int64 [2 n_blocks], and the stream number of each entry. A permutation of odd size is
    followed by one extra entry, whose value is the size.
    """
    device, keys, step, layer = sizes.device, *(_tensor(part, sizes.device).expand(sizes.shape) for part in stream)
    numbers = torch.arange(n_blocks, device=device)
    of_block = torch.searchsorted(begins, numbers, right=True).sub_(1)
    numbers -= begins[of_block]
    at_once = BLOCKS_AT_ONCE if device.type == "cpu" else BLOCKS_AT_ONCE_ON_GPU
    zero = torch.zeros((), dtype=torch.int64, device=device)
    order = torch.empty(2 * n_blocks, dtype=torch.int64, device=device)
    for start in range(0, n_blocks, at_once):
        part = slice(start, start + at_once)
        streams = of_block[part]
        drawn = blocks((numbers[part], step[streams], layer[streams], zero), keys[streams])
        order[2 * start : 2 * (start + at_once)] = to_keys(torch.stack(drawn, -1).flatten())
    entries = (2 * numbers.unsqueeze(1) + torch.arange(2, device=device)).flatten()
    of_entry = torch.stack([of_block, of_block], -1).flatten()
    order.masked_fill_(entries >= sizes[of_entry], torch.iinfo(torch.int64).max)
    sorted_by_key = order.sort(stable=True).indices
    within_streams = of_entry[sorted_by_key].sort(stable=True).indices
    return entries[sorted_by_key[within_streams]], of_entry


def _in_parts(stream: Stream, numbers: Tensor, layers: Tensor | None = None) -> Iterator[tuple[slice, Words]]:
    """Compute random integers in parts, to save memory. Yield pairs of a slice of `numbers` and its random integers.

    Args:
        stream: one or several streams.
        numbers: which groups of four random integers to compute, int64 [n].
        layers: number to add to `stream.layer` for each group, int64 [n]. None: 0.
    """
    keys, step, layer = (_tensor(part, stream.keys.device).unsqueeze(-1) for part in stream)
    zero = torch.zeros((), dtype=torch.int64, device=keys.device)
    streams = math.prod(np.broadcast_shapes(keys.shape, step.shape, layer.shape))
    at_once = (BLOCKS_AT_ONCE if keys.device.type == "cpu" else BLOCKS_AT_ONCE_ON_GPU) // max(1, streams)
    for start in range(0, max(1, len(numbers)), max(1, at_once)):
        part = slice(start, start + max(1, at_once))
        yield part, blocks((numbers[part], step, layer if layers is None else layer + layers[part], zero), keys)


def _tensor(part: Tensor | int, device: torch.device) -> Tensor:
    return part if isinstance(part, Tensor) else torch.full((), part, dtype=torch.int64, device=device)
