"""Random draws that are pure functions of (seed, purpose, coordinates).

`Draws` creates tensors that are the same on every device, except for the rounding of normal numbers. `numpy_generator`
is for a few numbers on the host.

fedsim never draws from a shared stream. Every draw has a purpose ("cohort", "batches", "dropout", ...) and coordinates
(usually round and worker), and its generator is seeded by a hash of seed, purpose and coordinates. The order in which
workers are processed therefore does not matter, and a worker can be repeated with the same result. Two runs that differ
in one setting have the same cohorts, batches and initial model, unless that setting changes them.

Models, however, draw from the global generators of PyTorch, NumPy and Python, which fedsim seeds before it builds or
trains a model. Only one thread at a time may do so (see `sole_use_of_generators`), and other global settings of PyTorch
and NumPy then have the values that runs use (see `fedsim.system.global_settings`).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fedsim.core import philox
from fedsim.errors import ExperimentError, show
from fedsim.hints.attributes import hinting
from fedsim.system.devices import to_device, with_index
from fedsim.system.global_settings import run_settings

STEPS_AHEAD = 32  # steps per call, because drawing a few words takes as long as drawing 2^15
WORDS_AHEAD = 1 << 15  # maximum number of words drawn ahead per call
WORDS_TOGETHER = 1 << 22  # maximum number of words that several sources draw together on a GPU: 32 MiB
SPARSE = 64  # `choice` draws the chosen numbers directly if n / count is at least this
LARGEST = 1 << 31  # limit of the range of `Draws.integers` and `Draws.choice`
CPU = torch.device("cpu")
CHECK_SECONDS = 0.05  # how often a thread that waits for the global generators checks whether it waits for a run

_global_generators = threading.RLock()  # held by the thread that uses the global generators
_is_held = False
_holder_runs = False  # whether this thread runs an experiment


def draw_key(seed: int, purpose: str, *coordinates: int) -> int:
    """Return a 63-bit hash of all arguments. Equal arguments give equal keys on every machine."""
    if not isinstance(seed, Integral):
        raise ExperimentError(f"seed = {show(seed)}: must be a whole number")
    if not isinstance(purpose, str):
        raise ExperimentError(
            f'purpose = {show(purpose)}: must be a text, such as "batches"; pass the seed by its name'
        )
    text = "/".join([str(seed), purpose, *map(str, coordinates)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def draw_keys(seed: int, purpose: str, rounds: np.ndarray, workers: np.ndarray) -> np.ndarray:
    """Return `draw_key(seed, purpose, round, worker)` for each of n pairs of round and worker, int64 [n]."""
    pairs = zip(rounds.tolist(), workers.tolist(), strict=True)
    texts = [f"{seed}/{purpose}/{round}/{worker}".encode() for round, worker in pairs]
    digests = b"".join([hashlib.blake2b(text, digest_size=8).digest() for text in texts])
    return (np.frombuffer(digests, dtype="<u8") >> np.uint64(1)).astype(np.int64)


def numpy_generator(seed: int, purpose: str, *coordinates: int) -> np.random.Generator:
    """Return a new NumPy generator that is seeded with all arguments (see `draw_key`)."""
    return np.random.default_rng(draw_key(seed, purpose, *coordinates))


def torch_generator(seed: int, purpose: str, *coordinates: int) -> torch.Generator:
    """Return a new PyTorch generator on the CPU that is seeded with all arguments (see `draw_key`)."""
    return torch.Generator().manual_seed(draw_key(seed, purpose, *coordinates))


class Draws:
    """Source of random tensors on one device. With equal arguments, `Draws.of` gives equal numbers on every machine.

        draws = Draws.of("noise", round, worker, seed=0, device="cuda")
        noise, mask = draws.normal(10, 784), draws.uniform(10) < 0.5

    Each call gives new, independent numbers. The same calls in the same order give the same numbers on every device and
    in every process, except for rounding in `normal`. The host never waits for the device.

    In a run: `fedsim.training.batches.BatchSource.orders` shuffles a worker's n samples in a round's first epoch by
    `draws.permutation(n)` with `draws = Draws.of("batches", round, worker, seed=seed)`, and in epoch 1, 2, ... by
    `draws.steps()(epoch).permutation(n)`.
    """

    def __init__(self, key: Tensor, step: int = 0, ahead: dict[int, tuple[int, Tensor]] | None = None) -> None:
        self._key, self._step, self._ahead = key, step, ahead
        self._calls = 0

    @classmethod
    @hinting
    def of(cls, purpose: str, *coordinates: int, seed: int, device: torch.device | str = "cpu") -> Draws:
        """Return a source of random tensors for (seed, purpose, coordinates) on `device`.

        Different arguments (except `device`) give independent numbers. `coordinates` are, for example, (round, worker).
        """
        return cls(torch.full((), draw_key(seed, purpose, *coordinates), dtype=torch.int64, device=device))

    @classmethod
    def of_all(
        cls, purpose: str, coordinates: Sequence[Sequence[int]], *, seed: int, device: torch.device
    ) -> list[Draws]:
        """Return `Draws.of(purpose, *c, seed=seed, device=device)` for each c of `coordinates`.

        On a GPU, one call draws the words of several sources, which takes as many launches as those of one source. Use
        one source after another, in this order.
        """
        keys = torch.tensor([draw_key(seed, purpose, *c) for c in coordinates], dtype=torch.int64)
        if device.type == "cpu":
            return [cls(key) for key in keys]
        together = _WordsTogether(to_device(keys, device))
        return [_OneOfSeveral(together, position) for position in range(len(keys))]

    @property
    def key(self) -> Tensor:
        """Key of this source, int64 []. `Draws(key)` draws the same tensors."""
        return self._key

    def on(self, device: torch.device) -> Draws:
        """Return a copy of this source on another device. Its next numbers are those that this source draws next."""
        moved = Draws(self._key.to(device), self._step)
        moved._calls = self._calls
        return moved

    def steps(self) -> Callable[[int], Draws]:
        """Return a function that maps the number of a training step (>= 0) to the `Draws` of this step.

        The numbers of a step do not depend on earlier steps.
        """
        ahead: dict[int, tuple[int, Tensor]] = {}
        return lambda step: Draws(self._key, step, ahead)

    def uniform(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draw uniform numbers in [0, 1). `dtype`: by default PyTorch's default dtype."""
        dtype = dtype or torch.get_default_dtype()
        count = math.prod(shape) * philox.words_per_uniform(dtype)
        return self._drawn(count, lambda words: philox.to_uniform(words, dtype), shape)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draw standard normal numbers. `dtype`: by default PyTorch's default dtype."""
        dtype = dtype or torch.get_default_dtype()
        return self._drawn(math.prod(shape), lambda words: philox.to_normal(words, dtype), shape)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Draw integers from 0 to high - 1, int64. `high` must be from 1 to 2^31."""
        if not 1 <= high <= LARGEST:
            raise ValueError(f"high = {high}: must be between 1 and 2^31")
        return self._drawn(2 * math.prod(shape), lambda words: philox.to_integers(words, high), shape)

    def permutation(self, n: int) -> Tensor:
        """Return the numbers from 0 to n - 1 in random order, int64 [n]. Cost: sorting n numbers."""
        return self._drawn(2 * n, philox.to_keys, (n,)).sort(stable=True).indices

    def choice(self, n: int, count: int) -> Tensor:
        """Draw `count` of the numbers from 0 to n - 1 without replacement, ascending, int64 [count].

        `n` is at most 2^31. Cost: O(n), or O(count log count) if n >= 64 count.
        """
        if not 0 <= count <= n <= LARGEST:
            raise ValueError(f"count = {count}: must be between 0 and n = {n}, and n must be at most 2^31")
        if count == n:
            return torch.arange(n, device=self._key.device)
        if count * SPARSE <= n:  # the probability of fewer distinct numbers than `count` is below 64^-64
            values, positions = self.integers(n, 2 * count + SPARSE).sort(stable=True)
            positions[1:].masked_fill_(values[1:] == values[:-1], len(positions))  # repeated numbers
            return values[positions.topk(count, largest=False, sorted=False).indices].sort().values
        keys = self._drawn(n, lambda words: words * LARGEST, (n,))
        keys += torch.arange(n, device=keys.device)  # makes keys unique; each key modulo LARGEST is its number
        return (keys.topk(count, largest=False, sorted=False).values % LARGEST).sort().values

    def _drawn(self, count: int, convert: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Tensor:
        """Draw the next `count` random 32-bit integers, convert them, and return the result in the given shape."""
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


class _WordsTogether:
    """Random words of several sources, each with one of the `keys` [n], drawn for several sources at once."""

    def __init__(self, keys: Tensor) -> None:
        self.keys, self._drawn = keys, dict[int, tuple[int, Tensor]]()

    def of(self, position: int, layer: int, count: int) -> Tensor:
        """Return the first `count` words of source number `position` in its call number `layer`."""
        first, words = self._drawn.get(layer, (0, self.keys.new_empty(0, 0)))
        if not 0 <= position - first < len(words) or count > words.shape[1]:
            first, several = position, self.keys[position : position + WORDS_TOGETHER // count]
            words = philox.words(philox.Stream(several, 0, layer), count)
            self._drawn[layer] = first, words
        return words[position - first, :count]


class _OneOfSeveral(Draws):
    """Source whose words are drawn together with those of other sources."""

    def __init__(self, together: _WordsTogether, position: int) -> None:
        super().__init__(together.keys[position])
        self._together, self._position = together, position

    def _drawn(self, count: int, convert: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Tensor:
        if 2 * count > WORDS_TOGETHER:
            return super()._drawn(count, convert, shape)
        layer, self._calls = self._calls, self._calls + 1
        words = self._together.of(self._position, layer, max(4, -(-count // 4) * 4))
        return convert(words)[: math.prod(shape)].view(shape)


def batch_order(seed: int, round: int, worker: int, epoch: int, size: int) -> Tensor:
    """Return the order of a worker's samples in one epoch of a round: a permutation of range(size), int64 [size]."""
    stream = philox.Stream(torch.tensor(draw_key(seed, "batches", round, worker)), epoch)
    return philox.permutations(stream, torch.tensor(size), size)


@contextlib.contextmanager
def sole_use_of_generators(*, for_run: bool = False) -> Iterator[None]:
    """Let only this thread use the global random generators inside the `with` block, with the settings of a run.

    Blocks may be nested. A block waits until blocks of other threads end. `for_run`: whether the block runs an
    experiment. Other threads raise an error instead of waiting for such a block.

    Raises ExperimentError if another thread runs an experiment.
    """
    global _holder_runs, _is_held
    while not _global_generators.acquire(timeout=CHECK_SECONDS):
        if _holder_runs:
            raise ExperimentError(
                "another thread runs an experiment, and models of both threads would draw from the same global random "
                "generators; wait until it has ended, use another process, or run experiments side by side with "
                "fedsim.compare(jobs=2)"
            )
    before = _holder_runs, _is_held
    try:
        _holder_runs, _is_held = _holder_runs or for_run, True
        with contextlib.nullcontext() if before[1] else run_settings():
            yield
    finally:
        _holder_runs, _is_held = before
        _global_generators.release()


def seed_everything(device: torch.device, seed: int, purpose: str, *coordinates: int) -> None:
    """Seed the global generators that a model may use: PyTorch's for `device`, NumPy's and Python's."""
    key = draw_key(seed, purpose, *coordinates)
    random.seed(key)
    np.random.seed(key % 2**32)
    _default_generator(device).manual_seed(key)


def global_states(device: torch.device) -> list[object]:
    """Return the states of Python's, NumPy's and PyTorch's global random generators."""
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
        return backend.default_generators[with_index(device).index]
    return backend._get_default_mps_generator()  # MPS has a single generator


@contextlib.contextmanager
def preserve_random_state(device: torch.device) -> Iterator[None]:
    """Restore the states of the global random generators when the `with` block ends.

    Other threads cannot seed the generators in the meantime (see `sole_use_of_generators`).
    """
    with sole_use_of_generators():
        python_state, numpy_state = random.getstate(), np.random.get_state()
        if device.type == "cpu":
            torch_state = torch.random.fork_rng(devices=[])
        else:
            torch_state = torch.random.fork_rng(devices=[with_index(device).index], device_type=device.type)
        try:
            with torch_state:
                yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextlib.contextmanager
def seed_globally(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """Seed PyTorch's global generator on the CPU from `generator`, and restore its state when the `with` block ends.

    Inside the block, random tensors on `device` are drawn on the CPU and copied, so that they are the same on every
    device.
    """
    state = torch.default_generator.get_state()
    try:
        torch.default_generator.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        with contextlib.nullcontext() if device.type == "cpu" else _DrawnOnHost():
            yield
    finally:
        torch.default_generator.set_state(state)


class _DrawnOnHost(TorchDispatchMode):
    """Context manager that lets random operations for all other devices run on the CPU, and copies their results."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise PyTorch would import its compiler

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in function.tags or kwargs.get("generator") is not None:
            return function(*args, **kwargs)
        devices = [leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = kwargs.get("device") or next((device for device in devices if device.type != "cpu"), CPU)
        if device.type == "cpu":
            return function(*args, **kwargs)
        copied = torch.ops.aten._to_copy.default
        inputs, options = tree_map_only(Tensor, partial(copied, device=CPU), (args, kwargs))
        drawn = function(*inputs, **{**options, **({"device": CPU} if "device" in options else {})})
        if function._schema.is_mutable:
            return kwargs.get("out", args[0]).copy_(drawn)
        return tree_map_only(Tensor, partial(copied, device=device), drawn)


def sample_cohort(seed: int, round: int, n_workers: int, size: int) -> np.ndarray:
    """Draw the cohort of a round: `size` distinct worker IDs below `n_workers`, ascending, int64 [size]."""
    return sample_workers(numpy_generator(seed, "cohort", round), n_workers, size)


def sample_workers(rng: np.random.Generator, n_workers: int, size: int) -> np.ndarray:
    """Draw `size` distinct worker IDs below `n_workers`, ascending, int64 [size]."""
    if size == n_workers:
        return np.arange(n_workers)
    return np.sort(rng.choice(n_workers, size, replace=False, shuffle=False))
