"""Random draw of test samples for data sets that have no test part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fedsim.core.randomness import numpy_generator
from fedsim.data.columns import warn
from fedsim.data.partitions.allocation import group
from fedsim.data.tensors import TensorData
from fedsim.errors import DataError, plural, show


def split_test(
    data: TensorData, fraction: float, place: str, *, are_classes: bool = False
) -> tuple[TensorData, TensorData]:
    """Split a data set at random into training samples and a `fraction` of test samples, the same for every seed.

    The arguments and errors are those of `drawn_rows`.
    """
    labels = data.targets.numpy() if data.has_labels else None
    train, test, assumed = drawn_rows(len(data), labels, fraction, place, are_classes=are_classes, ids=data.ids)
    return replace(data.take(train), assumed=(*data.assumed, assumed)), data.take(test)


def drawn_rows(
    n: int,
    labels: np.ndarray | None,
    fraction: float,
    place: str,
    *,
    are_classes: bool = False,
    workers: np.ndarray | None = None,
    ids: Mapping[str, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray, str]:
    """Draw round(fraction n) test samples at random, the same for every seed.

    For class labels, the draw is stratified: each class has the same fraction of test samples up to rounding, and at
    least one training sample. With `workers`, the draw is stratified by worker instead.

    Args:
        n: number of samples.
        labels: integer targets [n], none of which is negative, or None for other targets.
        fraction: fraction of test samples.
        place: name of the data set in error messages.
        are_classes: whether `labels` are certainly class labels. Otherwise, they count as class labels unless there are
            more different values than test samples.
        workers: index of the worker that owns each sample, [n], or None if the samples belong to no worker yet.
        ids: columns of owners [n] by name. The description counts owners that keep no training samples.

    Returns the ascending indices of the training samples, those of the test samples, and a description of the draw. If
    labels do not count as classes, a warning says how many values are left without training samples.

    Raises DataError if there are too few samples to leave one training sample to each class or worker, or to draw one
    test sample.
    """
    order, held_out = numpy_generator(0, "test_split").permutation(n), round(fraction * n)
    if not held_out:
        raise DataError(
            f"{place}: {plural(n, 'sample')} are too few to draw test samples (a fraction of {fraction} rounds to 0); "
            "use a larger data.test_fraction, or give a separate test part"
        )
    chosen, how = np.zeros(n, dtype=bool), ""
    strata, kind = workers, "worker"
    if workers is None and labels is not None and (are_classes or len(np.unique(labels)) <= held_out):
        strata, kind = labels, "class"
    if strata is not None:
        _, stratum_of, sizes = np.unique(strata, return_inverse=True, return_counts=True)
        if held_out > n - len(sizes):
            several = {"class": "classes"}.get(kind, f"{kind}s")
            separate, most = "give a separate test part", n - len(sizes)
            smaller = f"draw at most {most} with a smaller data.test_fraction, or {separate}"
            raise DataError(
                f"{place}: {held_out} of {n} samples would be drawn for tests, which leaves {several} without "
                f"training samples ({len(sizes)} {several}); {smaller if most else separate}"
            )
        members = group(order, stratum_of[order], len(sizes))  # each stratum in the drawn order
        counts, how = _stratified(sizes, held_out), f", the same fraction of each {kind}"
        chosen[np.concatenate([samples[:count] for samples, count in zip(members, counts, strict=True)])] = True
    else:
        chosen[order[:held_out]] = True
    if strata is None and labels is not None and (untrained := np.setdiff1d(labels[chosen], labels[~chosen])).size:
        warn(
            f"{place}: the targets are integers of more different values than the {held_out} test samples drawn, "
            f"so the draw is not stratified, and {untrained.size} values, such as {untrained[0]}, have no training "
            "samples; if the targets are classes, give a separate test part, and if not, write them as "
            "floating-point numbers",
        )
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
