"""Choose between one thread and several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

# Numbers in the updates. A rule makes dozens of calls of microseconds: a second thread saves a tenth at most (krum of
# [20, 60000]: 3.5 ms instead of 3.8), and costs much if other programs keep the cores busy (krum of [20, 21840]: 18 ms
# instead of 2.3, caf 216 instead of 2.5).
WORTH_SHARING = 1_000_000


@contextlib.contextmanager
def alone_if_small(numbers: int) -> Iterator[None]:
    """Use one thread of PyTorch within the block if there are few numbers to work on."""
    threads = torch.get_num_threads()
    if threads == 1 or numbers >= WORTH_SHARING:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
