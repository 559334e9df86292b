"""Statistics of the honest updates, computed in float64 over blocks of columns.

On a CPU, only one block of the updates [h, d] at a time is converted to float64. The statistics therefore need memory
for a few vectors [d] and one block.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fedsim.aggregation import column_blocks
from fedsim.errors import ExperimentError
from fedsim.system.devices import wide_dtype


def blocks_of(honest: Tensor, centre: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Yield the honest updates [h, d] in blocks of columns, as pairs (slice of columns, block [h, columns]).

    `centre` [d], if given, is subtracted from each update. Blocks are float64 if the device supports it.

    Raises ExperimentError if there are no honest updates.
    """
    if not len(honest):
        raise ExperimentError("attack: needs the update of at least 1 honest worker, but there is none")
    for columns in column_blocks(honest.shape[1], n=len(honest), device=honest.device):
        block = honest[:, columns].to(wide_dtype(honest.device))
        yield columns, block if centre is None else block - centre[columns]


def mean_of(honest: Tensor) -> Tensor:
    """Return the mean [d] of the honest updates, in float64 if the device supports it."""
    mean = _wide_row(honest)
    for columns, block in blocks_of(honest):
        mean[columns] = block.mean(0)
    return mean


def mean_and_std(honest: Tensor, ddof: int) -> tuple[Tensor, Tensor]:
    """Return the mean [d] and the standard deviation [d] of each coordinate of the honest updates.

    Both are float64 if the device supports it. The variance of h updates is a sum of squares divided by h - ddof.
    Raises ExperimentError unless h > ddof.
    """
    h = len(honest)
    if 0 < h <= ddof:
        raise ExperimentError(
            f"attack.ddof = {ddof}: the standard deviation needs at least {ddof + 1} honest workers, not {h}"
        )
    mean, std = _wide_row(honest), _wide_row(honest)
    for columns, block in blocks_of(honest):
        mean[columns] = block.mean(0)
        std[columns] = (block - mean[columns]).square_().sum(0).div_(h - ddof).sqrt_()
    return mean, std


def _wide_row(honest: Tensor) -> Tensor:
    return honest.new_empty(honest.shape[1], dtype=wide_dtype(honest.device))
