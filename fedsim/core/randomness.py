"""Random draws that are pure functions of (seed, purpose, coordinates).

`Draws` makes tensors that are the same on every device; `numpy_generator` makes a few numbers on the host.

Nothing in fedsim draws from a shared stream. Every draw has a purpose ("cohort", "batches", "dropout", ...) and
coordinates (usually round and worker), and its generator is seeded by a hash of these alone. So the order of workers
does not matter, a worker can be run again with the same result, and two runs that differ in one setting have the same
cohorts, batches and initial model.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from fedsim.core import philox

STEPS_AHEAD = 32  # drawn at once, since a call for few words takes as long as one for 2^15
WORDS_AHEAD = 1 << 15  # at most
SPARSE = 64  # n / count from which `choice` draws the chosen numbers themselves
LARGEST = 1 << 31  # range of `Draws.integers` and `Draws.choice`


def draw_key(seed: int, purpose: str, *coordinates: int) -> int:
    """A 63-bit integer that depends on all arguments; equal arguments give equal keys on every machine."""
    text = "/".join([str(seed), purpose, *map(str, coordinates)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def numpy_generator(seed: int, purpose: str, *coordinates: int) -> np.random.Generator:
    """A new NumPy generator for one draw, or for a short sequence of draws."""
    return np.random.default_rng(draw_key(seed, purpose, *coordinates))


def torch_generator(seed: int, purpose: str, *coordinates: int) -> torch.Generator:
    """A new PyTorch generator on the CPU."""
    return torch.Generator().manual_seed(draw_key(seed, purpose, *coordinates))


class Draws:
    """Random tensors on one device: a pure function of (seed, purpose, coordinates), a step and the number of the call.

        draws = Draws.of(seed, "noise", round, worker, device="cuda")
        noise, kept = draws.normal(10, 784), draws.uniform(10) < 0.5

    Each call of a method takes the next stream of random words, so two calls give independent numbers, and the same
    calls in the same order give the same numbers: on every device and in every process, but for rounding in `normal`.
    The words are those of `fedsim.core.philox` for the key (seed, purpose, coordinates), the step, and the number of
    the call as layer. No draw makes the host wait for the device.
    """

    def __init__(self, key: Tensor, step: int = 0, ahead: dict[int, tuple[int, Tensor]] | None = None) -> None:
        self._key, self._step, self._ahead = key, step, ahead
        self._calls = 0

    @classmethod
    def of(cls, seed: int, purpose: str, *coordinates: int, device: torch.device | str = "cpu") -> Draws:
        """Draws of (seed, purpose, coordinates), on this device, from the first call on."""
        return cls(torch.full((), draw_key(seed, purpose, *coordinates), dtype=torch.int64, device=device))

    def on(self, device: torch.device) -> Draws:
        """A copy of these draws on a device; it continues with the next call."""
        other = Draws(self._key.to(device), self._step)
        other._calls = self._calls
        return other

    def steps(self) -> Callable[[int], Draws]:
        """A function that gives the draws of a step >= 0, from the first call on.

        They do not depend on other steps. If few words are needed, those of the next steps are drawn in the same call,
        since a call for many words takes little longer.
        """
        ahead: dict[int, tuple[int, Tensor]] = {}
        return lambda step: Draws(self._key, step, ahead)

    def uniform(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers from [0, 1), with as many bits as the type holds. Without `dtype`, PyTorch's default type."""
        dtype = dtype or torch.get_default_dtype()
        count = math.prod(shape) * philox.words_per_uniform(dtype)
        return self._drawn(count, lambda words: philox.to_uniform(words, dtype), shape)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal numbers. Without `dtype`, PyTorch's default type.

        They are computed in float32, or for float64 in float64 of the same words.
        """
        dtype = dtype or torch.get_default_dtype()
        return self._drawn(math.prod(shape), lambda words: philox.to_normal(words, dtype), shape)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Integers from 0 to high - 1, int64. Raises ValueError unless 1 <= high <= 2^31."""
        if not 1 <= high <= LARGEST:
            raise ValueError(f"high = {high}: must be from 1 to 2^31")
        return self._drawn(2 * math.prod(shape), lambda words: philox.to_integers(words, high), shape)

    def permutation(self, n: int) -> Tensor:
        """The numbers from 0 to n - 1 in random order, int64 [n]. Cost: that of sorting n numbers."""
        return self._drawn(2 * n, philox.to_keys, (n,)).sort(stable=True).indices

    def choice(self, n: int, count: int) -> Tensor:
        """`count` of the numbers from 0 to n - 1 without replacement, ascending, int64 [count].

        Cost: n words, and finding the least `count` of them. If n is large, 64 count or more: 4 count + 128 words, and
        sorting half as many numbers. Nothing is drawn if count = n.

        Raises ValueError unless 0 <= count <= n <= 2^31.
        """
        if not 0 <= count <= n <= LARGEST:
            raise ValueError(f"count = {count}: must be from 0 to n = {n}, and n at most 2^31")
        if count == n:
            return torch.arange(n, device=self._key.device)
        if count * SPARSE <= n:  # the probability of fewer distinct numbers than `count` is below 64^-64
            values, places = self.integers(n, 2 * count + SPARSE).sort(stable=True)
            places[1:].masked_fill_(values[1:] == values[:-1], len(places))  # repeated numbers
            return values[places.topk(count, largest=False, sorted=False).indices].sort().values
        keys = self._drawn(n, lambda words: words * LARGEST, (n,))
        keys += torch.arange(n, device=keys.device)  # so no two are equal, and each holds its number
        return (keys.topk(count, largest=False, sorted=False).values % LARGEST).sort().values

    def _drawn(self, count: int, convert: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Tensor:
        """The result of `convert` on the first `count` words of the next stream, in this shape."""
        layer, self._calls = self._calls, self._calls + 1
        if self._ahead is None or 2 * count > WORDS_AHEAD:
            numbers = philox.converted(philox.Stream(self._key, self._step, layer), count, convert)
        else:
            numbers = convert(self._words_ahead(layer, max(4, -(-count // 4) * 4)))
        return numbers[: math.prod(shape)].view(shape)

    def _words_ahead(self, layer: int, count: int) -> Tensor:
        assert self._ahead is not None
        first, words = self._ahead.get(layer, (0, self._key.new_empty(0, 0)))
        if not 0 <= self._step - first < len(words) or count > words.shape[1]:
            first, steps = self._step, torch.arange(min(STEPS_AHEAD, WORDS_AHEAD // count), device=self._key.device)
            words = philox.words(philox.Stream(self._key, first + steps, layer), count)
            self._ahead[layer] = first, words
        return words[self._step - first, :count]


def batch_order(seed: int, round: int, worker: int, epoch: int, size: int) -> Tensor:
    """The order of the samples of a worker in an epoch (from 0) of a round: a permutation, int64 [size]."""
    stream = philox.Stream(torch.tensor(draw_key(seed, "batches", round, worker)), epoch)
    return philox.permutations(stream, torch.tensor(size), size)


def seed_everything(device: torch.device, seed: int, purpose: str, *coordinates: int) -> None:
    """Seed all global generators that a model may draw from: PyTorch's on `device`, NumPy's and Python's.

    `torch.manual_seed` seeds every backend, which takes a hundred times longer: too long for each step.
    """
    key = draw_key(seed, purpose, *coordinates)
    random.seed(key)
    np.random.seed(key % 2**32)
    _default_generator(device).manual_seed(key)


def global_states(device: torch.device) -> list[object]:
    """The states of these generators as values that can be compared: equal before and after code that draws nothing."""
    numpy_state = np.random.get_state(legacy=False)
    key, position = numpy_state["state"].values()
    generators = torch.default_generator, _default_generator(device)
    torch_states = [generator.get_state().numpy().tobytes() for generator in generators]
    return [random.getstate(), key.tobytes(), position, numpy_state["has_gauss"], numpy_state["gauss"], torch_states]


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    backend = torch.get_device_module(device)
    if hasattr(backend, "default_generators"):
        return backend.default_generators[device.index]
    return backend._get_default_mps_generator()  # MPS has a single generator


@contextlib.contextmanager
def preserve_random_state(device: torch.device) -> Iterator[None]:
    """Restore the states of the global generators at the end of the block."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    if device.type == "cpu":
        torch_state = torch.random.fork_rng(devices=[])
    else:
        torch_state = torch.random.fork_rng(devices=[device.index], device_type=device.type)
    try:
        with torch_state:
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def sample_cohort(seed: int, round: int, n_workers: int, size: int) -> np.ndarray:
    """The workers that take part in a round: `size` of `n_workers` without replacement, ascending, int64 [size]."""
    return sample_workers(numpy_generator(seed, "cohort", round), n_workers, size)


def sample_workers(rng: np.random.Generator, n_workers: int, size: int) -> np.ndarray:
    """`size` of `n_workers` without replacement, ascending, int64 [size]; nothing is drawn if size = n_workers.

    Cost: O(size log size); from size = n_workers / 20 on, `choice` makes a list of all workers.
    """
    if size == n_workers:
        return np.arange(n_workers)
    return np.sort(rng.choice(n_workers, size, replace=False, shuffle=False))
