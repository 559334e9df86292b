"""Choose between one thread and several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

# Numbers in the updates. A rule makes dozens of calls of microseconds: a second thread saves a tenth at most (krum of
# [20, 60000]: 3.5 ms instead of 3.8), and costs much if other programs keep the cores busy (krum of [20, 21840]: 18 ms
# instead of 2.3, caf 216 instead of 2.5).
WORTH_SHARING = 1_000_000


FEW_ROWS = 32  # up to so many rows, a block of columns is too little work to share, whatever the number of blocks


def alone_if_small(numbers: int) -> contextlib.AbstractContextManager[None]:
    """Use one thread of PyTorch within the block if there are few numbers to work on."""
    return _one_thread() if numbers < WORTH_SHARING else contextlib.nullcontext()


def alone_if_few(rows: int) -> contextlib.AbstractContextManager[None]:
    """Use one thread of PyTorch within the block, which works on small blocks of columns, if there are few rows.

    The threads would meet several times in each of hundreds of blocks: meamed of [20, 1663370] takes 0.2 s with one
    thread, and 2.8 s instead of 0.25 with two if other programs keep the cores busy.
    """
    return _one_thread() if rows <= FEW_ROWS else contextlib.nullcontext()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
