"""Random draw of test samples for data sets that have no test part."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import replace

import numpy as np

from fedsim.core.learning_task import described
from fedsim.core.randomness import numpy_generator
from fedsim.data.partitions.allocation import draw_part
from fedsim.data.partitions.ids import owners_of
from fedsim.data.tensors import TensorData
from fedsim.errors import DataError, plural, show

STRATIFY: ContextVar[bool | None] = ContextVar("fedsim_stratify", default=None)  # setting of `data.stratify`
NO_CLASSES = "data.stratify = true: needs one class label per sample, but the targets are {}; omit it"


def split_test(
    data: TensorData, fraction: float, place: str, *, are_classes: bool = False, workers: np.ndarray | None = None
) -> tuple[TensorData, TensorData]:
    """Draw a `fraction` of a data set at random as test samples, independently of the seed. Return (training, test).

    The arguments and errors are those of `drawn_rows`.
    """
    *parts, strata, how = drawn_rows(
        data.targets.numpy(), fraction, place, are_classes=are_classes, workers=workers, ids=data.ids
    )
    train, test = map(data.take, parts)
    return replace(train, assumed=(*train.assumed, how), drawn_by=strata), test


def strata_of(data: TensorData, stratify: bool | None) -> np.ndarray | None:
    """Return the classes [n] by which parts of the training samples `data` are stratified, or None for no strata.

    `stratify`: setting of `data.stratify`. Raises DataError if it is true and the targets are not class labels.
    """
    if stratify and not data.has_labels:
        raise DataError(NO_CLASSES.format(described(data.targets)))
    chosen = data.drawn_by == "class" and data.has_labels if stratify is None else stratify
    return data.sample_targets.cpu().numpy() if chosen else None


def drawn_rows(
    targets: np.ndarray,
    fraction: float,
    place: str,
    *,
    are_classes: bool = False,
    workers: np.ndarray | None = None,
    ids: Mapping[str, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray, str, str]:
    """Draw round(fraction n) test samples at random. The draw is the same for every seed.

    For class labels, the draw is stratified (see `draw_part`): each class has the same fraction of test samples up to
    rounding, and at least one training sample. With `workers`, the draw is stratified by worker instead. `STRATIFY`
    can demand strata of classes, or none.

    Args:
        targets: targets [n, ...].
        fraction: fraction of test samples.
        place: name of the data set in error messages.
        are_classes: whether `targets` are certainly class labels. Otherwise, integers [n] count as class labels unless
            one is negative, or there are more different values than test samples.
        workers: index of the worker that owns each sample, [n], or None if the samples belong to no worker yet.
        ids: columns of owners [n] by name. The description counts owners that keep no training samples.

    Returns the ascending indices of the training samples, those of the test samples, what a stratum is ("class",
    "worker", "class of each worker", or "" without strata), and a description of the draw.

    Raises DataError if there are too few samples to leave one training sample to each class or worker, or to draw one
    test sample, and if classes are demanded of other targets.
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
    strata, kind, by_class = workers, "" if workers is None else "worker", STRATIFY.get()
    if by_class and not may_be_classes:
        raise DataError(f"{place}: {NO_CLASSES.format(described(targets))}")
    if by_class is None:
        by_class = workers is None and may_be_classes and (are_classes or len(np.unique(targets)) <= held_out)
    if by_class:
        strata, kind = targets, "class"
        if workers is not None:
            strata, kind = workers * (int(targets.max()) + 1) + targets, "class of each worker"
    if strata is not None:
        how = f", the same fraction of each {kind}"
        if held_out > n - (count := len(np.unique(strata))):
            raise DataError(
                f"{place}: {held_out} of {n} samples would be drawn for tests, but at least {count} training "
                f"samples must remain, one per {kind}; use a smaller data.test_fraction, or give a separate test part"
            )
    chosen[draw_part(order, fraction, held_out, strata)] = True
    for name in ids or {}:
        owners, owner_of = owners_of(ids or {}, name)
        if (untrained := np.setdiff1d(owner_of[chosen], owner_of[~chosen])).size:
            how += f", and all samples of {untrained.size} of {len(owners)} owners in {show(name)}"
    drawn = f"no test part: {held_out:,} of {n:,} samples are drawn at random for tests{how}"
    return np.flatnonzero(~chosen), np.flatnonzero(chosen), kind, drawn
