"""Random draws that are pure functions of (seed, purpose, coordinates).

Nothing in fedsim draws from a shared stream. Every draw has a purpose ("cohort", "batches", "dropout", ...) and
coordinates (usually round and worker), and its generator is seeded by a hash of these alone. So the order in which
workers run cannot matter, a worker can be run again with the same result, and two runs that differ in one setting
meet the same cohorts, the same batches and the same start.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def draw_key(seed: int, purpose: str, *coordinates: int) -> int:
    """A 63-bit integer that depends on all arguments; equal arguments give equal keys on every machine."""
    text = "/".join([str(seed), purpose, *map(str, coordinates)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def numpy_generator(seed: int, purpose: str, *coordinates: int) -> np.random.Generator:
    """A fresh NumPy generator for one draw (or one short sequence of draws)."""
    return np.random.default_rng(draw_key(seed, purpose, *coordinates))


def torch_generator(seed: int, purpose: str, *coordinates: int) -> torch.Generator:
    """A fresh CPU torch generator; draws from it are the same whatever device they are moved to."""
    return torch.Generator().manual_seed(draw_key(seed, purpose, *coordinates))


class Stream:
    """PyTorch's global generator on `device`, seeded as `seed_everything` does it, but only within `with` blocks.

    From block to block the stream goes on; outside of them the generator is where it was. So several streams can be
    drawn from in turns, each as if it were alone.
    """

    def __init__(self, device: torch.device, seed: int, purpose: str, *coordinates: int) -> None:
        self._generator = _default_generator(device)
        with self:
            self._generator.manual_seed(draw_key(seed, purpose, *coordinates))

    def __enter__(self) -> None:
        self._outside = self._generator.get_state()
        if hasattr(self, "_inside"):
            self._generator.set_state(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = self._generator.get_state()
        self._generator.set_state(self._outside)


def seed_everything(device: torch.device, seed: int, purpose: str, *coordinates: int) -> None:
    """Seed all global generators that a model may draw from: PyTorch's on `device` (dropout), NumPy's and Python's.

    `torch.manual_seed` does PyTorch's part for every backend, and takes a hundred times longer: too long for each step.
    """
    key = draw_key(seed, purpose, *coordinates)
    random.seed(key)
    np.random.seed(key % 2**32)
    _default_generator(device).manual_seed(key)


def global_states(device: torch.device) -> list[object]:
    """Where those generators are, in values that can be compared: equal before and after what draws from none."""
    numpy_state = np.random.get_state(legacy=False)
    generators = torch.default_generator, _default_generator(device)
    torch_states = [generator.get_state().tolist() for generator in generators]
    return [random.getstate(), repr(numpy_state), numpy_state["state"]["key"].tolist(), torch_states]


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    backend = torch.get_device_module(device)
    if hasattr(backend, "default_generators"):
        return backend.default_generators[device.index]
    return backend._get_default_mps_generator()  # the one kind of device that has a single generator


@contextlib.contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Put the global generators back, when the block ends, to where they were."""
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
    """`size` of `n_workers` without replacement, ascending, int64 [size]; nothing is drawn where that is all of them.

    Cost: O(size log size), however many workers: `choice` makes a list of them only if a twentieth or more is drawn.
    """
    if size == n_workers:
        return np.arange(n_workers)
    return np.sort(rng.choice(n_workers, size, replace=False, shuffle=False))
