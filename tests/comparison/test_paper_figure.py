"""Figures of made-up run folders with `fedsim.plot` and `fedsim plot`."""

from __future__ import annotations

import io

import pytest
from PIL import Image

import fedsim
from fedsim.comparison import Comparison
from fedsim.core.plotting import COLOURS
from fedsim.errors import ExperimentError, RecordError
from tests.report.folders import add_to_rounds, invent_run, write_points

RULES = ["mean", "median"]
ATTACKS = ["none", {"name": "alie", "z": 1.5}]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """Return a comparison of two rules, two attacks and two seeds. The rules differ by 0.1, the seeds by 0.02."""

    def make(path, point):
        base = 0.5 + 0.1 * RULES.index(point["aggregate.rule"]) + 0.02 * point["seed"]
        invent_run(path, [base, base + 0.1, base + 0.2])

    folder = tmp_path_factory.mktemp("figures") / "comparison"
    return write_points(folder, {"aggregate.rule": RULES, "attack": ATTACKS, "seed": [0, 1]}, make)


@pytest.fixture(scope="module")
def strengths(tmp_path_factory):
    """Return a comparison over an axis of three numbers."""
    folder = tmp_path_factory.mktemp("figures") / "strengths"
    return write_points(
        folder, {"attack.scale": [0.5, 1, 5]}, lambda path, point: invent_run(path, [0.9 - 0.1 * point["attack.scale"]])
    )


def runs(tmp_path, **settings):
    """Return run folders a, b, ... of experiments with these settings."""
    return [invent_run(tmp_path / name, [0.5, 0.6], **tables) for name, tables in settings.items()]


def legend_of(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()] if figure.legends else []


def means_of(panel):
    """Return the lines of means, without the thin lines of single seeds."""
    return [line for line in panel.lines if line.get_marker() != "None"]


def test_a_comparison_has_a_line_for_each_rule_and_a_panel_for_each_attack(comparison):
    figure = fedsim.plot(comparison)
    assert legend_of(figure) == RULES
    assert [panel.get_title() for panel in figure.axes] == ["attack: none", "attack: alie,z=1.5"]
    mean, median = means_of(figure.axes[0])
    assert list(mean.get_ydata()) == pytest.approx([0.51, 0.61, 0.71])
    assert list(median.get_ydata()) == pytest.approx([0.61, 0.71, 0.81])
    assert [line.get_color() for line in (mean, median)] == list(COLOURS[:2])


def test_a_heat_map_has_a_cell_for_each_rule_and_attack(comparison):
    figure = fedsim.plot(comparison, kind="heatmap")
    texts = [text.get_text() for text in figure.axes[0].texts if text.get_text()]
    assert texts == ["0.7100", "(0.7000, 0.7200)", "0.7100", "(0.7000, 0.7200)"] + 2 * ["0.8100", "(0.8000, 0.8200)"]


@pytest.mark.parametrize(
    ("metric", "best"), [(None, "0.5000"), ("metrics.drift", "0.5000"), ("+metrics.drift", "1.5000")]
)
def test_the_best_cell_is_that_of_the_comparison_unless_the_metric_has_a_sign(metric, best, tmp_path):
    def make(path, point):
        invent_run(path, [0.5])
        drift = 0.5 + RULES.index(point["aggregate.rule"])
        add_to_rounds(path, lambda record: {"metrics": {"drift": drift}})

    axes = {"aggregate.rule": RULES, "local.lr": [0.5, 1.5], "seed": [0]}
    folder = write_points(tmp_path / "drift", axes, make, metric="-metrics.drift")
    texts = fedsim.plot(folder, metric=metric, kind="heatmap").axes[0].texts
    assert {text.get_text() for text in texts if text.get_fontweight() == "bold"} - {""} == {best}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metric": "test_acuracy"}, 'metric = "test_acuracy": .* did you mean "test_accuracy"'),
        ({"x": "virtual_second"}, 'did you mean "virtual_seconds"'),
        ({"x": "virtual_seconds"}, "no run has recorded"),
        ({"kind": "heat_map"}, 'did you mean "heatmap"'),
        ({"style": "papers"}, 'did you mean "paper"'),
        ({"out": "figure.jpg"}, r"must end in \.png, \.svg, \.pdf"),
        ({"only": {"attack": "ipm"}}, 'attack = "ipm": is not in the comparison'),
        ({"y_range": (1, 0)}, r"y_range = \[1, 0\]: must be two numbers, the smaller one first"),
        ({"x_range": (0, float("nan"))}, "x_range = .*: must be two numbers"),
        ({"x_range": (0, 1), "kind": "heatmap"}, "is only used with kind=curves"),
        ({"width": float("nan")}, "width = nan: must be between 1 and 30 inches"),
        ({"width": 0}, "width = 0: must be"),
        ({"height": float("inf")}, "height = inf: must be"),
        ({"only": {"attak": "none"}}, 'did you mean "attack"'),
    ],
)
def test_a_wrong_argument_is_refused_with_what_is_allowed(comparison, arguments, message):
    with pytest.raises(ExperimentError, match=message):
        fedsim.plot(comparison, **arguments)


def test_folders_that_cannot_be_drawn_together_are_refused(comparison, tmp_path):
    (run,) = runs(tmp_path, a={})
    with pytest.raises(ExperimentError, match="is a comparison"):
        fedsim.plot([comparison, run])
    with pytest.raises(ExperimentError, match="at least two compared settings"):
        fedsim.plot(run, kind="heatmap")
    with pytest.raises(RecordError, match="no such folder"):
        fedsim.plot(tmp_path / "nothing")


def test_the_command_writes_the_file_and_prints_the_caption(comparison, tmp_path, cli):
    out = tmp_path / "figure.svg"
    done = cli("plot", comparison, "attack=none", "--metric", "test_loss", "--out", out)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines() == [
        "Test loss by rule and attack. tried: mean over 2 seeds (thin lines: single seeds).",
        str(out),
    ]
    assert out.read_text().startswith("<?xml")


@pytest.mark.parametrize("rule", ["aggregate.rule", "aggregate.name"])
def test_only_draws_the_named_values(comparison, rule):
    figure = fedsim.plot(comparison, only={"attack": "alie", rule: ["median"]})
    assert [panel.get_title() for panel in figure.axes] == ["attack: alie,z=1.5"]
    (line,) = means_of(figure.axes[0])
    assert line.get_ydata()[-1] == pytest.approx(0.81)
    assert line.get_color() == COLOURS[1], "the colour of the whole comparison"
    assert [handle.get_color() for handle in figure.legends[0].legend_handles] == [COLOURS[1]]


@pytest.mark.parametrize(
    ("x", "expected"),
    [("round", [1, 2, 3]), ("updates", [1, 2, 3]), ("seconds", [0.231, 0.462, 0.693]), ("bytes", [3000, 6000, 9000])],
)
def test_the_axes_have_the_totals_since_the_start_and_the_metric(comparison, x, expected):
    panel = fedsim.plot(comparison, x=x, metric="train_loss").axes[0]
    assert list(panel.lines[0].get_xdata()) == pytest.approx(expected)
    assert panel.get_ylabel() == "train loss"
    assert panel.lines[0].get_ydata()[-1] == pytest.approx(2 - 0.71)


def test_curves_are_drawn_against_the_samples_of_all_workers(tmp_path):
    (folder,) = runs(tmp_path, a={"aggregate.rule": "mean"})
    add_to_rounds(folder, lambda record: {"samples": [40, 2 * record["round"]]})
    panel = fedsim.plot(folder, x="samples", metric="train_loss").axes[0]
    assert list(panel.lines[0].get_xdata()) == [42, 86]
    assert panel.get_xlabel() == "training samples"


def test_curves_are_drawn_against_epsilon(tmp_path):
    (folder,) = runs(tmp_path, a={"aggregate.rule": "mean"})
    add_to_rounds(folder, lambda record: {"metrics": {"epsilon": record["round"] / 4}})
    panel = fedsim.plot(folder, x="epsilon", metric="train_loss").axes[0]
    assert list(panel.lines[0].get_xdata()) == [0.25, 0.5]


def test_against_an_axis_of_numbers_the_last_round_is_drawn_and_a_logarithmic_axis_begins_above_0(strengths):
    (panel,) = fedsim.plot(strengths, x="attack.scale", x_range=(0.5, 3)).axes
    assert panel.lines[0].get_xydata().tolist() == [[0.5, 0.85], [1, 0.8], [5, 0.4]]
    assert panel.get_xscale() == "log"
    with pytest.raises(ExperimentError, match="must be above 0"):
        fedsim.plot(strengths, x="attack.scale", x_range=(0, 3))


def test_runs_are_named_by_what_distinguishes_them_or_their_folders_and_seeds_are_averaged(tmp_path):
    mean, krum = {"aggregate.rule": "mean"}, {"aggregate.rule": "krum", "aggregate.f": 2}
    settings = {"a": {**mean, "seed": 0}, "b": {**mean, "seed": 1}, "c": {**krum, "seed": 0}, "d": {**mean, "seed": 0}}
    a, b, c, d = runs(tmp_path, **settings)
    figure = fedsim.plot([a, b, c])
    assert legend_of(figure) == ["mean", "krum, f=2"]
    assert len(figure.axes[0].lines) == 4  # two means, and two seeds of one of them
    assert legend_of(fedsim.plot([a, d])) == ["a", "d"]
    assert legend_of(fedsim.plot(a)) == []


def test_results_and_comparisons_are_drawn_as_their_folders_are(comparison, tmp_path):
    paths = [tmp_path / name for name in ("result.png", "folder.png", "loaded.png")]
    results = [fedsim.run(rounds=2, workers=2, model="logistic", local={"steps": 1, "lr": lr}) for lr in (0.1, 0.2)]
    assert legend_of(fedsim.plot(results, metric="train_loss")) == ["lr=0.1", "lr=0.2"]
    assert legend_of(fedsim.plot([results[0], results[0]])) == ["run 1", "run 2"]
    fedsim.plot(Comparison.read(comparison), out=paths[0])
    fedsim.plot(str(comparison), out=paths[1])
    Comparison.read(comparison).plot(paths[2])
    images = [path.read_bytes() for path in paths]
    assert images[0] == images[1] != images[2]
    for source in (3, None, [results[0], 3]):
        with pytest.raises(ExperimentError, match="source = .*: must be the result of a run, a comparison, or"):
            fedsim.plot(source)


def test_a_notebook_shows_figures_and_a_result_draws_its_accuracy_and_losses(tmp_path):
    result = fedsim.run(rounds=2, workers=2, model="logistic", local={"steps": 1})
    figure = result.plot(tmp_path / "curve.png")
    assert [panel.get_ylabel() for panel in figure.axes] == ["test accuracy", "loss"]
    assert figure._repr_png_() == (tmp_path / "curve.png").read_bytes()
    with pytest.raises(ExperimentError, match=r"must end in \.png, \.svg, \.pdf"):
        result.plot(tmp_path / "curve.jpg")


@pytest.mark.parametrize("seed", [[1], "x", 0.5])
def test_a_seed_that_is_not_a_number_and_a_run_that_is_not_finished_are_no_obstacles(tmp_path, seed):
    (panel,) = fedsim.plot(runs(tmp_path, a={"seed": seed}, b={"seed": 0, "rounds": 5})).axes
    assert [list(line.get_xdata()) for line in panel.lines] == [[1, 2]] * 2


@pytest.mark.parametrize(("panels", "inches"), [({"attack": "none"}, 3.35), ({}, 6.9)])
def test_a_figure_for_a_paper_has_the_width_of_its_columns_texts_of_8_points_and_a_caption(comparison, panels, inches):
    figure = fedsim.plot(comparison, only=panels)
    assert figure.get_size_inches()[0] == pytest.approx(inches)
    caption = "Test accuracy by rule and attack. tried: mean over 2 seeds (thin lines: single seeds)."
    assert (figure.get_suptitle(), figure.get_label()) == ("", caption)
    panel = figure.axes[0]
    texts = [panel.xaxis.label, panel.title, *panel.get_xticklabels(), *figure.legends[0].get_texts()]
    assert {round(text.get_fontsize(), 1) for text in texts} == {8.0}
    screen = fedsim.plot(comparison, only=panels, style="screen")
    assert screen.get_suptitle().startswith("Test accuracy by rule and attack\n")


@pytest.mark.parametrize("suffix", ["png", "pdf"])
def test_files_have_the_given_size_and_ranges_and_are_the_same_bytes_each_time(comparison, tmp_path, suffix):
    first_file, second_file = tmp_path / f"one.{suffix}", tmp_path / f"two.{suffix}"
    for out in (first_file, second_file):
        figure = fedsim.plot(comparison, width=4, height=2, x_range=(0, 3), y_range=(0.25, 0.5), out=out)
    assert {(panel.get_xlim(), panel.get_ylim()) for panel in figure.axes} == {((0, 3), (0.25, 0.5))}
    content = first_file.read_bytes()
    assert content == second_file.read_bytes()
    if suffix == "png":
        assert Image.open(io.BytesIO(content)).size == (1200, 600)
    if suffix == "pdf":
        assert b"/TrueType" in content or b"/CIDFontType2" in content
        assert b"/Type3" not in content
    fedsim.plot(comparison, x_range=(-1e145, 1e145), y_range=(0, 1e-9), width=30, height=3, out=first_file)


def test_labels_of_a_stored_comparison_are_not_shown_as_formulas(tmp_path):
    axes, out = {"aggregate.rule": ["$x^{$", "b"], "attack.scale": [1, 2, 3]}, tmp_path / "figure.svg"
    folder = write_points(tmp_path / "dollars", axes, lambda path, point: invent_run(path, [0.5]))
    for arguments in ({"x": "attack.scale"}, {"kind": "heatmap"}):
        assert fedsim.plot(folder, out=out, **arguments)
        assert "$x^{$" in out.read_text()
