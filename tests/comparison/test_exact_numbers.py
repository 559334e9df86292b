"""Numbers of runs and comparisons on invented records, compared with values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedsim.comparison.figures import Line, curves, score_cell
from fedsim.comparison.folder import Shard
from fedsim.comparison.rows import MeanCurve
from fedsim.comparison.tables import columns
from fedsim.core.confidence import decimals_of, estimate
from fedsim.records.history import read_history, to_line
from fedsim.records.numbers import byzantine_weight, mean_or_none
from fedsim.records.record import RoundRecord, metric_called
from tests.comparison.made_up import compared, comparison_of, in_last_round


def test_the_share_of_byzantine_workers_counts_the_size_of_negative_weights():
    weights = [[0.75, -0.25], [0.0, 0.0], [0.25, 0.75]]
    history = [RoundRecord(round=k, cohort=[0, 1], weights=both) for k, both in enumerate(weights, start=1)]
    assert byzantine_weight([*history, RoundRecord(round=4)], {1}) == (0.25 + 0.75) / 2
    assert mean_or_none([1 / 3, None]) == 0.33333333
    assert mean_or_none([None]) is None


@pytest.mark.parametrize(("amount", "decimals"), [(1000, 0), (-999.9, 1), (10, 1), (9.99, 2), (0, 2)])
def test_the_decimals_of_an_amount(amount, decimals):
    assert decimals_of(amount) == decimals


# -- Tables and files


def test_megabytes_are_millions_of_bytes():
    comparison = compared({"local.lr": [1.5, 2000]}, lambda point: [0.5])
    in_last_round(comparison, lambda run: {"bytes_up": round(1e6 * run.point["local.lr"])})
    assert [str(columns(comparison)["bytes"].cell_of(row)) for row in comparison.summary] == ["1.5", "2,000"]


# -- Figures


def test_a_heat_map_cell_shows_the_mean_over_its_rows():
    values = {"none": 0.9, "ipm": 0.2, "alie": 0.4}
    comparison = compared({"attack.name": list(values)}, lambda point: [values[point["attack.name"]]])
    cell = score_cell(comparison.summary)
    assert (cell.mean, cell.lines[0]) == (pytest.approx(0.5), "0.5000")


def test_the_band_of_a_share_ends_at_0_and_1():
    means, halves = np.array([0.1, 0.95]), np.array([0.2, 0.2])
    mean = MeanCurve([], np.array([1.0, 2.0]), np.zeros((0, 2)), means, halves)
    low, high = Line({}, metric_called("test_accuracy"), mean).band
    assert low.tolist() == pytest.approx([0.0, 0.75])
    assert high.tolist() == pytest.approx([0.3, 1.0])
    low, _ = Line({}, metric_called("test_loss"), mean).band
    assert low.tolist() == pytest.approx([-0.1, 0.75])


def test_a_curve_over_rounds_is_the_mean_over_seeds():
    comparison = compared({"seed": [0, 1, 2, 3]}, lambda point: [0.1 * point["seed"], 0.5])
    (line,) = curves(comparison).lines
    expected = estimate([0.0, 0.1, 0.2, 0.3])
    assert (line.mean.x.tolist(), line.mean.means.tolist()) == ([1.0, 2.0], pytest.approx([0.15, 0.5]))
    assert line.mean.half_widths.tolist() == pytest.approx([expected.half_width, 0.0])


# -- Text and files


@pytest.mark.parametrize(("accuracy", "rounds"), [(1.0, 2), (0.0, 2), (1.01, 1), (-0.01, 1)])
def test_a_history_ends_before_an_impossible_accuracy(accuracy, rounds, tmp_path):
    records = [RoundRecord(round=k, test_accuracy=value) for k, value in ((1, 0.5), (2, accuracy))]
    (tmp_path / "metrics.jsonl").write_text("".join(map(to_line, records)))
    assert len(read_history(tmp_path)) == rounds


def test_a_shard_has_every_nth_run():
    plan = comparison_of({"seed": list(range(7))})
    shards = [[run.id for run in Shard(index, 3).of(plan)] for index in range(3)]
    assert shards == [["run0", "run3", "run6"], ["run1", "run4"], ["run2", "run5"]]
