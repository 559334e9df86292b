"""Small experiments whose updates are added up wave by wave, as those of large experiments are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import fedsim.training.task


@contextlib.contextmanager
def in_waves() -> Iterator[None]:
    """Return a context in which the updates of every cohort count as large."""
    with mock.patch.object(fedsim.training.task, "STORED_BYTES", 0):
        yield
