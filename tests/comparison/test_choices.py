"""Comparisons that choose a value of an axis: --tune by validation results, --worst by the worst test result."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest

import fedsim
from fedsim.comparison import ComparisonSettings
from fedsim.comparison.on_paper import draw_tuning
from fedsim.comparison.plan import plan_comparison
from fedsim.comparison.tables import summary_csv, summary_text, tuning_csv
from fedsim.errors import ExperimentError, SettingWarning
from tests.comparison.made_up import compared, in_last_round, lines_of

AXES = {
    "aggregate.rule": ["mean", "median"],
    "attack.name": ["none", "ipm", "alie"],
    "local.lr": [0.1, 0.2],
    "seed": [0, 1],
}
TESTED = {  # test accuracy under each attack, by (rule, learning rate)
    ("mean", 0.1): [0.9, 0.3, 0.5],
    ("mean", 0.2): [0.8, 0.4, 0.35],
    ("median", 0.1): [0.7, 0.6, 0.65],
    ("median", 0.2): [0.9, 0.8, 0.1],
}
# validation accuracies, whose worst cases order the learning rates differently than the test accuracies do
VALIDATED = {
    ("mean", 0.1): [0.9, 0.5, 0.4],
    ("mean", 0.2): [0.8, 0.3, 0.6],
    ("median", 0.1): [0.7, 0.5, 0.6],
    ("median", 0.2): [0.9, 0.6, 0.55],
}


def made_up(failed=(), **settings):
    """Return results in which both accuracies differ by 0.02 between the seeds."""

    def read(table, point):
        of_attacks = table[point["aggregate.rule"], point["local.lr"]]
        return of_attacks[AXES["attack.name"].index(point["attack.name"])] + 0.02 * point["seed"]

    def accuracies(point):
        return None if tuple(point.values()) in failed else [0.1, read(TESTED, point)]

    comparison = compared(AXES, accuracies, **settings)
    return in_last_round(comparison, lambda run: {"validation_accuracy": read(VALIDATED, run.point)})


def chosen_in(comparison):
    rows = comparison.summary
    return {tuple(row.point.values()): (*row.chosen.values(), round(row.score.mean, 6)) for row in rows}


def test_the_worst_case_has_the_lowest_test_accuracy_of_the_axis():
    assert chosen_in(made_up(worst="attack.name")) == {
        ("mean", 0.1): ("ipm", 0.31),
        ("mean", 0.2): ("alie", 0.36),
        ("median", 0.1): ("ipm", 0.61),
        ("median", 0.2): ("alie", 0.11),
    }


def test_a_value_is_tuned_on_validation_samples_alone():
    assert chosen_in(made_up(tune="local.lr")) == {
        ("mean", "none"): (0.1, 0.91),
        ("mean", "ipm"): (0.1, 0.31),  # although 0.2 has the higher test accuracy
        ("mean", "alie"): (0.2, 0.36),
        ("median", "none"): (0.2, 0.91),
        ("median", "ipm"): (0.2, 0.81),
        ("median", "alie"): (0.1, 0.66),
    }


def test_a_value_is_tuned_for_the_worst_case():
    comparison = made_up(tune="local.lr", worst="attack.name")
    assert chosen_in(comparison) == {("mean",): (0.1, "ipm", 0.31), ("median",): (0.2, "alie", 0.11)}
    rows = lines_of(summary_csv(comparison))
    assert [(row["tuned local.lr"], row["worst attack.name"]) for row in rows] == [("0.1", "ipm"), ("0.2", "alie")]
    assert "in its worst\n  case of attack.name" in summary_text(comparison)
    tuning = lines_of(tuning_csv(comparison))
    assert [(row["local.lr"], row["attack.name"], float(row["validation"]), row["chosen"]) for row in tuning] == [
        ("0.1", "alie", pytest.approx(0.41), "yes"),
        ("0.2", "ipm", pytest.approx(0.31), ""),
        ("0.1", "ipm", pytest.approx(0.51), ""),
        ("0.2", "alie", pytest.approx(0.56), "yes"),
    ]
    (axes,) = draw_tuning(comparison).axes
    lines = [line for line in axes.lines if len(line.get_xdata()) == 2]
    assert [list(line.get_ydata()) for line in lines] == [pytest.approx([0.41, 0.31]), pytest.approx([0.51, 0.56])]


def test_losses_are_tuned_to_the_lowest_and_the_worst_is_the_highest():
    comparison = compared(
        {"attack.name": ["none", "ipm"], "local.lr": [0.1, 0.2]}, lambda point: [0.5], tune="local.lr"
    )
    for run, loss in zip(comparison.runs, [2.0, 1.0, 3.0, 4.0], strict=True):
        run.history[-1] = replace(run.history[-1], test_accuracy=None, test_loss=loss, validation_loss=loss)
    assert chosen_in(comparison) == {("none",): (0.2, 1.0), ("ipm",): (0.1, 3.0)}
    worst = replace(comparison, settings=ComparisonSettings(worst="attack.name"))
    assert chosen_in(worst) == {(0.1,): ("ipm", 3.0), (0.2,): ("ipm", 4.0)}


LOSSES = {0.1: 2.0, 0.05: 1.0}  # finite losses; 0.05 is better, but one of its seeds has no result


def incomplete(how, **settings):
    """Return a comparison in which one run (learning rate 0.05, seed 1) failed, diverged or has a non-finite loss."""
    comparison = compared({"local.lr": [0.05, 0.1], "seed": [0, 1]}, lambda point: [0.5], **settings)
    for index, run in enumerate(comparison.runs):
        loss, bad = LOSSES[run.point["local.lr"]], run.point == {"local.lr": 0.05, "seed": 1}
        if bad and how == "failed":
            comparison.runs[index] = replace(run, failure="no")
        loss = math.nan if bad and how == "not finite" else loss
        numbers = {"test_accuracy": None, "test_loss": loss, "validation_loss": loss}
        run.history[-1] = replace(run.history[-1], diverged="NaN" if bad and how == "diverged" else None, **numbers)
    return comparison


@pytest.mark.parametrize("how", ["failed", "diverged", "not finite"])
def test_a_value_without_a_result_of_every_seed_is_never_the_best_and_always_the_worst(how):
    assert chosen_in(incomplete(how, tune="local.lr")) == {(): (0.1, 2.0)}
    assert chosen_in(incomplete(how, worst="local.lr")) == {(): (0.05, 1.0)}
    comparison = incomplete(how)
    assert {row.point["local.lr"]: row.mark for row in comparison.summary} == {0.05: "", 0.1: "*"}
    (line,) = [line for line in summary_text(comparison).splitlines() if line.startswith("0.05 ")]
    assert line.endswith("2, 1 diverged" if how == "diverged" else "1 of 2")
    bad = [run for run in comparison.runs if run.point["local.lr"] == 0.05]
    without = replace(comparison, runs=bad, settings=ComparisonSettings(tune="local.lr"))
    assert [row["chosen"] for row in lines_of(tuning_csv(without))] == [""]
    assert "no value was chosen" in " ".join(summary_text(without).split())


def test_tuning_does_not_see_the_test_set(serial):
    """Other test labels do not change the chosen values."""
    chosen = []
    for data in ("tests.components:tiny", "tests.components:tiny_with_other_test_labels"):
        tables = {**serial, "rounds": 2, "data": {"name": data, "validation_fraction": 0.2}}
        axes = {"local.lr": [0.001, 0.1, 30.0], "seed": [0, 1]}
        result = fedsim.compare(tables, axes, tune="local.lr")
        chosen.append(([row.chosen for row in result.summary], result.summary[0].score.mean))
    assert chosen[0][0] == chosen[1][0] == [{"local.lr": 0.1}]
    assert chosen[0][1] != chosen[1][1]


@pytest.mark.parametrize("algorithm", [{"algorithm": "local_only"}, {"algorithm": "fedper", "personal": ["*.weight"]}])
def test_a_global_model_of_which_a_part_is_never_trained_chooses_no_value(algorithm, serial):
    """The validation result of that model is equal for all learning rates; the error names a metric that differs."""
    tables = {
        **serial,
        "rounds": 4,
        "data": {"name": "tests.components:tiny", "validation_fraction": 0.2, "local_test_fraction": 0.2},
    }
    algorithms, rates, tuned = [{"algorithm": "sgd"}, algorithm], [1e-5, 0.05], ComparisonSettings(tune="local.lr")
    with pytest.raises(ExperimentError, match=r'tune = "local.lr": .* with metric=worker_accuracy'):
        plan_comparison(tables, {"local": algorithms, "local.lr": rates}, (), tuned)
    assert plan_comparison(tables, {"local": algorithms[:1], "local.lr": rates}, (), tuned)
    metric = "worker_accuracy"
    result = fedsim.compare({**tables, "local": algorithm}, {"local.lr": rates}, metric=metric, jobs=1)
    assert [row.mark for row in result.summary] == ["", "*"]


@pytest.mark.parametrize(
    ("algorithm", "changes", "better"),
    [
        ("local_only", {}, "worker_accuracy"),
        ("local_only", {"task": "torch.nn.functional:cross_entropy"}, "worker_loss"),
        ("local_only", {"mode": "clock", "policy": "fedasync"}, "train_loss"),
        ("local_only", {"metric": "test_accuracy"}, None),
        ("sgd", {}, None),
    ],
)
def test_a_comparison_by_a_global_model_that_is_never_trained_warns_once(algorithm, changes, better, serial):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fedsim.compare(
            {**serial, "rounds": 1, "local": {"batch_size": 16}},
            {"local.algorithm": ["adam", algorithm], "seed": [0, 1]},
            jobs=1,
            **changes,
        )
    lines = [str(each.message) for each in caught if each.category is SettingWarning]
    assert [line.partition("metric=")[2].split()[0] for line in lines] == ([] if better is None else [better])


@pytest.mark.parametrize("name", ["name", None])
@pytest.mark.parametrize("setting", ["tune", "worst", "heatmap"])
def test_a_setting_names_an_axis_by_either_key_of_its_component(setting, name, serial):
    keys = [f"{table}.{name or key}" for table, key in (("local", "algorithm"), ("partition", "name"))]
    value = ", ".join(keys) if setting == "heatmap" else keys[0]
    tables = {**serial, "data": {"name": "tests.components:tiny", "validation_fraction": 0.2}}
    axes = {"local.lr": [0.1, 0.2], "local.algorithm": ["sgd", "adam"], "partition.name": ["iid", "shards"]}
    planned = plan_comparison(tables, axes, (), ComparisonSettings(**{setting: value})).settings
    expected = {"heatmap": "local.algorithm,partition.name"}.get(setting, "local.algorithm")
    assert (
        planned
        == plan_comparison(tables, {**axes, setting: value}).settings
        == ComparisonSettings(**{setting: expected})
    )


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"tune": "local.lrs"}, r'tune = "local.lrs": is not a comparison axis; did you mean "local.lr"'),
        ({"worst": "seed"}, 'worst = "seed": is not a comparison axis'),
        (
            {"tune": "local.lr", "worst": "local.lr"},
            'worst = "local.lr": is also the axis of tune; choose another axis',
        ),
        (
            {"tune": "local.lr"},
            'tune = "local.lr": needs validation samples to choose values; add data.validation_fraction=0.1',
        ),
    ],
)
def test_a_choice_that_is_impossible_is_refused(choices, message, serial):
    axes = {"aggregate.rule": ["mean", "median"], "local.lr": [0.1, 0.2], "seed": [0, 1]}
    with pytest.raises(ExperimentError, match=message):
        plan_comparison(serial, axes, (), ComparisonSettings(**choices))
    with pytest.raises(ExperimentError, match=message):
        plan_comparison(serial, {**axes, **choices})
