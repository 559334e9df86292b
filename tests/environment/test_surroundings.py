from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import fedsim
from fedsim.comparison.folder import read_history
from fedsim.data.sources import default_root
from tests.commands import start_python
from tests.environment.confined import QUICK

RUN = ["-m", "fedsim", "run", *QUICK, "rounds=2"]
NO_PICTURES = ["records.curve=false", "records.model=false"]


@pytest.mark.slow
def test_odd_surroundings_change_nothing(tmp_path):
    """No home folder, an empty PATH, a missing TMPDIR, an impossible time zone, LaTeX, ASCII, no columns."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True")
    ascii_only = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    programs = {
        "bare": start_python(
            *RUN, "--out", "bare", cwd=tmp_path, HOME="/dev/null", PATH="", TMPDIR="/none", TZ="XYZ99"
        ),
        "ascii": start_python(
            *["-m", "fedsim", "compare", *QUICK, "rounds=1", *NO_PICTURES, "seed=0,1", "--jobs", "1", "--out", "grün"],
            cwd=tmp_path,
            COLUMNS="0",
            **ascii_only,
        ),
        "help": start_python("-m", "fedsim", "run", "--help", cwd=tmp_path, COLUMNS="0", **ascii_only),
    }
    unknown_backend = start_python(*RUN, "--out", "backend", cwd=tmp_path, MPLBACKEND="foo")
    lines = unknown_backend.communicate(timeout=120)[1].splitlines()
    assert [line.partition(": ValueError")[0] for line in lines] == ["error: matplotlib cannot be imported"]
    outputs = {name: (*program.communicate(timeout=120), program.returncode) for name, program in programs.items()}
    for out, error, code in outputs.values():
        assert code == 0, error
        assert "Traceback" not in error
        assert out
    assert outputs["ascii"][1] == outputs["help"][1] == ""
    assert outputs["ascii"][0].endswith("gr\\xfcn\n")
    assert (tmp_path / "grün" / "summary.txt").is_file()
    environment = json.loads((tmp_path / "bare" / "environment.json").read_text())
    assert environment["git_commit"] is None
    assert (tmp_path / "bare" / "curve.png").is_file()


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
@pytest.mark.parametrize(
    "closed", ["<&- >&- 2>&-", *(pytest.param(each, marks=pytest.mark.slow) for each in (">&-", "2>&-"))]
)
def test_closed_streams_change_nothing(closed, tmp_path):
    words = f"{sys.executable} {' '.join(RUN)} {' '.join(NO_PICTURES)} --out x {closed}"
    program = start_python("-c", "import os, sys; os.execv('/bin/sh', ['sh', '-c', sys.argv[1]])", words, cwd=tmp_path)
    _, error = program.communicate(timeout=120)
    assert (program.returncode, error) == (0, "")
    assert len(read_history(tmp_path / "x")) == (tmp_path / "x" / "metrics.jsonl").read_text().count("\n") == 2


def test_a_user_without_a_home_folder_can_load_data(monkeypatch):
    for name in ("HOME", "FEDSIM_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    with pytest.raises(RuntimeError):
        Path.home()
    assert default_root() == Path(".cache/fedsim/data")
    assert len(fedsim.load_dataset("mnist5k")[0]) == 4000


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["does/not/exist", "x" * 120])
def test_processes_need_no_temporary_folder(folder, tmp_path):
    if len(folder) > 100:  # too long for a socket name
        (tmp_path / folder).mkdir()
    words = (
        "engine=processes",
        "processes=1",
        "data=tests.components:tiny",
        "model=logistic",
        "rounds=1",
        "--out",
        "run",
    )
    process = start_python("-m", "fedsim", "run", *words, cwd=tmp_path, TMPDIR=str(tmp_path / folder))
    _, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (0, "")
