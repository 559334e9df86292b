"""When the arithmetic of an aggregation is shared out to several threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

# Numbers in the updates. With fewer, handing an operation to a second thread gains little on idle cores, and costs a
# hundred times the operation where other programs keep the cores busy: the rules make dozens of calls of microseconds.
WORTH_SHARING = 1_000_000


@contextlib.contextmanager
def alone_if_small(numbers: int) -> Iterator[None]:
    """Keep PyTorch to this thread until the end of the block where there are so few numbers to work on."""
    threads = torch.get_num_threads()
    if threads == 1 or numbers >= WORTH_SHARING:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
