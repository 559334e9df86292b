"""`fedsim doctor`: what it reports, and the problems that it detects."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

import fedsim
from fedsim.cli import checkup
from fedsim.data import images
from fedsim.engines import engine
from fedsim.errors import ExperimentError
from fedsim.system import devices, limits
from fedsim.system.packages import EXTRAS
from fedsim.toml import tomllib
from tests.commands import ROOT, start_python


def test_the_report_fits_a_screen_and_says_what_each_engine_would_do(cli):
    done = cli("doctor")
    assert done.exit_code == 0, done.output
    assert len(done.stdout.splitlines()) < 30
    for registration in engine:
        assert (f"\nengine={registration.name} " in done.stdout) == (not registration.target.traits.ranks)
    assert re.search(r"^engine=serial +1 process, one worker at a time$", done.stdout, re.M)


def test_auto_chooses_what_a_run_chooses(session, tmp_path):
    lines = {finding.about: finding.found for finding in checkup.findings()}
    stop = {"stop": {"metric": "test_accuracy", "target": 0.01}, "records": {"figures": []}}
    fedsim.run({"rounds": 10, **stop}, tmp_path / "x", session=session)
    chosen = json.loads((tmp_path / "x" / "environment.json").read_text())["reason"]
    assert lines["engine=auto"].endswith(f"because {chosen}")


def problems_of(look):
    return [f"{problem}: {do}" for problem, do in look().problems]


def test_too_few_open_files_are_a_problem_with_the_number_that_is_needed(monkeypatch):
    monkeypatch.setattr(limits, "limits_of_files", lambda: (20, 20))
    monkeypatch.setattr(devices, "usable_cores", lambda: 64)
    [problem] = problems_of(checkup._open_files)
    assert re.search(r"64 processes need about (\d{3}) open files: run ulimit -n \1", problem)


def test_little_shared_memory_is_a_problem_only_where_it_is_used(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(checkup, "SHARED_BYTES", float("inf"))
    assert problems_of(checkup._shared_memory) == []
    monkeypatch.setattr(checkup, "memory_file", lambda nbytes: None)
    assert "--shm-size" in problems_of(checkup._shared_memory)[0]


def test_a_torchvision_that_cannot_be_imported_is_a_problem(monkeypatch):
    assert problems_of(checkup._torchvision) == []
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    [problem] = problems_of(checkup._torchvision)
    assert "import torchvision fails" in problem
    assert problem.endswith(": pip install --upgrade torch torchvision")


def test_an_nvidia_gpu_that_pytorch_cannot_use_is_a_problem(monkeypatch, tmp_path):
    monkeypatch.setattr(checkup.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(checkup.torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(devices, "PCI", tmp_path)
    assert problems_of(checkup._gpu) == []
    for folder, vendor, kind in (("0", "0x8086", "0x030000"), ("1", "0x10de", "0x020000"), ("2", "0x10de", "0x030200")):
        assert problems_of(checkup._gpu) == []
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "vendor").write_text(f"{vendor}\n")
        (tmp_path / folder / "class").write_text(f"{kind}\n")
    [problem] = problems_of(checkup._gpu)
    assert "CUDA" in problem


def test_little_memory_and_a_folder_that_cannot_be_written_are_problems(monkeypatch):
    monkeypatch.setattr(devices, "free_memory", lambda: 1e8)
    assert len(problems_of(checkup._memory)) == 1
    assert (
        "; more than 1.07 GB of updates are summed in several parts, unless a rule needs all" in checkup._memory().found
    )
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert len(problems_of(checkup._folder)) == 1


def test_data_sets_that_cannot_be_downloaded_are_a_problem(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path / "absent"))
    assert problems_of(checkup._data) == []
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert "set FEDSIM_DATA" in problems_of(checkup._data)[0]
    monkeypatch.setattr(checkup, "lacks_files", lambda name, root: False)
    assert problems_of(checkup._data) == []
    assert set(images.CLASS_NAMES) == set(re.findall(r"(\w+) is there", checkup._data().found))


def test_a_default_experiment_that_cannot_run_is_exit_code_1(cli, monkeypatch):
    def refuse(*_):
        raise ExperimentError("model: no")

    monkeypatch.setattr(checkup, "begun", refuse)
    done = cli("doctor")
    assert done.exit_code == 1
    assert "problem: the default experiment cannot run: model: no\n     do: " in done.stdout


def test_without_pytorch_the_report_says_so(tmp_path):
    code = "import sys; sys.modules['torch'] = None; from fedsim.__main__ import main; main()"
    process = start_python("-c", code, "doctor", cwd=tmp_path)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (1, "")
    assert "problem: fedsim cannot be imported: ModuleNotFoundError: " in out


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_packages_of_an_extra_are_those_that_pip_installs(extra):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = [re.match(r"[\w-]+", each)[0] for each in project["optional-dependencies"][extra]]
    assert tuple(packages) == EXTRAS[extra]
