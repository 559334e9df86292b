"""The figures and tables of the page."""

from __future__ import annotations

import json

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from fedsim.comparison.results import read_records
from fedsim.core.confidence import estimate
from fedsim.records.formatting import MISSING
from fedsim.records.reader import StoredPartition
from fedsim.records.worker_results import WorkerResults, workers_csv
from fedsim.report.comparison_page import comparison_page
from fedsim.report.on_page import PALETTE, TEMPLATES, partition_heat_map, run_curves, weights_heat_map
from fedsim.report.run_page import rounds_table, run_page
from tests.report.folders import add_to_rounds, invent_run, on_the_clock, timed_comparison, write_points
from tests.wcag import READABLE, contrast

SCALES = "virtual_seconds", "updates"


def find(figures, **choices):
    """Return the only figure with these choices."""
    (figure,) = [each for each in figures if all(each["when"].get(name) == value for name, value in choices.items())]
    return figure


def lines_of(figure):
    """Return the named lines of a figure of curves, as {name: [(x, y), ...]}."""
    lines = {}
    for trace in figure["data"]:
        if "name" in trace:
            lines[trace["name"]] = list(zip(trace["x"], trace["y"], strict=True))
    return lines


def values_of(figure):
    return {name: [y for _, y in points] for name, points in lines_of(figure).items()}


def spread_of(figure):
    return [trace for trace in figure["data"] if "name" not in trace]


def run_with(folder, weights, byzantine=()):
    """Return a run whose rounds have these {worker: weight}, or {worker: "excluded"}."""
    invent_run(folder, [0.5] * len(weights))
    lines = []
    for number, record in enumerate(weights, start=1):
        excluded = [worker for worker, weight in record.items() if weight == "excluded"]
        coefficients = [0.0 if worker in excluded else weight for worker, weight in record.items()]
        lines.append({"round": number, "cohort": list(record), "weights": coefficients, "excluded": excluded})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "partition.json").write_text(json.dumps({"byzantine": list(byzantine)}))
    return read_records(folder)


def test_weights_have_a_cell_for_every_worker_and_round(tmp_path):
    run = run_with(tmp_path / "run", [{0: 0.5, 7: 0.5}, {3: 1.0, 7: "excluded"}], byzantine=[7, 9])
    weights, excluded = weights_heat_map(run)["data"]
    assert (weights["x"], weights["y"]) == ([1, 2], ["0", "3", "7 (B)"])
    assert weights["z"] == [[0.5, None], [None, 1.0], [0.5, 0.0]]
    assert excluded["z"] == [[None, None], [None, None], [None, 1]]


def test_many_rounds_share_the_columns_of_weights(tmp_path):
    run = run_with(tmp_path / "run", [{0: 0.2}, {0: 0.4}, {0: "excluded"}, {0: 0.6}, {1: 1.0}])
    figure = weights_heat_map(run, 3)
    weights, excluded = figure["data"]
    assert weights["x"] == [1, 3, 5]
    assert figure["layout"]["xaxis"]["title"]["text"] == "round (each column is the mean of 2 rounds)"
    assert weights["z"] == [[pytest.approx(0.3), pytest.approx(0.3), None], [None, None, 1.0]]
    assert excluded["z"] == [[None, 1, None], [None, None, None]]  # excluded in one of two rounds


def test_the_curves_of_a_run_have_the_values_of_its_records(run_folder):
    figures = run_curves(read_records(run_folder))
    records = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    curves = {figure["when"]["metric"]: values_of(figure) for figure in figures}
    assert curves["Test accuracy"] == {"test accuracy": [record["test_accuracy"] for record in records]}
    assert set(curves["Test and train loss"]) == {"test loss", "train loss"}
    assert curves["Test loss"]["test loss"] == pytest.approx([r["test_loss"] for r in records], abs=6e-5)
    assert set(curves["Seconds"]) == {"seconds", "broadcast", "train", "aggregate", "test"}
    assert curves["Seconds"]["seconds"] == pytest.approx([sum(r["seconds"].values()) for r in records], rel=1e-5)
    assert curves["Bytes"]["bytes"] == [record["bytes_up"] + record["bytes_down"] for record in records]
    assert curves["Attack success"] == {"attack success": [0.25] * len(records)}


def test_a_number_of_some_rounds_has_a_joined_curve_and_a_column(fresh_run):
    add_to_rounds(fresh_run, lambda record: {"metrics": {"update_norm": 2.5} if record["round"] != 2 else {}})
    run = read_records(fresh_run)
    assert lines_of(find(run_curves(run), metric="update_norm")) == {"update_norm": [(1, 2.5), (3, 2.5)]}
    table = rounds_table(run)
    assert [row[table["head"].index("update_norm")] for row in table["rows"]] == ["2.5000", MISSING, "2.5000"]


@pytest.mark.parametrize(("rounds", "every"), [(1000, 1), (2500, 3)])
def test_the_table_of_a_long_run_has_every_third_round(tmp_path, rounds, every):
    table = rounds_table(read_records(invent_run(tmp_path / "run", [0.5] * rounds)))
    assert table["every"] == every
    numbers = [int(row[0]) for row in table["rows"]]
    assert numbers == [*range(1, rounds, every), rounds]


def test_unfinished_runs_are_named(tmp_path):
    def make(path, point):
        if point["x"] != "c":
            invent_run(path, [0.5], rounds=4 if point["x"] == "b" else 1)
        if point["x"] == "d":
            (path / "error.txt").write_text("worker 1 failed\nTraceback\n")

    plan = read_records(write_points(tmp_path / "comparison", {"x": ["a", "b", "c", "d"]}, make))
    context, charts = comparison_page(plan)
    assert context["unfinished"] == [
        ("run1", "1 of 4 rounds"),
        ("run2", "not begun"),
        ("run3", "failed: worker 1 failed"),
    ]
    assert context["notes"] == ["Not finished: 3 of 4 runs. The table counts only finished runs."]
    assert [row["cells"][-1].text for row in context["table"]["rows"]] == ["1", "0 of 1", "0 of 1", "0 of 1"]
    assert set(lines_of(find(charts["curves-chart"], metric="Test accuracy"))) == {"a", "b", "d"}


def test_shared_settings_are_equal_in_all_runs(comparison_folder):
    context, charts = comparison_page(read_records(comparison_folder))
    shared = dict(context["experiment"])
    assert shared["model.name"] == "logistic"
    assert not {"aggregate.rule", "local.lr", "seed"} & set(shared)
    assert len(charts["weights-chart"]) == 12
    assert sorted(len(figure["when"]["run"]) for figure in charts["partition-chart"]) == [6, 6]  # six runs share it


def test_the_partition_of_a_large_population_names_the_workers_that_it_shows():
    partition = StoredPartition(counts=[[1, 2], [3, 4]], workers=[70, 9000], population=10**6, byzantine=[1, 70, 8000])
    figure = partition_heat_map(partition)
    cells, sums = figure["data"]
    assert (cells["x"], cells["z"], sums["y"]) == (["70 (B)", "9000"], [(1, 3), (2, 4)], [3, 7])
    title = "worker (a random sample of 2 of the 1,000,000 workers)"
    assert figure["layout"]["xaxis"]["title"]["text"] == title


def test_a_run_on_the_clock_has_its_scales_metrics_tiles_and_columns(tmp_path):
    folder = invent_run(tmp_path / "run", [0.5, 0.7, 0.6], mode="clock", policy="asgd", aggregate="mean")
    add_to_rounds(folder, on_the_clock(2.5))
    context, charts = run_page(read_records(folder))
    figures = charts["curves-chart"]
    assert [value for value, _, selected in context["scales"] if selected] == ["virtual_seconds"]
    for scale, x in {"round": [1, 2, 3], "virtual_seconds": [2.5, 5, 7.5], "updates": [2, 4, 6]}.items():
        line = lines_of(find(figures, metric="Test accuracy", scale=scale))["test accuracy"]
        assert line == list(zip(x, [0.5, 0.7, 0.6], strict=True))
    assert values_of(find(figures, metric="Mean staleness", scale="arrivals")) == {"mean staleness": [1.5] * 3}
    assert ("virtual time", "7.5 s", "2.5 s per round") in context["tiles"]
    assert ("updates", "6", "mean staleness 1.5") in context["tiles"]
    assert {("mode", "clock"), ("policy", "asgd")} <= set(context["facts"])
    assert "rule" not in dict(context["facts"])  # not used by the policy
    assert {"virtual seconds", "updates", "mean staleness"} <= set(context["table"]["head"])


@pytest.mark.parametrize("model", ["personal", "global"])
def test_the_tiles_of_a_run_have_the_accuracy_of_the_model_that_workers_would_use(model, tmp_path):
    folder = invent_run(tmp_path / "run", [0.5, 0.7])
    tested = {worker: {"global": (0.9, 0.5), model: (0.3, accuracy)} for worker, accuracy in ((2, 0.75), (5, 1.0))}
    results = WorkerResults.of(2, {2: 4, 5: 8}, tested)
    (folder / "workers-00002.csv").write_text(workers_csv(results))
    context, charts = run_page(read_records(folder))
    assert ("worker accuracy", "0.8750", f"{model} model, 2 workers") in context["tiles"]
    colours = {trace["name"]: trace["line"]["color"] for trace in charts["workers-chart"][0]["data"]}
    assert colours == dict(zip(["global model", "personal model"], PALETTE[: len(tested[2])], strict=False))


def test_a_synchronous_run_has_no_scale_but_rounds(fresh_run):
    context, charts = run_page(read_records(fresh_run))
    assert context["scales"] == []
    assert {figure["when"]["scale"] for figure in charts["curves-chart"]} == {"round"}
    assert not {"virtual time", "updates"} & {word for word, *_ in context["tiles"]}
    assert not {"mode", "policy"} & {word for word, _ in context["facts"]}


def test_a_comparison_on_the_clock_interpolates_and_shows_the_time_to_the_target(tmp_path):
    context, charts = comparison_page(read_records(timed_comparison(tmp_path / "comparison")))
    lines = lines_of(find(charts["curves-chart"], metric="Test accuracy", scale="virtual_seconds"))
    assert lines["sync"] == [(10, 0.2), (20, 0.9), (30, 0.95)]
    # Seed 0 has 0.3, 0.5, 0.6 at 1, 2, 3 s; seed 1 has 0.3, 0.5, 0.9 at 2, 4, 6 s. They overlap from 2 to 3 s.
    assert lines["asgd"] == [(2, pytest.approx((0.5 + 0.3) / 2)), (3, pytest.approx((0.6 + 0.4) / 2))]
    assert context["table"]["head"][2:6] == [
        *("virtual s to 90 percent", "updates to target", "arrivals to target", "virtual s")
    ]
    cells = [[str(cell) for cell in row["cells"][2:6]] for row in context["table"]["rows"]]
    assert cells == [
        ["20.0 (20.0, 20.0)", "2.00 (2.00, 2.00)", "4.00 (4.00, 4.00)", "30.0 (30.0, 30.0)"],
        ["6.00 (1 of 2)", "6.00", "12.0", "4.50 (3.00, 6.00)"],
    ]


def test_lines_of_very_different_length_have_a_logarithmic_scale(tmp_path):
    def make(path, point):
        invent_run(path, [0.2, 0.5], mode="clock")
        add_to_rounds(path, on_the_clock(1.0, updates=1 if point["policy"] == "fedbuff" else 100))

    _, charts = comparison_page(
        read_records(write_points(tmp_path / "comparison", {"policy": ["fedbuff", "asgd"]}, make))
    )
    axes = [find(charts["curves-chart"], metric="Test accuracy", scale=scale)["layout"]["xaxis"] for scale in SCALES]
    assert [axis["type"] for axis in axes] == ["linear", "log"]
    assert axes[1]["title"]["text"] == "updates of the global model"


def made_up_comparison(folder, axes, final, **settings):
    """Return a comparison whose runs of two rounds end with the accuracy `final(point)`."""

    def make(path, point):
        invent_run(path, [0.1, final(point)])

    return read_records(write_points(folder, axes, make, **settings))


@pytest.mark.parametrize("finals", [[0.8230, 0.8239], [0.2, 0.9, 0.95, 1.0]])
def test_two_seeds_have_a_line_each_and_four_a_band_and_the_mean_is_that_of_the_table(tmp_path, finals):
    axes = {"aggregate.rule": ["mean"], "attack.name": ["none", "alie"], "seed": list(range(len(finals)))}
    context, charts = comparison_page(
        made_up_comparison(tmp_path / "comparison", axes, lambda point: finals[point["seed"]])
    )
    figure, mean = find(charts["curves-chart"], metric="Test accuracy"), estimate(finals)
    *spread, line = figure["data"][: len(figure["data"]) // 2]
    if len(finals) == 2:
        assert [trace["y"] for trace in spread] == [[0.1, final] for final in finals]
    else:
        assert [trace["y"] for trace in spread] == [pytest.approx([0.1, 1.0, mean.mean - mean.half_width, 0.1])]
    cell = context["table"]["rows"][0]["cells"][0]
    assert f"{cell.text} {cell.spread}" == mean.text()  # 0.82345 is rounded up to 0.8235
    heat_map = find(charts["heat-map-chart"], value="Final test accuracy")
    assert heat_map["data"][0]["text"] == [[f"{cell.text}<br>{cell.spread}"] * 2]
    assert line["y"][-1] == float(cell.text)
    assert line["customdata"][-1].startswith(f" {cell.spread}")
    both = {"mean · none · test", "mean · none · train", "mean · alie · test", "mean · alie · train"}
    assert set(lines_of(find(charts["curves-chart"], metric="Test and train loss"))) == both


def test_the_heat_maps_over_two_named_axes_have_the_best_value_in_each_cell(tmp_path):
    """The median leads by 0.1 for lr = 0.2, otherwise both are equal. Without an attack, accuracies are 0.2 higher."""

    def final(point):
        lead = 0.1 * (point["aggregate.rule"] == "median" and point["local.lr"] == 0.2)
        return 0.5 + lead + 0.2 * (point["attack.name"] == "none")

    axes = {"aggregate.rule": ["mean", "median"], "attack.name": ["ipm", "none"], "local.lr": [0.1, 0.2]}
    axes |= {"workers": [4], "seed": [0, 1, 2]}
    context, charts = comparison_page(made_up_comparison(tmp_path, axes, final, heatmap="workers,local.lr"))
    best = find(charts["best-map-chart"], axis3="0")
    assert best["data"][0]["text"] == [["mean, median<br>0.5000", "median<br>0.6000"]]
    assert best["data"][0]["customdata"] == [
        ["4, 0.1<br>mean, median 0.5000 ± 0.0000", "4, 0.2<br>median 0.6000 ± 0.0000"]
    ]
    value = find(charts["heat-map-chart"], value="Final test accuracy", axis2="1", axis3="1")
    assert value["data"][0]["z"] == [[pytest.approx(0.7), pytest.approx(0.8)]]
    assert best["layout"]["coloraxis"]["cmax"] == value["layout"]["coloraxis"]["cmax"] == pytest.approx(0.8)
    assert [name for name, _ in context["heat_axes"]] == ["workers", "learning rate", "rule", "attack"]


def test_the_number_is_drawn_against_each_axis_of_three_or_more_numbers_and_a_menu_chooses_one(tmp_path):
    axes = {"aggregate.rule": ["mean", "krum"], "attack.scale": [10, 0.5, 2], "workers": [2, 3, 4], "seed": [0, 1]}
    final = {("mean", 0.5): 0.8, ("mean", 2): 0.6, ("mean", 10): 0.2, ("krum", 0.5): 0.7, ("krum", 10): 0.7}

    def make(path, point):
        if accuracy := final.get((point["aggregate.rule"], point["attack.scale"])):
            invent_run(path, [accuracy + point["seed"] / 10])

    context, charts = comparison_page(read_records(write_points(tmp_path / "comparison", axes, make)))
    of_scale, of_workers = charts["values-chart"]
    assert [of_scale["when"], of_workers["when"]] == [{"against": "attack.scale"}, {"against": "workers"}]
    assert lines_of(of_scale)["mean · 2"] == [(0.5, 0.85), (2.0, 0.65), (10.0, 0.25)]
    assert lines_of(of_scale)["krum · 2"] == [(0.5, 0.75), (10.0, 0.75)]  # no runs of scale 2
    assert lines_of(of_workers)["mean · 0.5"] == [(2.0, 0.85), (3.0, 0.85), (4.0, 0.85)]
    assert [trace["y"] for trace in spread_of(of_scale)[:2]] == [[0.8, 0.6, 0.2], [0.9, 0.7, 0.3]]
    assert of_scale["data"][-1]["meta"] == {"axis0": "1", "axis2": "2"}
    assert (of_scale["layout"]["xaxis"]["type"], of_scale["layout"]["xaxis"]["tickvals"]) == ("log", [10, 0.5, 2])
    assert of_workers["layout"]["xaxis"]["type"] == "linear"
    assert context["against"] == [("attack.scale", "attack scale", True), ("workers", "workers", False)]
    assert context["value_menus"] == [(0, False), (1, False), (2, True)]


def test_a_partition_without_classes_has_only_the_samples_of_each_worker():
    (bars,) = partition_heat_map(StoredPartition(counts=[[3], [5]]))["data"]
    assert (bars["type"], bars["x"], bars["y"]) == ("bar", ["0", "1"], [3, 5])


def test_asynchronous_runs_have_no_section_of_weights(tmp_path):
    folder = invent_run(tmp_path / "run", [0.5, 0.6])
    assert run_page(read_records(folder))[0]["weights_note"]
    add_to_rounds(folder, on_the_clock(1.0))
    assert run_page(read_records(folder))[0]["weights_note"] is None


@pytest.mark.parametrize("theme", TEMPLATES)
def test_text_is_readable_on_every_colour_of_a_heat_map(theme):
    layout = TEMPLATES[theme]["layout"]
    places, colors = zip(*layout["coloraxis"]["colorscale"], strict=True)
    channels = np.array([to_rgb(color) for color in colors]).T
    text = TEMPLATES[theme]["data"]["heatmap"][0]["textfont"]["color"]
    for place in np.linspace(0, 1, 101):
        assert contrast(text, tuple(np.interp(place, places, channel) for channel in channels)) >= READABLE
