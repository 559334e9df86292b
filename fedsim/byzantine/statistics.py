"""Statistics of the honest rows, in float64, over blocks of columns.

So on a CPU float32 rows are never copied as a whole: memory beyond [h, d] is a few vectors [d] and one block.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fedsim.aggregation import column_blocks
from fedsim.errors import ExperimentError
from fedsim.system.devices import wide_dtype


def blocks_of(honest: Tensor, centre: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Yield the honest rows less `centre` [d], if it is given, in blocks of columns, in float64 if the device has it.

    Raises ExperimentError if there is no honest row.
    """
    if not len(honest):
        raise ExperimentError("attack: needs at least 1 honest row, there are 0")
    for columns in column_blocks(honest.shape[1], n=len(honest), device=honest.device):
        block = honest[:, columns].to(wide_dtype(honest.device))
        yield columns, block if centre is None else block - centre[columns]


def mean_of(honest: Tensor) -> Tensor:
    """Return the mean [d] of the honest rows, in float64."""
    mean = _wide_row(honest)
    for columns, block in blocks_of(honest):
        mean[columns] = block.mean(0)
    return mean


def mean_and_std(honest: Tensor, ddof: int) -> tuple[Tensor, Tensor]:
    """Return the mean [d] and standard deviation [d] of each column of the honest rows, in float64.

    std^2 is the sum of squared differences from the mean over h - ddof. Raises ExperimentError unless h > ddof.
    """
    h = len(honest)
    if 0 < h <= ddof:
        raise ExperimentError(
            f"attack.ddof = {ddof}: the standard deviation of honest rows needs more than {ddof} of them, not {h}"
        )
    mean, std = _wide_row(honest), _wide_row(honest)
    for columns, block in blocks_of(honest):
        mean[columns] = block.mean(0)
        std[columns] = (block - mean[columns]).square_().sum(0).div_(h - ddof).sqrt_()
    return mean, std


def _wide_row(honest: Tensor) -> Tensor:
    return honest.new_empty(honest.shape[1], dtype=wide_dtype(honest.device))
