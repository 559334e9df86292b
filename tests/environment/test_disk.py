from __future__ import annotations

import errno
import io
import json
import re
import resource
import shutil

import pytest

import fedsim
from fedsim.callbacks import records
from fedsim.callbacks.loggers import scalars
from fedsim.comparison.folder import read_history
from fedsim.errors import RecordError
from fedsim.loggers import LoggedRun, tensorboard
from fedsim.system import files
from fedsim.system.files import append_atomically, require_space
from tests.environment.confined import QUICK, limited, outcomes

NO_CURVE = ["records.curve=false"]
NO_MODEL = ["records.model=false", *NO_CURVE]


FULL = {  # size of the disk, and a command that writes to a folder of this name
    "metrics": ("28k", ["run", *QUICK, *NO_MODEL, "rounds=200", "--out"]),
    "model": ("24k", ["run", *QUICK, "rounds=100000", "--out"]),
    "curve": ("52k", ["run", *QUICK, "rounds=2", "--out"]),
    "comparison": ("60k", ["compare", *QUICK, *NO_MODEL, "rounds=20", "seed=0,1,2,3", "--jobs", "1", "--out"]),
}
TWO = [*QUICK, "rounds=2"]
READ_ONLY = {  # commands, and the beginnings of their errors
    ("run", *TWO, "--out", "new"): "new: cannot be a run folder: ",
    ("run", *TWO, "--out", "empty"): "empty/experiment.toml: cannot be written: ",
    ("compare", *TWO, "seed=0,1", "--out", "comparison"): "comparison: cannot be the folder of a comparison: ",
    ("report", "run"): "run/report.html: cannot be written: ",
}
WRITTEN_LAST = {"metrics": "metrics.jsonl", "curve": "curve.png", "report": "report.html"}


@pytest.fixture(scope="module")
def confined(tmp_path_factory):
    """Return a folder with the files on full disks, and the outcomes by name of the full or read-only disk."""
    folder = tmp_path_factory.mktemp("confined")
    place, made = folder / "place", folder / "made"
    tables = {"engine": "serial", "model": "logistic", "data": "tests.components:tiny", "rounds": 2}
    fedsim.run({**tables, "records": {"model": False, "curve": False}}, made)
    mounts = [(folder / name, f"size={size}") for name, (size, _) in FULL.items()]
    full = [[*words, folder / name / "x"] for name, (_, words) in FULL.items()]
    copies = "; ".join(f"cp -r {folder / name} {folder}/kept" for name in FULL)
    commands = [
        *full,
        ["report", folder / "metrics" / "x"],
        f"mkdir {folder}/kept; {copies}",
        f"cp -r {made} {place}/run; mkdir {place}/empty; mount -o remount,ro {place}",
        *([*words[:-1], place / words[-1]] for words in READ_ONLY),
        "mount -t tmpfs -o size=4k none /proc",
        ["run", *QUICK, *NO_MODEL, "rounds=1", "--out", folder / "without_proc"],
    ]
    results = outcomes(*commands, mounts=[*mounts, (place, "size=1m")], cwd=folder)
    return folder, dict(zip([*FULL, "report", *READ_ONLY, "proc"], results, strict=True))


def test_a_full_disk_is_one_line_and_keeps_the_records(confined, tmp_path):
    folder, results = confined
    copies, remedy = folder / "kept", "free some space, or choose another folder with --out\n"
    full = r"cannot be written: No space left on device: [\d.]+ k?B are free, but [\d.]+ [kM]?B are needed; "
    lines = {name: rf"/{file}: {full}" for name, file in WRITTEN_LAST.items()}
    lines["model"] = r": only [\d.]+ kB are free, but the folder of this run needs [\d.]+ kB; "
    for name, line in lines.items():
        code, out, error = results[name]
        assert code == 2, code
        assert re.fullmatch(rf"error: \S+/x{line}{remedy}", error), error
    assert "    1 " not in results["model"][1], "the error comes before the first of 100,000 rounds"
    assert list((copies / "model").iterdir()) == [], "a run that never started leaves no files"
    assert (copies / "curve" / "x" / "model.safetensors").is_file(), "the model is written before the picture"
    text = (copies / "metrics" / "x" / "metrics.jsonl").read_text()
    rounds = [json.loads(line)["round"] for line in text.splitlines()]  # fails unless every line is complete
    assert rounds == list(range(1, len(rounds) + 1)), "earlier records are complete"
    assert 1 < len(rounds) < 200
    assert text.endswith("\n")
    assert not list((copies / "metrics" / "x").glob(".*.part"))
    assert f"{len(rounds)} of 200 rounds are in" in results["metrics"][1]

    code, out, error = results["comparison"]
    assert code in (1, 2)
    assert "No space left on device" in error
    assert "Traceback" not in error
    finished = [each.name for each in (copies / "comparison" / "x" / "runs").iterdir() if len(read_history(each)) == 20]
    assert finished, out
    _goes_on_where_there_is_room(copies / "comparison" / "x", tmp_path / "larger", finished)


def _goes_on_where_there_is_room(plan, folder, finished):
    shutil.copytree(plan, folder)
    before = {name: (folder / "runs" / name / "metrics.jsonl").read_bytes() for name in finished}
    tables = fedsim.load_experiment(None, [*QUICK, *NO_MODEL, "rounds=20"]).resolved()
    comparison = fedsim.compare({**tables, "workers": 3}, {"seed": [0, 1, 2, 3]}, folder, jobs=1)
    assert not comparison.failed
    assert {name: (folder / "runs" / name / "metrics.jsonl").read_bytes() for name in finished} == before


def test_a_folder_that_can_only_be_read_is_one_line_that_says_so(confined):
    folder, results = confined
    remedy = "Read-only file system; make the folder writable, or choose another folder with --out\n"
    for words, start in READ_ONLY.items():
        code, _, error = results[words]
        assert (code, error) == (2, f"error: {folder}/place/{start}{remedy}")


def test_a_system_without_proc_runs_experiments(confined):
    code, _, error = confined[1]["proc"]
    assert (code, error) == (0, "")


def test_a_file_that_may_not_grow_further_keeps_its_whole_lines(tiny_experiment, tmp_path):
    tables = {**tiny_experiment, "model": "logistic", "rounds": 1000, "records": {"model": False, "curve": False}}
    message = r"run/metrics.jsonl: cannot be written: File too large; files may have at most 4.1 kB \(ulimit -f .*\)"
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
    with board(tmp_path / "file") as log, pytest.raises(RecordError, match=r"events\.out\..*Not a directory; a file"):
        log(1, numbers)
    with limited(resource.RLIMIT_FSIZE, 100), board(tmp_path) as log:
        with pytest.raises(RecordError, match=r"events\.out\..*: File too large"):
            log(1, numbers)
        assert [path.stat().st_size < 100 for path in tmp_path.glob("events*")] == [True]


@pytest.mark.parametrize(
    "tables",
    [
        {"server": "adam"},
        {"local": "scaffold"},
        {"policy": "fedbuff", "mode": "clock"},
        {"policy": "hogwild", "mode": "race", "race": {"runs": 3}, "engine": "processes", "processes": 1},
    ],
)
def test_the_space_of_all_checkpoints_is_asked_for(tables, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(records, "require_space", lambda folder, needed, purpose: asked.append(needed))
    once = {"rounds": 1, "records": {"model": False, "curve": False}, "checkpoint": {"every": 1, "keep": 1}}
    data = {"data": "tests.components:tiny", "workers": 3, "model": "logistic", "engine": "serial"}
    fedsim.run({**data, **once, **tables}, tmp_path / "run")
    (stored,) = (tmp_path / "run" / "checkpoints").glob("*.safetensors")
    assert asked[0] / 2 < stored.stat().st_size < asked[0] / 2 + 10_000, "the newest is written beside the oldest"


def test_a_lack_of_space_is_reported_with_both_sizes(tmp_path, monkeypatch):
    require_space(tmp_path / "not" / "there" / "yet", 10, "this")
    with pytest.raises(RecordError, match=rf"^{tmp_path}: .* are free, but this needs 1e\+03 PB; free some space, or"):
        require_space(tmp_path, 10**18, "this")
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 0))
    require_space(tmp_path, 10**18, "this")
