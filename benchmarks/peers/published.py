"""Data of benchmarks that other programs publish, as a user of fedsim would define them. See workloads.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from fedsim import TensorData, load_dataset


def mnist(root: Path, *, test: int = 500) -> tuple[TensorData, TensorData]:
    """Return MNIST with the first test images. Testing 500 images per round is as much work as 10,000 in every 20th."""
    train, tests = load_dataset("mnist", root)
    return train, replace(tests, inputs=tests.inputs[:test], targets=tests.targets[:test])


def power_law(
    by_class: list[np.ndarray], n_workers: int, rng: np.random.Generator, *, least: int = 5, sigma: float = 2.0
) -> list[np.ndarray]:
    """Give worker i samples of the classes i and i + 1 (modulo the number of classes), by lognormal shares.

    Each worker gets `least` samples of both classes. The other samples of a class are cut by shares e^(sigma z) with
    standard normal z. This is the partition of MNIST by Li et al. 2020 (FedProx, data/mnist/generate_niid.py), which
    FLUTE and FedML use. Unlike there, no samples are left over, and tests use MNIST's own test images.
    """
    shards: list[list[np.ndarray]] = [[] for _ in range(n_workers)]
    for number, samples in enumerate(by_class):
        holders = [worker for worker in range(n_workers) if (number - worker) % len(by_class) < 2]
        shares = rng.lognormal(0, sigma, len(holders))
        rest = len(samples) - least * len(holders)
        ends = np.floor(rest * np.cumsum(shares / shares.sum())[:-1]).astype(int) + least * np.arange(1, len(holders))
        for worker, part in zip(holders, np.split(rng.permutation(samples), ends), strict=True):
            shards[worker].append(part)
    return [np.concatenate(parts) for parts in shards]
