"""Random draw of test samples for data sets that have no test part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedsim.core.learning_task import described
from fedsim.core.randomness import numpy_generator
from fedsim.data.partitions.allocation import Strata, draw_part
from fedsim.data.partitions.ids import owners_of
from fedsim.data.tensors import ReadSettings, TensorData, reading
from fedsim.errors import DataError, plural, show
from fedsim.hints.meanings import nearest

SAMPLES = "samples"  # value of `data.split_by` if samples of one owner may be divided
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


def strata_of(
    data: TensorData,
    *,
    stratify: bool | None = None,
    split_by: str | None = None,
    partitioned_by: str | None = None,
    **params: Any,
) -> Strata:
    """Return the strata and owners that later draws from the training samples `data` respect.

    The settings are those of `load_dataset`. If they are unset, the draws respect classes and owners only if the draw
    of the data's test samples did.

    Raises DataError if `stratify` is true, but the targets are not class labels.
    """
    if stratify and not data.has_labels:
        raise DataError(NO_CLASSES.format(described(data.targets)))
    by_class = data.drawn_by == "class" and data.has_labels if stratify is None else stratify
    may_join = split_by is not None or data.drawn_by is not None
    column = _column(data.ids, ReadSettings(None, split_by, partitioned_by)) if may_join else ""
    strata = data.sample_targets.cpu().numpy() if by_class else None
    return Strata(strata, owners_of(data.ids, column)[1] if column else None)


def _column(ids: Mapping[str, np.ndarray], draw: ReadSettings, workers: int = 1) -> str:
    """Return the column of owners whose samples stay together, or "" if there is none.

    Args:
        ids: columns of owners [n] by name.
        draw: settings of the draw.
        workers: number of workers if each has its own data set.

    Raises DataError if `draw.split_by` names a column that does not exist.
    """
    if draw.split_by == SAMPLES or (draw.split_by is None and not ids):
        return ""
    if draw.split_by is not None:
        if draw.split_by not in ids:
            raise DataError(
                f"data.split_by = {show(draw.split_by)}: no column with IDs of owners has this name; "
                f"{nearest(draw.split_by, ids)}, or {SAMPLES} to put samples of one owner into both parts"
            )
        return draw.split_by
    counts = {name: len(owners_of(ids, name)[0]) for name in ids}
    column = max(counts, key=lambda name: counts[name])
    if draw.partitioned_by is not None:
        workers = max(workers, counts.get(draw.partitioned_by or next(iter(ids)), 1))
    return column if workers < counts[column] < len(ids[column]) else ""


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
    rounding, and at least one training sample. With `workers`, the draw is stratified by worker instead. The argument
    `stratify` of `load_dataset` overrides this choice. Samples of one owner stay together if `_column` returns a column
    of `ids`.

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
    test sample, and if `stratify` is true but the targets are not class labels.
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
    strata, kind, draw = workers, "" if workers is None else "worker", reading()
    column = _column(ids or {}, draw, 1 if workers is None else len(np.unique(workers)))
    owners = owners_of(ids or {}, column)[1] if column else None
    by_class = draw.stratify
    if by_class and not may_be_classes:
        raise DataError(f"{place}: {NO_CLASSES.format(described(targets))}")
    if by_class is None:
        by_class = workers is None and may_be_classes and (are_classes or len(np.unique(targets)) <= held_out)
    if by_class:
        strata, kind = targets, "class"
        if workers is not None:
            strata, kind = workers * (int(targets.max()) + 1) + targets, "class of each worker"
    if strata is not None:
        how = f", {'nearly ' * (owners is not None)}the same fraction of each {kind}"
        if owners is None and held_out > n - (count := len(np.unique(strata))):
            raise DataError(
                f"{place}: {held_out} of {n} samples would be drawn for tests, but at least {count} training "
                f"samples must remain, one per {kind}; use a smaller data.test_fraction, or give a separate test part"
            )
    positions = draw_part(order, fraction, held_out, Strata(strata, owners))
    if not len(positions):
        why = f"each owner in {show(column)} has all samples of a {kind or 'data set'}"
        if draw.split_by is not None:
            raise DataError(
                f"{place}: no test samples can be drawn, because {why}; set data.split_by={SAMPLES} or another column "
                "of owners, or give a separate test part"
            )
        positions, column = draw_part(order, fraction, held_out, Strata(strata)), ""
        how = f"{how.replace('nearly ', '')}, and samples of one owner may be separated, because {why}"
    chosen[positions] = True
    for name in ids or {}:
        names, owner_of = owners_of(ids or {}, name)
        if (untrained := np.setdiff1d(owner_of[chosen], owner_of[~chosen])).size:
            joint = " (data.split_by)" if name == column else ""
            how += f", and all samples of {untrained.size} of {len(names)} owners in {show(name)}{joint}"
    held_out = len(positions)
    drawn = f"no test part: {held_out:,} of {n:,} samples are drawn at random for tests{how}"
    return np.flatnonzero(~chosen), np.flatnonzero(chosen), kind, drawn
