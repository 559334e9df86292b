from __future__ import annotations

import json

import pytest

from fedsim.errors import RecordError
from fedsim.report.figures import byzantine_weight, partition_picture, run_curves, scales_of, weights_picture
from fedsim.report.grid_page import grid_context
from fedsim.report.reading import Partition, read_records
from fedsim.report.run_page import rounds_table, run_context
from tests.report.folders import add_to_rounds, invent_run, on_the_clock, write_points


def run_with(folder, weights, byzantine=(), rounds=1):
    """A run whose rounds have these {worker: weight}, or {worker: "out"}."""
    invent_run(folder, [0.5] * len(weights), rounds=rounds)
    lines = []
    for number, record in enumerate(weights, start=1):
        excluded = [worker for worker, weight in record.items() if weight == "out"]
        coefficients = [0.0 if worker in excluded else weight for worker, weight in record.items()]
        lines.append({"round": number, "cohort": list(record), "coefficients": coefficients, "excluded": excluded})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "partition.json").write_text(json.dumps({"byzantine": list(byzantine)}))
    return read_records(folder)


def test_a_cell_for_every_worker_and_round(tmp_path):
    run = run_with(tmp_path / "run", [{0: 0.5, 7: 0.5}, {3: 1.0, 7: "out"}], byzantine=[7, 9])
    assert weights_picture(run) == {
        "rounds": [1, 2],
        "per_column": 1,
        "workers": [0, 3, 7],
        "byzantine": [7],
        "weights": [[0.5, None], [None, 1.0], [0.5, 0.0]],
        "excluded": [[2, 1]],
    }


def test_many_rounds_share_columns(tmp_path):
    run = run_with(tmp_path / "run", [{0: 0.2}, {0: 0.4}, {0: "out"}, {0: 0.6}, {1: 1.0}])
    picture = weights_picture(run, columns=3)
    assert (picture["rounds"], picture["per_column"]) == ([1, 3, 5], 2)
    assert picture["weights"] == [[pytest.approx(0.3), pytest.approx(0.3), None], [None, None, 1.0]]
    assert picture["excluded"] == [[0, 1]]  # in one round of two


def test_no_picture_without_a_record_of_weights(fresh_run):
    assert weights_picture(read_records(fresh_run)) is None


def test_the_share_of_byzantine_workers(tmp_path):
    run = run_with(tmp_path / "run", [{0: 0.5, 1: -0.5}, {0: 0.75, 1: 0.25}, {0: 0.0, 1: 0.0}], byzantine=[1])
    assert byzantine_weight(run) == pytest.approx((0.5 + 0.25) / 2)  # where there is no weight there is no share


def test_the_curves_are_those_of_the_files(run_folder):
    curves = run_curves(read_records(run_folder))
    records = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    by_label = {choice["label"]: {s["name"]: s["values"] for s in choice["series"]} for choice in curves["metrics"]}
    assert by_label["Test accuracy"] == {"test accuracy": [record["test_accuracy"] for record in records]}
    assert set(by_label["Test and train loss"]) == {"test loss", "train loss"}
    assert by_label["Test loss"]["test loss"] == pytest.approx([r["test_loss"] for r in records], rel=1e-5)
    assert set(by_label["Seconds"]) == {"seconds", "pull down", "train", "aggregate", "test"}
    assert by_label["Seconds"]["seconds"] == pytest.approx([sum(r["seconds"].values()) for r in records], rel=1e-5)
    assert by_label["Bytes"]["bytes"] == [record["bytes_up"] + record["bytes_down"] for record in records]
    assert by_label["Attack success"] == {"attack success": [0.25] * len(records)}
    assert curves["rounds"] is None


def test_the_table_stays_of_a_size_that_can_be_read(tmp_path):
    table = rounds_table(read_records(invent_run(tmp_path / "run", [0.5] * 2500)))
    assert table["every"] == 3
    assert len(table["rows"]) <= 1001
    assert [row[0] for row in table["rows"][:2]] == ["1", "4"]
    assert table["rows"][-1][0] == "2500"
    short = rounds_table(read_records(invent_run(tmp_path / "short", [0.5] * 1000)))
    assert [row[0] for row in short["rows"]] == [str(number) for number in range(1, 1001)]


def test_one_round_is_enough(tmp_path):
    context, data = run_context(read_records(invent_run(tmp_path / "run", [0.5])))
    assert len(context["table"]["rows"]) == 1
    assert data["weights"] is None


def test_runs_that_are_not_finished_are_named(tmp_path):
    def make(path, point):
        if point["x"] != "c":
            invent_run(path, [0.5], rounds=4 if point["x"] == "b" else 1)
        if point["x"] == "d":
            (path / "error.txt").write_text("worker 1 failed\nTraceback\n")

    grid = read_records(write_points(tmp_path / "grid", {"x": ["a", "b", "c", "d"]}, make))
    context, data = grid_context(grid)
    assert context["unfinished"] == [
        ("run1", "1 of 4 rounds"),
        ("run2", "not begun"),
        ("run3", "failed: worker 1 failed"),
    ]
    assert [row["seeds"] for row in context["table"]["rows"]] == ["1", "0 of 1", "0 of 1", "0 of 1"]
    assert len(data["curves"]) == 3


def test_settings_that_runs_share_are_those_of_the_base(grid_folder):
    context, _ = grid_context(read_records(grid_folder))
    shared = dict(context["settings"])
    assert shared["model.name"] == "logistic"
    assert not {"aggregate.rule", "local.lr", "seed"} & set(shared)


def test_runs_share_the_picture_of_a_partition(grid_folder):
    _, data = grid_context(read_records(grid_folder))
    assert len(data["runs"]) == 12
    assert len(data["partitions"]) == 2  # with a Byzantine worker, and without


def test_of_a_sample_of_a_population_the_picture_says_which_workers_it_shows():
    partition = Partition(counts=[[1, 2], [3, 4]], workers=[70, 9000], population=10**6, byzantine=[1, 70, 8000])
    assert partition_picture(partition) == {
        "counts": [[1, 2], [3, 4]],
        "byzantine": [70],
        "workers": [70, 9000],
        "population": 10**6,
    }


def test_a_run_on_the_clock_has_its_scales_metrics_tiles_and_columns(tmp_path):
    folder = invent_run(tmp_path / "run", [0.5, 0.7, 0.6], mode="clock", policy="asgd", aggregate="mean")
    add_to_rounds(folder, on_the_clock(2.5))
    context, data = run_context(read_records(folder))
    assert data["curves"]["scales"] == [
        {"label": "virtual seconds", "opens": True, "values": [2.5, 5.0, 7.5]},
        {"label": "updates", "opens": False, "values": [2, 4, 6]},
        {"label": "trips", "opens": False, "values": [4, 8, 12]},
    ]
    metrics = {choice["label"]: choice["series"][0]["values"] for choice in data["curves"]["metrics"]}
    assert metrics["Mean staleness"] == [1.5] * 3
    assert (metrics["Virtual seconds"], metrics["Updates"]) == ([2.5, 5.0, 7.5], [2, 4, 6])
    assert ("virtual time", "7.5 s", "2.5 s a round") in context["tiles"]
    assert ("updates", "6", "mean staleness 1.5") in context["tiles"]
    assert {("mode", "clock"), ("policy", "asgd")} <= set(context["facts"])
    assert "rule" not in dict(context["facts"]), "it has no part in that"
    assert {"virtual s", "updates", "staleness"} <= set(context["table"]["head"])


def test_old_and_synchronous_folders_have_rounds_alone(fresh_run, run_folder):
    for folder in (fresh_run, run_folder):
        run = read_records(folder)
        assert scales_of([run]) == []
        context, data = run_context(run)
        assert data["curves"]["scales"] == []
        assert not context["scales"]
        assert not {"virtual time", "updates"} & {word for word, *_ in context["tiles"]}
        assert not {"mode", "policy"} & {word for word, _ in context["facts"]}
        assert not {"Virtual seconds", "Updates", "Mean staleness"} & {m["label"] for m in data["curves"]["metrics"]}


def timed_grid(folder):
    """Two variants and two seeds: "sync" tests at 10, 20, 30 s, "asgd" at 1, 2, 3 s (seed 0) or 2, 4, 6 s (seed 1)."""

    def make(path, point):
        if point["variant"]["label"] == "sync":
            invent_run(path, [0.2, 0.9, 0.95], mode="clock")
            add_to_rounds(path, lambda record: {"virtual_seconds": 10.0 * record["round"], "samples": [4, 4]})
        else:
            invent_run(path, [0.3, 0.5, 0.9 if point["seed"] else 0.6], mode="clock", policy="asgd")
            add_to_rounds(path, on_the_clock(1.0 + point["seed"]))

    variants = [{"label": "sync"}, {"label": "asgd", "policy": "asgd"}]
    write_points(folder, {"variant": variants, "seed": [0, 1]}, make)
    held = json.loads((folder / "grid.json").read_text())
    (folder / "grid.json").write_text(json.dumps({**held, "target": 0.9}))
    return folder


def test_a_grid_on_the_clock_says_what_the_target_took(tmp_path):
    context, data = grid_context(read_records(timed_grid(tmp_path / "grid")))
    assert [scale["label"] for scale in data["scales"]] == ["virtual seconds", "updates", "trips"]
    assert data["curves"][0]["scales"] == [[10.0, 20.0, 30.0], [1, 2, 3], [2, 4, 6]]
    assert data["axes"] == [{"name": "variant", "values": ["sync", "asgd"]}]
    sync, asgd = (row["line"] for row in context["table"]["rows"])
    assert (sync.to_target.reached, sync.to_target.virtual_seconds.mean, sync.to_target.trips.mean) == (2, 20.0, 4)
    assert (asgd.to_target.reached, asgd.to_target.virtual_seconds.mean, asgd.to_target.updates.mean) == (1, 6.0, 6)
    assert (sync.virtual_seconds.mean, asgd.virtual_seconds.mean) == (30.0, 4.5)
    assert context["target"] == "90 %"


def test_staleness_that_is_none_is_one_clear_line(fresh_run):
    add_to_rounds(fresh_run, on_the_clock(1.0, staleness={"-1": 2}))
    with pytest.raises(RecordError, match=r"metrics.jsonl line 1: asynchronous.staleness.-1"):
        read_records(fresh_run)
