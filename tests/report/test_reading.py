from __future__ import annotations

import json
import shutil

import pytest

from fedsim.comparison.results import Comparison, read_records
from fedsim.errors import ExperimentError, RecordError
from fedsim.records.reader import Run
from tests.report.folders import ROUNDS, WORKERS, invent_run, write_points


def test_a_run_is_read_as_it_was_written(run_folder):
    run = read_records(run_folder)
    assert isinstance(run, Run)
    assert run.name == "tried"
    assert [record.round for record in run.history] == list(range(1, ROUNDS + 1))
    last = json.loads((run_folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert run.history[-1] == {**run.history[-1], **last}
    assert run.finished
    assert not run.torn
    assert run.byzantine == {1}
    assert len(run.partition.counts) == WORKERS
    assert run.environment["device"] == "cpu"


def test_optional_files_may_be_missing(fresh_run):
    (fresh_run / "experiment.toml").unlink()
    (fresh_run / "environment.json").unlink()
    run = read_records(fresh_run)
    assert run.name == fresh_run.name
    assert (run.experiment, run.environment, run.partition.counts) == ({}, {}, [])


@pytest.mark.parametrize("cut", [b'{"round": 4, "test_lo', b'{"round": 4, "name": "\xc3', b"{\n", b"\x00\x00"])
def test_an_incomplete_last_line_is_left_out_and_reported(fresh_run, cut):
    with (fresh_run / "metrics.jsonl").open("ab") as file:
        file.write(cut)
    run = read_records(fresh_run)
    assert len(run.history) == 3
    assert run.torn


def test_numbers_that_are_not_finite_become_none_and_unknown_keys_are_ignored(fresh_run):
    with (fresh_run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "test_loss": NaN, "train_loss": 1e999, "test_accuracy": null, "unknown": [1]}\n')
    last = read_records(fresh_run).history[-1]
    assert (last.test_loss, last.train_loss, last.test_accuracy) == (None, None, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"round": 1\n{"round": 2}', r"metrics\.jsonl line 4: is damaged: .*JSON"),
        ('{"test_loss": 1}', r"metrics\.jsonl line 4: is damaged: round: Field required$"),
        (
            '{"round": 4, "cohort": [-1]}',
            r"metrics\.jsonl line 4: is damaged: cohort\.0: .*greater than or equal to 0$",
        ),
        (
            '{"round": 4, "cohort": [0], "weights": [0.5, 0.5]}',
            r"line 4: is damaged: the number of weights, 2, differs from the size of the cohort, 1$",
        ),
        ('{"round": 4, "seconds": {"\\u001b[2Jx\\n": []}}', r"line 4: is damaged: seconds\.\?\[2Jx\?: .*number$"),
    ],
)
def test_a_damaged_round_raises_an_error_with_its_line(fresh_run, line, message):
    with (fresh_run / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RecordError, match=message) as caught:
        read_records(fresh_run)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("environment.json", "[1]", r"environment\.json: is damaged: it does not contain a JSON object"),
        ("environment.json", "{", r"environment\.json: is damaged: it is not valid JSON"),
        ("environment.json", "[" * 100_000, r"environment\.json: is damaged: it is not valid JSON"),
        ("partition.json", '{"counts": [[1, 2], [3]]}', r"partition\.json: is damaged: the lists in `counts`"),
        (
            "partition.json",
            '{"counts": [[1], [3]], "workers": [7]}',
            r"partition\.json: is damaged: `counts` has lists of 2 workers",
        ),
        ("partition.json", '{"counts": "many"}', r"partition\.json: is damaged: counts: .*array"),
        ("experiment.toml", "rounds =", r"experiment\.toml: cannot be read as TOML"),
        ("metrics.jsonl", "", r"metrics\.jsonl: no round is finished yet"),
    ],
)
def test_a_damaged_file_raises_an_error_with_its_name(fresh_run, name, content, message):
    (fresh_run / name).write_text(content)
    with pytest.raises((RecordError, ExperimentError), match=message):
        read_records(fresh_run)


def test_a_folder_without_a_run_or_a_comparison_raises_an_error(tmp_path):
    with pytest.raises(
        RecordError, match=r"neither a run \(no metrics\.jsonl\) nor a comparison \(no comparison\.json"
    ):
        read_records(tmp_path)
    with pytest.raises(RecordError, match=r"nowhere: no such folder"):
        read_records(tmp_path / "nowhere")


def test_a_comparison_is_read_with_its_runs(comparison_folder):
    plan = read_records(comparison_folder)
    assert isinstance(plan, Comparison)
    assert plan.axes == {"aggregate.rule": ["mean", "weighted_mean"], "local.lr": [0.01, 0.1], "seed": [0, 1, 2]}
    assert len(plan.runs) == 12
    assert all(entry.finished for entry in plan.runs)
    for entry in plan.runs:
        assert entry.experiment["seed"] == plan.axes["seed"][entry.position["seed"]]
        assert entry.experiment["aggregate"]["rule"] == plan.axes["aggregate.rule"][entry.position["aggregate.rule"]]


AXES = {"aggregate": ["mean", ["nnm", "median"], {"rule": "krum", "f": 2}, 1, True], "seed": [0, 1]}


def made_up_comparison(folder, missing=()):
    def make(path, point):
        if path.name not in missing:
            invent_run(path, [0.5])

    return write_points(folder, AXES, make)


def test_axes_take_any_values_and_runs_may_be_missing(tmp_path):
    plan = read_records(made_up_comparison(tmp_path / "comparison", missing=["run3"]))
    assert [entry.position["aggregate"] for entry in plan.runs] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [entry.id for entry in plan.runs if not entry.history] == ["run3"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"folder": "../other"}, r'runs\.1\.folder = "\.\./other": must be inside the comparison\'s folder$'),
        ({"folder": "/etc"}, r'runs\.1\.folder = "/etc": must be inside the comparison\'s folder$'),
        ({"point": {"seed": 0}}, r'runs\.1\.point: is damaged: it has no value .* "aggregate"; restore'),
        ({"point": {"seed": 7, "aggregate": 1}}, r'runs\.1\.point: is damaged: 7 is not among .* "seed"; restore'),
        (
            {"point": {"seed": 0, "aggregate": "mean"}},
            r"runs\.1\.point: another run has the same compared values; remove one of the two runs$",
        ),
        ({"id": None}, r"comparison\.json: is damaged: runs\.1\.id: .*string$"),
        ({"point": {"seed": 0, "aggregate": "\x1b[2J"}}, r"comparison\.json: is damaged: runs.*: .*printable"),
    ],
)
def test_an_inconsistent_comparison_raises_an_error(tmp_path, change, message):
    folder = made_up_comparison(tmp_path / "comparison")
    description = json.loads((folder / "comparison.json").read_text())
    description["runs"][1].update(change)
    (folder / "comparison.json").write_text(json.dumps(description))
    with pytest.raises(RecordError, match=message):
        read_records(folder)


@pytest.mark.parametrize("content", ["", "[]", '{"name": "x", "axes": {"seed": []}, "runs": []}'])
def test_a_damaged_comparison_file_raises_an_error(tmp_path, content):
    (tmp_path / "comparison.json").write_text(content)
    with pytest.raises(RecordError, match=r"comparison\.json: ") as caught:
        read_records(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_comparison_without_a_finished_round_raises_an_error(tmp_path):
    folder = made_up_comparison(tmp_path / "comparison")
    shutil.rmtree(folder / "runs")
    with pytest.raises(RecordError, match=r"none of its 10 runs has finished a round yet"):
        read_records(folder)
