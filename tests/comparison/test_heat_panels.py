"""Heat maps over two named axes: the panels, `heatmap.csv` and the axes that are refused."""

from __future__ import annotations

import pytest

import fedsim
from fedsim.comparison import plan_comparison
from fedsim.comparison.figures import heatmap_csv
from fedsim.comparison.on_paper import MOST_PANELS, MOST_VALUES, draw_heatmap
from fedsim.errors import ExperimentError
from tests.comparison.made_up import compared, lines_of

OVER = "partition.alpha", "attack.fraction"
RULES = ["mean", "median", "krum"]
AXES = {
    "aggregate.rule": RULES,
    "attack.name": ["none", "ipm"],
    "partition.alpha": [0.1, 10.0],
    "attack.fraction": [0.2, 0.4],
    "seed": [0, 1, 2],
}
# Accuracy of each seed without an attack, by (alpha, fraction). In the first cell the median leads the mean by
# 0.0167 ± 0.0143. In the second the mean and the median have the same mean result, and krum is tied.
FINAL = {
    (0.1, 0.2): {"mean": [0.5, 0.6, 0.7], "median": [0.51, 0.62, 0.72], "krum": [0.3, 0.3, 0.3]},
    (0.1, 0.4): {"mean": [0.4, 0.5, 0.6], "median": [0.39, 0.51, 0.60], "krum": [0.40, 0.49, 0.60]},
    (10.0, 0.2): {"mean": [0.8, 0.8, 0.8], "median": [0.7, 0.7, 0.7], "krum": [0.6, 0.6, 0.6]},
    (10.0, 0.4): {"mean": [0.2, 0.2, 0.2], "median": [0.6, 0.6, 0.6], "krum": [0.9, 0.9, 0.9]},
}


def made_up(failed=(), axes=AXES, **settings):
    """Return a comparison with the accuracies in `FINAL`, which the attack ipm lowers by 0.1."""

    def accuracies(point):
        rule, attack, alpha, fraction, *seed = point.values()
        if (rule, attack, alpha, fraction) in failed:
            return None
        return [FINAL[alpha, fraction][rule][seed[0] if seed else 0] - 0.1 * (attack == "ipm")]

    return compared(axes, accuracies, heatmap=",".join(OVER), **settings)


def rows_of(comparison):
    return lines_of(heatmap_csv(comparison, OVER))


def panels_of(figure):
    """Return the cell texts of each panel."""
    panels = [axes for axes in figure.axes if axes.get_title()]
    return {axes.get_title(): [text.get_text() for text in axes.texts if text.get_text()] for axes in panels}


def equal_runs(**axes):
    """Return the heat map of runs with equal results over these axes."""
    return draw_heatmap(compared({**AXES, "seed": [0], **axes}, lambda point: [0.5]), over=OVER)


@pytest.mark.parametrize(("attacks", "shape"), [(["none"], (2, 2)), (["none", "ipm"], (2, 4))])
def test_three_values_and_the_best_are_a_square_and_further_axes_have_a_row_for_each_combination(attacks, shape):
    figure = equal_runs(**{"attack.name": attacks})
    assert figure.axes[0].get_subplotspec().get_gridspec().get_geometry() == shape


def test_a_row_of_the_file_has_the_best_of_a_cell_and_those_that_are_tied():
    rows = rows_of(made_up())
    assert list(rows[0]) == ["attack.name", *OVER, "best aggregate.rule", "accuracy", "accuracy_ci95", "tied"]
    assert [tuple(row.values())[:3] for row in rows[3:5]] == [("none", "10.0", "0.4"), ("ipm", "0.1", "0.2")]
    assert [(row["best aggregate.rule"], row["tied"]) for row in rows[:4]] == [
        ("median", ""),
        ("mean; median", "krum"),
        ("mean", ""),
        ("krum", ""),
    ]
    assert [float(row["accuracy"]) for row in rows[:5]] == pytest.approx([1.85 / 3, 0.5, 0.8, 0.9, 1.85 / 3 - 0.1])
    assert float(rows[1]["accuracy_ci95"]) == pytest.approx(4.302653 * 0.1 / 3**0.5, abs=1e-6)


def test_with_worst_only_the_worst_case_is_left():
    rows = rows_of(made_up(worst="attack.name"))
    cells = [(row["best aggregate.rule"], round(float(row["accuracy"]), 4)) for row in rows]
    assert cells == [("median", 0.5167), ("mean; median", 0.4), ("mean", 0.7), ("krum", 0.8)]


def test_a_cell_in_which_every_value_has_a_failed_run_has_no_best():
    cell = ("none", 0.1, 0.2)
    comparison = made_up(failed=[(rule, *cell) for rule in RULES])
    assert (rows_of(comparison)[0]["best aggregate.rule"], rows_of(comparison)[0]["accuracy"]) == ("", "")
    panels = panels_of(draw_heatmap(comparison, over=OVER))
    assert panels["best rule, attack: none"][0] == "none is ranked"
    assert panels["rule: mean, attack: none"][0] == "failed"
    assert rows_of(made_up(failed=[("median", *cell)]))[0]["best aggregate.rule"] == "mean"


def test_each_combination_of_the_other_axes_has_a_panel_of_the_best_and_one_of_each_value():
    figure = draw_heatmap(made_up(), over=OVER)
    panels = panels_of(figure)
    names = ["best rule", *(f"rule: {rule}" for rule in RULES)]
    assert list(panels) == [f"{name}, attack: {attack}" for attack in ("none", "ipm") for name in names]
    assert panels["best rule, attack: none"][:4] == ["median", "0.6167", "mean, median", "0.5000\n~ +1 tied"]
    assert panels["rule: krum, attack: ipm"][-2:] == ["0.8000", "± 0.0000"]
    images = [axes.images[0] for axes in figure.axes if axes.get_title()]
    (limits,) = {image.get_clim() for image in images}  # a common colour scale
    assert limits == pytest.approx((0.1, 0.9))
    assert figure.get_suptitle().startswith("Test accuracy by partition alpha and attack fraction\n")
    assert (figure.axes[0].get_ylabel(), figure.axes[4].get_xlabel()) == ("partition alpha", "attack fraction")


def test_if_a_combination_needs_several_rows_the_panels_of_the_best_are_first():
    names = list(panels_of(equal_runs(**{"attack.fraction": [k / 40 for k in range(1, 11)]})))
    assert names[:3] == ["best rule, attack: none", "best rule, attack: ipm", "rule: mean, attack: none"]


def test_with_one_seed_equal_values_are_all_best_and_there_is_no_interval():
    comparison = made_up(axes={axis: values for axis, values in AXES.items() if axis != "seed"})
    cells = [(row["best aggregate.rule"], row["tied"], row["accuracy_ci95"]) for row in rows_of(comparison)[:2]]
    assert cells == [("median", "", ""), ("mean; krum", "", "")]
    panels = panels_of(draw_heatmap(comparison, over=OVER))
    assert panels["rule: mean, attack: none"] == ["0.5000", "0.4000", "0.8000", "0.2000"]


def test_more_panels_or_values_than_can_be_read_are_left_out_and_the_title_says_so():
    values = [k / 100 for k in range(1, MOST_VALUES + 4)]
    axes = {"local.steps": list(range(1, MOST_PANELS + 3)), "partition.alpha": values, "attack.fraction": [0.2]}
    comparison = compared(axes, lambda point: [0.5])
    figure = draw_heatmap(comparison, over=OVER)
    shown, title = panels_of(figure), figure.get_suptitle()
    assert f"; the first {MOST_VALUES} of {MOST_VALUES + 3} values of partition alpha" in title
    assert next(iter(shown)) == "best local steps"
    assert f"; the first {len(shown)} of {MOST_PANELS + 3} panels" in title
    assert all(len(texts) == MOST_VALUES for name, texts in shown.items() if not name.startswith("best"))
    assert len(rows_of(comparison)) == len(values)
    assert max(figure.get_size_inches()) < 70


@pytest.mark.parametrize(
    ("heatmap", "message"),
    [
        ("partition.alpha", "must be two different axes, such as partition.alpha,attack.fraction"),
        ("partition.alpha,partition.alpha", "must be two different axes"),
        ("partition.alpha,workers,rounds", "must be two different axes"),
        (["partition.alpha", "workers"], "must be two different axes"),
        ("partition.alpha,seed", '"seed" is not a comparison axis'),
        ("partition.alpa,workers", r'"partition.alpa" is not a comparison axis; did you mean "partition.alpha"'),
        (
            "aggregate.rule,workers",
            "aggregate.rule is the first axis, and the cells of the heat map already show the best value",
        ),
        (
            "workers,local.lr",
            "local.lr is already used by worst and cannot be an axis of the heat map; choose another key",
        ),
    ],
)
def test_axes_that_make_no_heat_map_are_refused(heatmap, message, serial):
    axes = {"aggregate.rule": ["mean", "median"], "local.lr": [0.1, 0.2], "partition.alpha": [0.1, 1.0]}
    axes |= {"workers": [4, 5], "seed": [0, 1], "worst": "local.lr", "heatmap": heatmap}
    with pytest.raises(ExperimentError, match=rf"^heatmap = .*: {message}") as caught:
        plan_comparison({**serial, "partition": "dirichlet"}, axes)
    assert len(caught.value.lines) == 1


@pytest.mark.parametrize("heatmap", ["aggregate.rule,workers", "workers,aggregate.rule"])
def test_two_axes_need_no_names(heatmap, serial):
    axes = {"aggregate.rule": ["mean", "median"], "workers": [4, 5], "local.lr": [0.1, 0.2], "worst": "local.lr"}
    with pytest.raises(ExperimentError, match="with only two axes, the heat map shows both; omit it"):
        plan_comparison(serial, {**axes, "heatmap": heatmap})
    assert draw_heatmap(compared({"aggregate.rule": ["mean", "median"], "workers": [4, 5]}, lambda point: [0.5]))


@pytest.mark.parametrize(("rows", "columns", "width"), [(3, 3, None), (5, 5, None), (4, 8, None), (3, 3, 5.0)])
@pytest.mark.parametrize("maps", [1, 2])
def test_the_texts_of_a_cell_on_paper_are_narrower_than_the_cell(rows, columns, width, maps):
    axes = {"attack.scale": list(range(rows)), "partition.alpha": list(range(columns)), "seed": [0, 1]}
    axes = axes if maps == 1 else {"aggregate.rule": ["mean", "nnm+geometric_median"], **axes}
    over = None if maps == 1 else "attack.scale,partition.alpha"
    labels = {str(row): f"a long name {row}" for row in range(rows)}
    made = compared(axes, lambda point: [0.5 + 0.1 * point["seed"]], heatmap=over)
    figure = fedsim.plot(made, kind="heatmap", width=width, labels=labels)
    assert figure.get_figwidth() == width or figure.get_figwidth() in (3.35, 6.9)
    figure.draw_without_rendering()
    panels = [panel for panel in figure.axes if panel.images]
    assert len(panels) == (1 if maps == 1 else 3)
    for panel in panels:
        widths = [text.get_window_extent().width for text in panel.texts if text.get_text()]
        assert len(widths) >= 2 * rows * columns
        assert max(widths) < 0.97 * panel.bbox.width / columns
