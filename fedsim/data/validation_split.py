"""The validation split: training samples that are held out before the others are divided among workers."""

from __future__ import annotations

import numpy as np

from fedsim.core.randomness import numpy_generator
from fedsim.data.tensors import TensorData
from fedsim.errors import ExperimentError


def split_validation(train: TensorData, share: float, seed: int, fewest: int = 1) -> tuple[TensorData, TensorData]:
    """Split the training samples at random, as a function of the seed.

    Args:
        train: all training samples.
        share: of the samples that are held out, 0 <= share < 1; rounded to a number of samples.
        seed: of the draw.
        fewest: number of samples that must remain, such as the number of workers.

    Returns the samples that remain and those held out, each in the order of the data set. Both are copies.

    Raises ExperimentError if no sample is held out though the share is positive, or if too few remain.

    >>> data = fedsim.TensorData(torch.arange(10.0), torch.arange(10))
    >>> remaining, held_out = fedsim.data.validation_split.split_validation(data, 0.2, seed=0)
    >>> len(remaining), len(held_out), sorted([*remaining.targets.tolist(), *held_out.targets.tolist()]) == [*range(10)]
    (8, 2, True)
    """
    n, where = len(train), f"data.validation = {share}"
    held_out = round(share * n)
    if not share:
        return train, train.take(np.zeros(0, dtype=np.int64))
    if not held_out:
        raise ExperimentError(f"{where}: holds out none of {n:,} training samples; must be at least {1 / n:.3g}")
    if n - held_out < fewest:
        raise ExperimentError(
            f"{where}: leaves {n - held_out:,} training samples for {fewest:,} workers, so a worker has no data; use a "
            "smaller share or fewer workers"
        )
    order = numpy_generator(seed, "validation_split").permutation(n)
    return train.take(np.sort(order[held_out:])), train.take(np.sort(order[:held_out]))
