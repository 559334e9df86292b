"""Numbers of runs and comparisons on invented records, compared with values computed by hand."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from fedsim.comparison.figures import Line, curves, score_cell
from fedsim.comparison.folder import Shard
from fedsim.comparison.leaderboard import friedman
from fedsim.comparison.rows import MeanCurve
from fedsim.comparison.tables import columns, summary_csv, summary_text, tuning_csv
from fedsim.config.schema import Stop
from fedsim.core.confidence import chi_square_tail, decimals_of, estimate, f_tail, on_common_grid
from fedsim.records import formatting as fmt
from fedsim.records.early_stopping import stop_reason
from fedsim.records.history import read_history, to_line
from fedsim.records.numbers import best_score, byzantine_weight, mean_or_none, progress_of, run_metrics
from fedsim.records.record import RoundRecord, metric_called
from tests.comparison.made_up import compared, comparison_of, results_of

GRADIENTS = {"sync": "gradients", "local": {"epochs": 2, "batch_size": 4}}


def test_updates_and_arrivals_of_rounds_are_counted():
    """A worker with 18 visited samples, 9 in each of 2 epochs, sends 2 x 3 gradients; one with 8 samples sends 2."""
    history = [
        RoundRecord(round=1, cohort=[0, 1], samples=[18, 8]),
        RoundRecord(round=2, cohort=[0, 1, 2], samples=[8, 8, 8]),
        RoundRecord(round=3, cohort=[]),
    ]
    of_gradients = progress_of(history, GRADIENTS)
    assert [(at.updates, at.arrivals) for at in of_gradients] == [(6, 8), (8, 14), (8, 14)]
    of_models = progress_of(history, {})
    assert [(at.updates, at.arrivals) for at in of_models] == [(1, 2), (2, 5), (2, 5)]
    first_in_gradients = progress_of(history, {"sync": "post_local", "gradient_rounds": 1, "local": {"steps": 5}})
    assert [(at.updates, at.arrivals) for at in first_in_gradients] == [(5, 10), (6, 13), (6, 13)]


def test_the_results_of_a_run_are_those_of_its_last_and_best_round():
    rounds = [(0.5, 1.0), (0.9, 2.0), (0.8, 4.0)]
    history = [
        RoundRecord(
            round=k, test_accuracy=accuracy, test_loss=1.0, seconds={"train": seconds}, bytes_up=10 * k, cohort=[0]
        )
        for k, (accuracy, seconds) in enumerate(rounds, start=1)
    ]
    numbers = run_metrics(history, progress_of(history, {}), target=0.9)
    names = ["test_accuracy", "best_accuracy", "seconds", "bytes"]
    assert [numbers[name] for name in names] == [0.8, 0.9, 7.0, 60]
    names = ["rounds_to_target", "arrivals_to_target", "bytes_to_target"]
    assert [numbers[name] for name in names] == [2, 2, 30]
    losses = [RoundRecord(round=k, test_loss=loss) for k, loss in enumerate([0.5, 0.2, 0.4], start=1)]
    assert best_score(losses) == 0.2


def test_the_share_of_byzantine_workers_counts_the_size_of_negative_weights():
    history = [RoundRecord(round=1, cohort=[0, 1], coefficients=[0.75, -0.25]), RoundRecord(round=2)]
    assert byzantine_weight(history, {1}) == 0.25
    assert mean_or_none([1 / 3, None]) == 0.33333333
    assert mean_or_none([None]) is None


@pytest.mark.parametrize(("amount", "decimals"), [(1000, 0), (-999.9, 1), (10, 1), (9.99, 2), (0, 2)])
def test_the_decimals_of_an_amount(amount, decimals):
    assert decimals_of(amount) == decimals


def test_curves_are_interpolated_in_the_range_that_all_cover():
    x, values = on_common_grid(
        [(np.array([0.0, 2.0, 4.0]), np.array([0.0, 2.0, 4.0])), (np.array([1.0, 4.0]), np.array([1.0, 7.0]))]
    )
    assert x.tolist() == [1.0, 2.0, 4.0]
    assert values.tolist() == [[1.0, 2.0, 4.0], [1.0, 3.0, 7.0]]


@pytest.mark.parametrize("degrees_of_freedom", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("x", [0.5, 3.0, 11.0])
def test_tails_equal_those_of_scipy(x, degrees_of_freedom):
    assert chi_square_tail(x, degrees_of_freedom) == pytest.approx(stats.chi2.sf(x, degrees_of_freedom))
    assert f_tail(x, 3, degrees_of_freedom) == pytest.approx(stats.f.sf(x, 3, degrees_of_freedom))


def test_the_statistic_of_iman_and_davenport():
    """F = (n - 1) chi² / (n (k - 1) - chi²) with k - 1 and (k - 1) (n - 1) degrees of freedom."""
    ranks = np.array([[1, 2, 3], [1, 3, 2], [2, 1, 3], [1, 2, 3], [1, 2, 3]], dtype=float)
    chi_square = stats.friedmanchisquare(*ranks.T).statistic
    expected = 4 * chi_square / (5 * 2 - chi_square)
    assert friedman(ranks)[2:] == pytest.approx((expected, stats.f.sf(expected, 2, 8)))


@pytest.mark.parametrize(("patience", "stops"), [(1, 2), (2, 3), (3, 4)])
def test_a_run_ends_in_the_round_in_which_the_patience_ends(patience, stops):
    history = [RoundRecord(round=k, test_loss=1.0) for k in range(1, 8)]
    stop = Stop(metric="test_loss", patience=patience)
    assert next(k for k in range(1, 8) if stop_reason(history[:k], stop)) == stops


# -- Tables and files


def read(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_the_summary_counts_all_runs_and_has_the_interval_of_two_seeds():
    accuracy = {"mean": [0.8, 0.9], "median": [0.7, None]}
    axes = {"aggregate.rule": list(accuracy), "seed": [0, 1]}

    def accuracies(point):
        value = accuracy[point["aggregate.rule"]][point["seed"]]
        return None if value is None else [value]

    mean, median = read(summary_csv(compared(axes, accuracies)))
    assert [(line["runs"], line["failed"], line["mark"]) for line in (mean, median)] == [
        ("2", "0", "best"),
        ("2", "1", ""),
    ]
    half_width = stats.t.ppf(0.975, 1) * np.std([0.8, 0.9], ddof=1) / math.sqrt(2)
    assert float(mean["accuracy_ci95"]) == pytest.approx(half_width)
    assert (median["accuracy"], median["accuracy_ci95"]) == ("0.7", "")


def test_a_row_with_a_run_that_diverged_in_its_last_round_is_not_ranked():
    comparison = compared({"aggregate.rule": ["mean", "median"], "seed": [0, 1]}, lambda point: [0.5, 0.6])
    last = comparison.runs[0].history
    last[-1] = replace(last[-1], diverged="NaN")
    assert [(row.diverged, row.mark) for row in comparison.summary] == [(1, ""), (0, "*")]


def test_the_worst_case_is_that_of_the_compared_metric():
    """The accuracy is lowest for ipm, but the compared metric is worst, 3.0, without an attack."""
    comparison = compared(
        {"aggregate.rule": ["mean"], "attack.name": ["none", "ipm"]},
        lambda point: [0.9 if point["attack.name"] == "none" else 0.1],
        worst="attack.name",
        metric="-metrics.drift",
    )
    for run in comparison.runs:
        drift = 3.0 if run.point["attack.name"] == "none" else 1.0
        run.history[-1] = replace(run.history[-1], metrics={"drift": drift})
    assert [row.chosen for row in comparison.summary] == [{"attack.name": "none"}]


def test_the_tuning_table_has_validation_results():
    comparison = compared({"local.lr": [0.1, 0.2], "seed": [0, 1]}, lambda point: [0.9], tune="local.lr")
    for run in comparison.runs:
        run.history[-1] = replace(run.history[-1], validation_accuracy=run.point["local.lr"] + 0.1 * run.point["seed"])
    lines = read(tuning_csv(comparison))
    assert [float(line["validation"]) for line in lines] == pytest.approx([0.15, 0.25])
    assert [line["chosen"] for line in lines] == ["", "yes"]


def test_the_table_says_how_many_finished_runs_reached_the_target():
    """Of mean's three runs one failed, and one of the other two reached 0.8, in its second round."""
    values = {("mean", 0): [0.5, 0.8], ("mean", 1): [0.5, 0.6], ("mean", 2): None}
    axes = {"aggregate.rule": ["mean", "median"], "seed": [0, 1, 2]}
    comparison = compared(axes, lambda point: values.get(tuple(point.values()), [0.9, 0.9]), target=0.8)
    cell = columns(comparison)["to_target"].cell_of
    assert [str(cell(row)) for row in comparison.summary] == ["2.00 (1 of 2)", "1.00 ± 0.00"]
    note = "where only some runs reached the target"
    assert note in summary_text(comparison)
    assert note not in summary_text(compared(axes, lambda point: [0.9], target=0.8))


def test_megabytes_are_millions_of_bytes():
    plan = comparison_of({"aggregate.rule": ["mean", "median"]})
    runs = results_of(plan, lambda point: [0.5])
    for run, nbytes in zip(runs, (1_500_000, 2_000_000_000), strict=True):
        run.history[-1] = replace(run.history[-1], bytes_up=nbytes)
    comparison = replace(plan, runs=runs)
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


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (fmt.seconds, 170, "3 min"),
        (fmt.seconds, 0.999, "999 ms"),
        (fmt.seconds, 120, "2 min"),
        (fmt.number, 0.001, "0.0010"),
        (fmt.number, 0.0009, "9.000e-04"),
        (fmt.number, 99999.0, "99999.0000"),
        (fmt.number, 1e5, "1.000e+05"),
        (fmt.amount, 1000, "1,000"),
        (fmt.amount, 999.96, "1000"),
        (fmt.percent, 0.125, "12.5 %"),
    ],
)
def test_a_number_is_shown_as_text(show, value, text):
    assert show(value) == text


@pytest.mark.parametrize(("accuracy", "rounds"), [(1.0, 2), (0.0, 2), (1.01, 1), (-0.01, 1)])
def test_a_history_ends_before_an_impossible_accuracy(accuracy, rounds, tmp_path):
    records = [RoundRecord(round=k, test_accuracy=value) for k, value in ((1, 0.5), (2, accuracy))]
    (tmp_path / "metrics.jsonl").write_text("".join(map(to_line, records)))
    assert len(read_history(tmp_path)) == rounds


def test_a_shard_has_every_nth_run():
    plan = comparison_of({"seed": list(range(7))})
    assert [run.id for run in Shard(1, 3).of(plan)] == ["run1", "run4"]
