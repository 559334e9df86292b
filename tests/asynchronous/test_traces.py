"""Noise from a trace file."""

from __future__ import annotations

import pytest

from fedsim.asynchronous.delays import BLOCK
from fedsim.errors import ExperimentError
from tests.asynchronous.test_delays import delays_of


@pytest.fixture
def traced(tmp_path):
    def traced(text, n_workers=3):
        path = tmp_path / "trace.csv"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return delays_of(n_workers, "trace", path=str(path))

    return traced


def test_a_trace_of_one_column_is_the_same_for_all_workers_and_repeats(traced):
    length = 2 * BLOCK + 10
    delays = traced("\n".join(map(str, range(length))))
    for worker in range(3):
        assert [delays.seconds(worker, unit, 1) for unit in range(3 * BLOCK)] == [
            unit % length for unit in range(3 * BLOCK)
        ]


@pytest.mark.parametrize(
    "text",
    ["1,2,3\n4,5,6\n", "# a b, c\n1 2\t3\n\n4 5  6 # last", "\ufeff1, 2, 3\r\n4, 5, 6\r\n", "# x\n1,2,3\n  \n4,5,6"],
)
def test_a_trace_may_have_a_column_for_each_worker(traced, text):
    delays = traced(text)
    assert [delays.seconds(worker, unit, 1) for unit in range(3) for worker in range(3)] == [1, 2, 3, 4, 5, 6, 1, 2, 3]


def test_a_trace_is_read_once(tmp_path, monkeypatch):
    (tmp_path / "trace.txt").write_text("3\n")
    monkeypatch.chdir(tmp_path)
    assert delays_of(2, "trace", path="trace.txt").seconds(1, 0, 1) == 3
    (tmp_path / "trace.txt").unlink()
    assert delays_of(2, "trace", path="trace.txt").seconds(0, 1, 1) == 3
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(ExperimentError, match='clock.noise.path = "trace.txt": no such file'):
        delays_of(2, "trace", path="trace.txt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\nfast\n", "cannot be read: could not convert string 'fast' to float64"),
        ("1,2,3\n4,5\n", "cannot be read: the number of columns changed from 3 to 2"),
        ("1\n\n-2\n", "must hold finite numbers of at least 0"),
        ("1,2\n", "has 2 columns for 3 workers; give one for all workers, or one for each"),
        (b"\xff\xfe\x00", "cannot be read: 'utf-8' codec can't decode"),
    ],
)
def test_a_bad_trace_is_refused_in_one_line_that_names_the_file(traced, text, message):
    with pytest.raises(ExperimentError) as caught:
        traced(text)
    (line,) = caught.value.lines
    assert message in line
    assert line.startswith("clock.noise.path = ")
    assert "trace.csv" in line
