"""Random draw of test samples for data sets that have no test part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fedsim.core.randomness import numpy_generator
from fedsim.data.partitions.allocation import group
from fedsim.data.tensors import TensorData
from fedsim.errors import DataError, plural, show


def split_test(
    data: TensorData, fraction: float, place: str, *, are_classes: bool = False, workers: np.ndarray | None = None
) -> tuple[TensorData, TensorData]:
    """Draw a `fraction` of a data set at random as test samples, independently of the seed. Return (training, test).

    The arguments and errors are those of `drawn_rows`.
    """
    *parts, how = drawn_rows(
        data.targets.numpy(), fraction, place, are_classes=are_classes, workers=workers, ids=data.ids
    )
    train, test = map(data.take, parts)
    return replace(train, assumed=(*train.assumed, how)), test


def drawn_rows(
    targets: np.ndarray,
    fraction: float,
    place: str,
    *,
    are_classes: bool = False,
    workers: np.ndarray | None = None,
    ids: Mapping[str, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray, str]:
    """Draw round(fraction n) test samples at random. The draw is the same for every seed.

    For class labels, the draw is stratified: each class has the same fraction of test samples up to rounding, and at
    least one training sample. With `workers`, the draw is stratified by worker instead.

    Args:
        targets: targets [n, ...].
        fraction: fraction of test samples.
        place: name of the data set in error messages.
        are_classes: whether `targets` are certainly class labels. Otherwise, integers [n] count as class labels unless
            one is negative, or there are more different values than test samples.
        workers: index of the worker that owns each sample, [n], or None if the samples belong to no worker yet.
        ids: columns of owners [n] by name. The description counts owners that keep no training samples.

    Returns the ascending indices of the training samples, those of the test samples, and a description of the draw.

    Raises DataError if there are too few samples to leave one training sample to each class or worker, or to draw one
    test sample.
    """
    n = len(targets)
    order, held_out = numpy_generator(0, "test_split").permutation(n), round(fraction * n)
    if not held_out:
        raise DataError(
            f"{place}: {plural(n, 'sample')} are too few to draw test samples (a fraction of {fraction} rounds to 0); "
            "use a larger data.test_fraction, or give a separate test part"
        )
    may_be_classes = targets.ndim == 1 and targets.dtype.kind in "iub" and not (targets < 0).any()
    chosen, how = np.zeros(n, dtype=bool), ""
    strata, kind = workers, "worker"
    if workers is None and may_be_classes and (are_classes or len(np.unique(targets)) <= held_out):
        strata, kind = targets, "class"
    if strata is None:
        chosen[order[:held_out]] = True
    else:
        _, stratum_of, sizes = np.unique(strata, return_inverse=True, return_counts=True)
        if held_out > n - len(sizes):
            raise DataError(
                f"{place}: {held_out} of {n} samples would be drawn for tests, but at least {len(sizes)} training "
                f"samples must remain, one per {kind}; use a smaller data.test_fraction, or give a separate test part"
            )
        members = group(order, stratum_of[order], len(sizes))  # each stratum in the drawn order
        counts, how = _stratified(sizes, held_out), f", the same fraction of each {kind}"
        chosen[np.concatenate([samples[:count] for samples, count in zip(members, counts, strict=True)])] = True
    for name, owners in (ids or {}).items():
        if (untrained := np.setdiff1d(owners[chosen], owners[~chosen])).size:
            how += f", and all samples of {untrained.size} of {len(np.unique(owners))} owners in {show(name)}"
    drawn = f"no test part: {held_out:,} of {n:,} samples are drawn at random for tests{how}"
    return np.flatnonzero(~chosen), np.flatnonzero(chosen), drawn


def _stratified(sizes: np.ndarray, total: int) -> np.ndarray:
    """Divide `total` test samples among strata in proportion to `sizes` [C], and return their numbers [C].

    Rounds by largest remainders, of which ties go to the first stratum. Each stratum keeps at least one training
    sample.
    """
    shares = total * sizes
    counts, remainders = np.divmod(shares, sizes.sum())
    while (left := total - counts.sum()) > 0:
        may_grow = np.flatnonzero(counts < sizes - 1)
        counts[may_grow[np.argsort(-remainders[may_grow], kind="stable")][:left]] += 1
    return counts
