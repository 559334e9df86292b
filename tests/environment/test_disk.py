from __future__ import annotations

import errno
import io
import json
import re
import resource
import shutil

import pytest

import fedsim
from fedsim.callbacks.loggers import scalars
from fedsim.comparison.folder import read_history
from fedsim.errors import RecordError
from fedsim.loggers import LoggedRun, tensorboard
from fedsim.system import files
from fedsim.system.files import append_atomically, require_space
from tests.environment.confined import QUICK, limited, one_line_of_error, outcomes

NO_CURVE = ["records.curve=false"]
NO_MODEL = ["records.model=false", *NO_CURVE]


def test_a_full_disk_is_one_line_and_keeps_the_records(tmp_path):
    run, keep = ["run", *QUICK], tmp_path / "kept"
    small = {name: tmp_path / name for name in ("metrics", "board", "model", "updates", "grid", "curve")}
    commands = [
        [*run, *NO_MODEL, "rounds=200", "--out", small["metrics"] / "run"],
        [*run, *NO_MODEL, "rounds=200", "records.tensorboard=true", "--out", small["board"] / "run"],
        [*run, "rounds=100000", "--out", small["model"] / "run"],
        [*run, *NO_MODEL, "rounds=100000", "records.updates=[1,2]", "--out", small["updates"] / "run"],
        ["compare", *QUICK, *NO_MODEL, "rounds=20", "seed=0,1,2,3", "--jobs", "1", "--out", small["grid"] / "grid"],
        [*run, "rounds=2", "--out", small["curve"] / "run"],
        ["report", small["metrics"] / "run"],
    ]
    sizes = {"metrics": "28k", "board": "40k", "model": "24k", "updates": "24k", "grid": "60k", "curve": "52k"}
    copies = [f"cp -r {folder} {keep / name}" for name, folder in small.items()]
    mounts = [(folder, f"size={sizes[name]}") for name, folder in small.items()]
    found, _ = outcomes(*commands, f"mkdir {keep}", *copies, mounts=mounts, cwd=tmp_path)
    metrics, board, model, updates, grid, curve, report = found
    for code, _, error in (metrics, board, model, updates, curve, report):
        assert code == 2, code
        assert one_line_of_error(error), error
    full = r"cannot be written: No space left on device: [\d.]+ k?B are free there where [\d.]+ [kM]?B are needed; "
    remedy = "make room, or name another place with --out\n"
    assert re.match(rf"error: \S+/run/metrics.jsonl: {full}{remedy}$", metrics[2]), metrics[2]
    assert re.match(rf"error: \S+/run/(metrics.jsonl|events.out.\S+): {full}{remedy}$", board[2]), board[2]
    assert re.match(rf"error: \S+/run/curve.png: {full}{remedy}$", curve[2]), curve[2]
    assert re.match(rf"error: \S+/run/report.html: {full}{remedy}$", report[2]), report[2]
    too_large = rf"error: \S+/run: [\d.]+ kB are free there, and what this run keeps needs [\d.]+ kB; {remedy}$"
    for code_and_texts in (model, updates):  # told before the first of 100,000 rounds
        assert re.match(too_large, code_and_texts[2]), code_and_texts[2]
        assert "    1 " not in code_and_texts[1]

    for name in ("metrics", "board"):
        folder = keep / name / "run"
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        rounds = [json.loads(line)["round"] for line in lines]  # every line is whole
        assert rounds == list(range(1, len(rounds) + 1)), "what was recorded before is there"
        assert 1 < len(rounds) < 200
        assert (folder / "metrics.jsonl").read_text().endswith("\n")
        assert not list(folder.glob(".*.part"))
    assert f"{len(read_history(keep / 'metrics' / 'run'))} of 200 rounds are in" in metrics[1]
    assert (keep / "curve" / "run" / "model.safetensors").is_file(), "the model comes before its picture"
    assert list((keep / "model").iterdir()) == [], "what never began leaves nothing"

    code, out, error = grid
    assert code in (1, 2)
    assert "No space left on device" in error
    assert "Traceback" not in error
    assert json.loads((keep / "grid" / "grid" / "grid.json").read_text())["axes"] == {"seed": [0, 1, 2, 3]}
    finished = [each.name for each in (keep / "grid" / "grid" / "runs").iterdir() if len(read_history(each)) == 20]
    assert finished, out
    _goes_on_where_there_is_room(keep / "grid" / "grid", tmp_path / "larger", finished)


def _goes_on_where_there_is_room(grid, folder, finished):
    shutil.copytree(grid, folder)
    before = {name: (folder / "runs" / name / "metrics.jsonl").read_bytes() for name in finished}
    tables = fedsim.load_experiment(None, [*QUICK, *NO_MODEL, "rounds=20"]).resolved()
    comparison = fedsim.compare({**tables, "workers": 3}, {"seed": [0, 1, 2, 3]}, folder, jobs=1)
    assert not comparison.failed
    assert {name: (folder / "runs" / name / "metrics.jsonl").read_bytes() for name in finished} == before


def test_a_folder_that_can_only_be_read_is_one_line_that_says_so(tiny_experiment, tmp_path):
    place = tmp_path / "place"
    words = {
        "run": ["run", *QUICK, "rounds=2", "--out", place / "new"],
        "empty": ["run", *QUICK, "rounds=2", "--out", place / "empty"],
        "compare": ["compare", *QUICK, "rounds=2", "seed=0,1", "--out", place / "grid"],
        "report": ["report", place / "run"],
    }
    fedsim.run({**tiny_experiment, "records": {"model": False, "curve": False}}, tmp_path / "made")
    prepared = f"cp -r {tmp_path}/made {place}/run; mkdir {place}/empty; mount -o remount,ro {place}"
    found, _ = outcomes(prepared, *words.values(), mounts=[(place, "size=1m")], cwd=tmp_path)
    remedy = "Read-only file system; make the place writable, or name another place with --out\n"
    starts = {
        "run": f"error: {place}/new: cannot be a run folder: ",
        "empty": f"error: {place}/empty/experiment.toml: cannot be written: ",
        "compare": f"error: {place}/grid: cannot be the folder of a comparison: ",
        "report": f"error: {place}/run/report.html: cannot be written: ",
    }
    assert [(code, error) for code, _, error in found] == [(2, start + remedy) for start in starts.values()]


def test_a_file_that_may_not_grow_further_keeps_its_whole_lines(tiny_experiment, tmp_path):
    tables = {**tiny_experiment, "model": "logistic", "rounds": 1000, "records": {"model": False, "curve": False}}
    message = (
        r"run/metrics.jsonl: cannot be written: File too large; a file may have 4.1 kB here \(ulimit -f raises that\)"
    )
    with limited(resource.RLIMIT_FSIZE, 4096), pytest.raises(RecordError, match=f"{message}$"):
        fedsim.run(tables, tmp_path / "run")
    content = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert content.endswith("}\n")
    assert 3000 < len(content) <= 4096
    assert len(read_history(tmp_path / "run")) == content.count("\n")


def test_lines_are_appended_completely_or_not_at_all(tmp_path):
    path = tmp_path / "lines"

    class FillsUp(io.FileIO):
        def write(self, content):
            if len(content) < 6:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(content[:5])

    with FillsUp(path, "xb") as file:
        path.write_bytes(b"before\n")
        file.seek(0, io.SEEK_END)
        with pytest.raises(
            RecordError, match=f"{path}: cannot be written: No space left on device: .* 10 B are needed"
        ):
            append_atomically(file, path, b"123456789\n")
        assert path.read_bytes() == b"before\n"
    with path.open("ab", buffering=0) as file:
        append_atomically(file, path, b"after\n")
    assert path.read_bytes() == b"before\nafter\n"


def test_an_event_file_that_cannot_be_written_is_a_record_error(tiny_experiment, tmp_path):
    numbers = scalars(fedsim.run(tiny_experiment).history[0])
    (tmp_path / "file").write_text("")
    board = lambda folder: tensorboard(LoggedRun("run", "group", {}, "0" * 32, folder=folder))  # noqa: E731
    with (
        board(tmp_path / "file") as log,
        pytest.raises(RecordError, match=r"events\.out\..*Not a directory; a file"),
    ):
        log(1, numbers)
    with limited(resource.RLIMIT_FSIZE, 100), board(tmp_path) as log:
        with pytest.raises(RecordError, match=r"events\.out\..*: File too large"):
            log(1, numbers)
        assert [path.stat().st_size < 100 for path in tmp_path.glob("events*")] == [True]


def test_a_lack_of_space_is_reported_with_both_sizes(tmp_path, monkeypatch):
    require_space(tmp_path / "not" / "there" / "yet", 10, "this")
    with pytest.raises(RecordError, match=rf"^{tmp_path}: .* are free there, and this needs 1e\+03 PB; make room, or"):
        require_space(tmp_path, 10**18, "this")
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 0))
    require_space(tmp_path, 10**18, "this")
