"""When the arithmetic of an aggregation is shared out to several threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

# Numbers in the updates. A rule makes dozens of calls of microseconds. In the least of many times a second thread saves
# a tenth at most (krum of [20, 60000]: 3.5 ms instead of 3.8); where other programs keep the cores busy, each hand-over
# waits for it (krum of [20, 21840]: 18 ms instead of 2.3 in the median, caf 216 instead of 2.5).
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
