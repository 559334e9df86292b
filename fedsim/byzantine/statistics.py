"""Statistics of the honest rows, in float64, over blocks of columns.

So on a CPU float32 rows are never copied as a whole: memory beyond [h, d] is a few vectors [d] and one block.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fedsim.aggregation import column_blocks
from fedsim.errors import ExperimentError
from fedsim.system.devices import wide_dtype


def wide_blocks(honest: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The honest rows in blocks of columns, in float64 if the device has it; read-only.

    Raises ExperimentError if there is no honest row.
    """
    if not len(honest):
        raise ExperimentError("attack: is made of the honest rows and needs at least 1, there are 0")
    for columns in column_blocks(honest.shape[1], n=len(honest), device=honest.device):
        yield columns, honest[:, columns].to(wide_dtype(honest.device))


def centred_blocks(honest: Tensor, mean: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The honest rows less their mean, in blocks of columns."""
    for columns, block in wide_blocks(honest):
        yield columns, block - mean[columns]


def mean_of(honest: Tensor) -> Tensor:
    """The mean [d] of the honest rows, in float64."""
    mean = _wide_row(honest)
    for columns, block in wide_blocks(honest):
        mean[columns] = block.mean(0)
    return mean


def mean_and_std(honest: Tensor, ddof: int) -> tuple[Tensor, Tensor]:
    """The mean [d] and standard deviation [d] of each column of the honest rows, in float64.

    std^2 is the sum of squared differences from the mean over h - ddof. Raises ExperimentError unless h > ddof.
    """
    h = len(honest)
    if 0 < h <= ddof:
        raise ExperimentError(
            f"attack.ddof = {ddof}: the standard deviation of honest rows needs more than {ddof} of them, not {h}"
        )
    mean, std = _wide_row(honest), _wide_row(honest)
    for columns, block in wide_blocks(honest):
        mean[columns] = block.mean(0)
        std[columns] = (block - mean[columns]).square_().sum(0).div_(h - ddof).sqrt_()
    return mean, std


def _wide_row(honest: Tensor) -> Tensor:
    return honest.new_empty(honest.shape[1], dtype=wide_dtype(honest.device))
