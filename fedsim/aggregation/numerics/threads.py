"""Limit PyTorch to one thread for small amounts of data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

# Minimum numbers in the updates for several threads. A rule makes dozens of calls that take microseconds. A second
# thread saves at most a tenth (krum of [20, 60000]: 3.5 ms instead of 3.8), but is much slower if other programs keep
# the cores busy (krum of [20, 21840]: 18 ms instead of 2.3, caf 216 ms instead of 2.5).
WORTH_SHARING = 1_000_000


FEW_ROWS = 32  # maximum number of rows for which a block of columns is too little work for several threads


def alone_if_small(numbers: int) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that limits PyTorch to one thread if the updates are small.

    `numbers` is the total number of values in the updates.
    """
    return _one_thread() if numbers < WORTH_SHARING else contextlib.nullcontext()


def alone_if_few(rows: int) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that limits PyTorch to one thread if there are few updates.

    With few updates, several threads would mostly wait for each other. `rows` is the number of updates.
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
