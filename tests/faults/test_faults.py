"""A few injections of `python -m tests.faults`."""

from __future__ import annotations

import random

import pytest

from tests.faults.__main__ import failure_of
from tests.faults.injections import (
    exception_in_rank,
    foreign_files,
    killed_child,
    killed_run,
    lonely_rank,
    signalled,
    stopped_child,
)
from tests.faults.ways import Wholes


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    return Wholes(tmp_path_factory.mktemp("wholes"))


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *((killed_run, "processes"), (killed_child, "processes"), (signalled, "processes"), (lonely_rank, "ranks")),
        *((foreign_files, "serial"), (foreign_files, "processes")),
        pytest.param(stopped_child, "ranks", marks=pytest.mark.slow),
        pytest.param(signalled, "torchrun", marks=pytest.mark.slow),
        pytest.param(exception_in_rank, "restarts", marks=pytest.mark.slow),
    ],
)
def test_an_injection_breaks_no_promise(kind, way, wholes, tmp_path):
    (tmp_path / "temporary").mkdir()
    rng = random.Random(f"{kind.__name__} {way}")
    assert failure_of(kind, way, wholes, rng, tmp_path / "here", tmp_path / "temporary") is None
