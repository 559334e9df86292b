"""Comparisons by a metric other than the test accuracy."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import FunctionType

import pytest
import torch.nn.functional as F

import fedsim
from fedsim.comparison.on_paper import draw_curves, draw_heatmap
from fedsim.comparison.plan import plan_comparison
from fedsim.comparison.results import read_records
from fedsim.comparison.tables import summary_csv, summary_text
from fedsim.config.schema import DIRECTIONS
from fedsim.core.metrics import metric
from fedsim.errors import ExperimentError
from fedsim.records.record import METRICS, OF_COMPONENTS, metric_called
from fedsim.records.worker_results import WorkerResults
from fedsim.report.comparison_page import comparison_page
from tests.comparison.made_up import compared, in_last_round, lines_of

AXES = {"aggregate.rule": ["mean", "median"], "attack.name": ["none", "ipm"], "seed": [0, 1, 2]}
DRIFT = {("mean", "none"): 3.0, ("mean", "ipm"): 5.0, ("median", "none"): 2.0, ("median", "ipm"): 7.0}


def made_up(**choices):
    """Return runs of equal accuracy with a metric `drift` and a number of bytes proportional to it."""
    comparison = compared(AXES, lambda point: [0.1, 0.8], **choices)
    for run in comparison.runs:
        drift = DRIFT[run.point["aggregate.rule"], run.point["attack.name"]] + run.point["seed"] / 10
        for place, record in enumerate(run.history):
            run.history[place] = replace(record, metrics={"drift": drift}, bytes_up=round(20 * drift))
    return comparison


@pytest.mark.parametrize("by", ["metrics.drift", "-metrics.drift", "-bytes_up"])
def test_the_sign_of_the_name_says_which_is_better(by):
    best = {
        row.point["attack.name"]: row.point["aggregate.rule"] for row in made_up(metric=by).summary if row.mark == "*"
    }
    up = not by.startswith("-")
    assert best == {"none": "mean" if up else "median", "ipm": "median" if up else "mean"}
    worst = made_up(metric=by, worst="attack.name").summary
    assert [row.chosen["attack.name"] for row in worst] == (["none"] * 2 if up else ["ipm"] * 2)


def test_the_table_the_files_and_the_figures_show_the_number():
    comparison = made_up(metric="-metrics.drift")
    (mean, median, *_) = lines_of(summary_csv(comparison))
    assert (float(mean["metrics.drift"]), mean["mark"]) == (pytest.approx(3.1), "")
    assert (float(median["difference"]), median["mark"]) == (pytest.approx(-1.0), "best")
    assert float(mean["test_accuracy"]) == pytest.approx(0.8)
    head = summary_text(comparison).splitlines()[0]
    assert head.index("drift") < head.index("difference to mean") < head.index("test accuracy")
    figures = [draw(comparison) for draw in (draw_curves, draw_heatmap)]
    assert ["drift by" in figure.get_suptitle() for figure in figures] == [True, True]
    assert max(figures[0].axes[0].lines[0].get_ydata()) == pytest.approx(3.1)


def test_the_number_is_stored_and_reported(cli, tmp_path):
    words = ["rounds=2", "workers=3", "model=logistic", "data=tests.components:tiny", "engine=serial", "seed=0,1"]
    done = cli("compare", *words, "aggregate.rule=mean,median", "--metric", "-train_loss", "--out", "comparison")
    assert done.exit_code == 0, done.output
    assert "train loss after the last round" in done.stdout
    assert json.loads((tmp_path / "comparison" / "comparison.json").read_text())["metric"] == "-train_loss"
    assert (tmp_path / "comparison" / "train_loss.png").is_file()
    context, _ = comparison_page(read_records(tmp_path / "comparison"))
    assert context["table"]["head"][:3] == ["train loss", "difference to best", "test accuracy"]
    assert context["metrics"][0] == "Train loss"
    again = cli("compare", "comparison", "--allow-imports", "--metric", "test_loss")
    assert "test loss after the last round" in again.stdout
    wrong = cli("compare", "comparison", "--allow-imports", "--metric", "metrics.drift")
    assert wrong.exit_code == 2
    assert 'metric = "metrics.drift": no run has recorded this metric in its last round' in wrong.stderr


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("test_lost", 'metric = "test_lost": is not a recorded metric; did you mean "test_loss"'),
        ("metrics", 'metric = "metrics": is not a recorded metric'),
        (3, "metric = 3: must be the name of a recorded metric"),
        ("validation_loss", 'metric = "validation_loss": needs validation samples; add data.validation_fraction=0.1'),
        ("personal_accuracy", 'metric = "personal_accuracy": is not a .* did you mean "worker_accuracy"'),
        ("worker_accuracy", 'metric = "worker_accuracy": needs tests of .* workers; add data.local_test_fraction=0.2'),
        ("metrics.global_worker_loss_mean", 'metric = "metrics.global_.* add data.local_test_fraction=0.2'),
    ],
)
def test_a_number_that_rounds_do_not_have_is_refused_before_the_runs(by, message, serial):
    with pytest.raises(ExperimentError, match=message):
        plan_comparison(serial, {"seed": [0, 1], "metric": by})


def test_a_number_of_no_run_is_refused_with_the_nearest(serial):
    tables = {**serial, "metrics": ["macro_f1"]}
    with pytest.raises(
        ExperimentError, match=r'metric = "metrics.macro_f2": no run has .* did you mean "metrics.macro_f1"'
    ):
        fedsim.compare(tables, {"seed": [0, 1]}, metric="metrics.macro_f2", jobs=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mode": "clock", "policy": "fedasync"},
            "fine_tuned.* needs synchronous rounds, unlike policy.* use test_loss",
        ),
        ({"data": {"name": "tests.components:tiny", "local_test_fraction": 0.2}}, "add worker_evaluation.fine_tune=1"),
    ],
)
def test_a_number_of_single_workers_needs_the_settings_of_its_tests(changes, message, serial):
    with pytest.raises(ExperimentError, match=message):
        plan_comparison({**serial, **changes}, {"seed": [0, 1], "metric": "metrics.fine_tuned_worker_accuracy_mean"})


def test_a_figure_of_a_number_of_single_workers_says_which_setting_tests_them(serial, tmp_path):
    fedsim.compare({**serial, "rounds": 1}, {"seed": [0, 1]}, tmp_path / "two", jobs=1)
    with pytest.raises(
        ExperimentError, match=r'metric = "worker_accuracy": no run has .* add data.local_test_fraction'
    ):
        fedsim.plot(tmp_path / "two", metric="worker_accuracy")


HIGHER = {
    "test_accuracy",
    "validation_accuracy",
    "worker_accuracy",
}  # the other numbers of a round are better when lower
NEITHER = {"asynchronous.updates", "asynchronous.arrivals", "asynchronous.buffered"}
BETTER_OF_METRICS = {
    "top_k": "higher",
    "macro_f1": "higher",
    "perplexity": "lower",
    "mse": "lower",
    "mae": "lower",
    "r2": "higher",
    "auroc": "higher",
}


def test_every_number_of_a_round_says_which_value_is_better():
    """A lower attack success is better, because defences are compared."""
    keys = {metric.key.replace("seconds.{}", "seconds.train") for metric in METRICS} - {"metrics", "seconds"}
    keys |= {"seconds.train"}
    better = {key: metric_called(key).better for key in keys}
    assert {key for key in keys if better[key] == "higher"} == HIGHER
    assert {key for key in keys if better[key] is None} == NEITHER
    stops = {key: {"max": "higher", "min": "lower"}[mode] for key, mode in DIRECTIONS.items()}
    assert stops == {key: better[key] for key in DIRECTIONS}


def test_every_number_of_a_component_says_which_value_is_better():
    sources = {path: path.read_text() for path in Path(fedsim.__file__).parent.rglob("*.py")}
    recorded = {name for text in sources.values() for name in re.findall(r'metrics\["(\w+)"\] = ', text)}
    of_policies = r'def numbers\(.*?return \{"(\w+)": '
    recorded |= {name for text in sources.values() for name in re.findall(of_policies, text, re.DOTALL)}
    assert recorded == OF_COMPONENTS.keys()
    # writes to metrics that the pattern above misses
    unseen = r'(?<![.\w])metrics( \|= |\.update\(|\.setdefault\(|\[(?!"\w+"\] = ).*\] = )'
    modules = [path.name for path, text in sources.items() if re.search(unseen, text)]
    assert modules == ["evaluation.py"], (
        "components write metrics[NAME] = ...; only evaluation.py merges dicts of metrics"
    )
    assert {name: metric_called(f"metrics.{name}").better for name in recorded} == OF_COMPONENTS


def test_every_metric_of_fedsim_says_which_value_is_better():
    assert {registration.name: registration.target.higher_is_better for registration in metric} == {
        name: better == "higher" for name, better in BETTER_OF_METRICS.items()
    }
    for prefix in ("", "validation_"):  # independent of the experiment, as for a figure
        directions = {name: metric_called(f"metrics.{prefix}{name}").better for name in BETTER_OF_METRICS}
        assert directions == BETTER_OF_METRICS


@pytest.mark.parametrize("score", ["accuracy", "loss"])
def test_every_number_of_single_workers_says_which_value_is_better(score):
    tested = {0: {"global": (0.5, 0.9 if score == "accuracy" else None)}}
    names = WorkerResults.of(1, {0: 3}, tested).metrics()
    better = {name.rpartition("_")[2]: metric_called(f"metrics.{name}").better for name in names}
    of_score = {"accuracy": "higher", "loss": "lower"}[score]
    assert better == {"mean": of_score, "worst10": of_score, "std": "lower", "gini": "lower"}


@pytest.mark.parametrize("key", sorted(NEITHER))
def test_a_number_without_a_better_value_needs_a_sign(key, serial):
    with pytest.raises(
        ExperimentError, match=rf'metric = "{key}": fedsim does not know whether .* write \+{key} .* or -{key}'
    ):
        plan_comparison(serial, {"seed": [0, 1], "metric": key})
    for sign in "+-":
        assert plan_comparison(serial, {"seed": [0, 1], "metric": f"{sign}{key}"}).settings.metric == f"{sign}{key}"
    assert {row.mark for row in made_up(metric=key).summary} == {""}  # a folder written by another program


def test_the_best_defence_is_that_against_which_the_attack_succeeds_least():
    comparison = made_up(metric="attack_success", worst="attack.name")
    success = {("mean", "none"): 0.8, ("mean", "ipm"): 0.9, ("median", "none"): 0.1, ("median", "ipm"): 0.2}
    in_last_round(comparison, lambda run: {"attack_success": success[tuple(run.point.values())[:2]]})
    rows = comparison.summary
    assert {row.point["aggregate.rule"]: row.mark for row in rows} == {"mean": "", "median": "*"}
    assert [row.chosen["attack.name"] for row in rows] == ["ipm", "ipm"]
    assert "attack success after the last round (lower is better)" in summary_text(comparison)


def distance(outputs, targets):
    return 0.0


distance.higher_is_better = False


def undeclared(outputs, targets):
    return 0.0


class Distance:
    higher_is_better = False

    def update(self, outputs, targets):
        pass

    def compute(self):
        return 0.0


@pytest.mark.parametrize(
    ("name", "options", "target", "better"),
    [
        ("my_error", {}, undeclared, "lower"),
        ("my_score", {}, undeclared, "higher"),
        ("distance", {}, Distance, "lower"),
        ("my_error", {"higher_is_better": True}, undeclared, "higher"),
        ("my_score", {"higher_is_better": False}, undeclared, "lower"),
    ],
)
def test_a_registered_metric_declares_only_what_it_is_told(name, options, target, better, serial, monkeypatch):
    """Without a declaration, the name decides: lower is better for an error."""
    monkeypatch.setattr(metric, "_components", dict(metric._components))
    if target is undeclared:
        # a copy, because the declaration is an attribute of the function
        target = FunctionType(target.__code__, target.__globals__)
    metric(name, **options)(target)
    by = plan_comparison({**serial, "metrics": [name]}, {"seed": [0, 1], "metric": f"metrics.{name}"}).settings.metric
    assert metric_called(by).better == better


@pytest.mark.parametrize("target", [F.mse_loss, max, "a string"])
def test_what_cannot_be_a_metric_is_refused_and_left_as_it_was(target, monkeypatch):
    monkeypatch.setattr(metric, "_components", dict(metric._components))
    with pytest.raises(TypeError):
        metric("refused", higher_is_better=False)(target)
    assert not hasattr(target, "higher_is_better")
    assert "refused" not in metric.names()


@pytest.mark.parametrize(
    ("metrics", "by", "stored"),
    [
        ([{"name": "perplexity", "label": "ppl"}], "metrics.ppl", "-metrics.ppl"),
        ([{"name": "perplexity", "label": "ppl"}], "metrics.validation_ppl", "-metrics.validation_ppl"),
        ([{"name": "perplexity", "label": "ppl"}], "+metrics.ppl", "+metrics.ppl"),
        ([{"name": "macro_f1", "label": "lossless"}], "metrics.lossless", "+metrics.lossless"),
        ([distance], "metrics.distance", "-metrics.distance"),
        ([undeclared], "metrics.undeclared", "metrics.undeclared"),
    ],
)
def test_a_metric_declares_which_value_is_better(metrics, by, stored, serial):
    """The comparison stores the direction, so its folder can be read without the metric."""
    tables = {**serial, "metrics": metrics, "data": {"name": "tests.components:tiny", "validation_fraction": 0.2}}
    assert plan_comparison(tables, {"seed": [0, 1], "metric": by}).settings.metric == stored
