from __future__ import annotations

import gc
import json
import os
import resource

import pytest
import torch

import fedsim
from fedsim.errors import ExperimentError
from fedsim.processes.shared_memory import memory_file, share
from fedsim.system import devices
from tests.environment.confined import QUICK, limited, outcomes

STORED = {"model": "logistic", "aggregate": "median"}  # the rule needs all updates at once
needs_files_in_memory = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memory files")


@pytest.mark.slow
@needs_files_in_memory
def test_a_full_shared_memory_folder_changes_nothing(tmp_path):
    """/dev/shm has 4 kB and is read-only. The results equal those of a run that shares nothing."""
    words = [*QUICK, "rounds=2", "records.curve=false"]
    commands = [
        ["run", *words, "--out", "one"],
        ["run", *words, "engine=processes", "processes=2", "--out", "two"],
        ["run", *words, "engine=batched", "processes=2", "--out", "stacked"],
        ["run", *words, "engine=processes", "processes=1", "mode=race", "policy=hogwild", "--out", "race"],
    ]
    shm = devices.SHARED_MEMORY
    results = outcomes(*commands, mounts=[(shm, "ro,size=4k")], cwd=tmp_path)
    assert [(code, error) for code, _, error in results] == [(0, "")] * 4
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert models[0] == models[1]
    environment = json.loads((tmp_path / "two" / "environment.json").read_text())
    assert environment["processes"] == 2


@needs_files_in_memory
def test_what_is_shared_keeps_its_values_views_and_order(tmp_path):
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    rows, second_row, flags, empty = base[:, :5], base[1], torch.tensor([True, False, True]), torch.zeros(0, 7)
    original = base.clone()
    share(each for each in (rows, second_row, flags, empty, rows))
    assert torch.equal(rows, original[:, :5])
    assert rows.stride() == (6, 1)
    assert flags.tolist() == [True, False, True]
    assert empty.shape == (0, 7)
    assert rows.is_shared()
    assert flags.is_shared()
    rows[1, 0] = -1.0
    assert second_row[0] == -1.0, "views of the same storage still share it"
    assert base[1, 0] == 6.0, "tensors that were not passed are not moved"
    assert rows._base.is_shared(), "the base of a view would keep the old memory"
    assert all(each.data_ptr() % 64 == 0 for each in (rows, flags))
    place = rows.data_ptr()
    share([rows])
    assert rows.data_ptr() == place, "shared tensors are not moved again"


@needs_files_in_memory
def test_all_that_is_shared_together_takes_one_file():
    gc.collect()  # closes the files of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    tensors = [torch.zeros(10) for _ in range(30)]
    share(tensors)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del tensors
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_files_in_memory_shared_memory_is_asked_for_its_room(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert memory_file(10) is None
    tensor = torch.arange(3)
    share([tensor])
    assert tensor.is_shared()
    assert tensor.tolist() == [0, 1, 2]
    monkeypatch.setattr(devices, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(devices.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 65_536})())
    message = (
        r"shared memory: this run needs 80 kB in .*, but only 65.5 kB are free; enlarge it \(mount .* --shm-size=...\)"
    )
    with pytest.raises(ExperimentError, match=message):
        share([torch.zeros(10_000, dtype=torch.double)])
    monkeypatch.setattr(devices, "SHARED_MEMORY", tmp_path / "not here")
    devices.require_shared_memory(10**18)


def test_a_filter_of_system_calls_is_not_an_error(monkeypatch):
    def refused(name):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refused, raising=False)
    assert memory_file(10) is None


@needs_files_in_memory
def test_a_failed_allocation_gives_a_one_line_error():
    with limited(resource.RLIMIT_FSIZE, 4096):
        message = r"shared memory: 40 kB cannot be allocated: File too large; files may have at most 4.1 kB \(ulimit -f"
        with pytest.raises(ExperimentError, match=message):
            share([torch.zeros(10_000)])
    with limited(resource.RLIMIT_AS, _address_space() + 2**28):
        problem = r"memory: one model for each of 100000 workers takes 3.14 GB; .* of address space .*"
        message = problem + "; use a smaller cohort, or aggregate.rule=weighted_mean, because .* at once$"
        with pytest.raises(ExperimentError, match=message) as caught:
            fedsim.run({"workers": 100_000, **STORED, "partition": "tests.components:some", "engine": "serial"})
        assert "\n" not in str(caught.value)


def _address_space():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def test_shared_memory_beyond_the_free_memory_is_refused(tmp_path, monkeypatch):
    machine = tmp_path / "meminfo"
    machine.write_text("MemAvailable: 30 kB\n")
    monkeypatch.setattr(devices, "MEMORY", machine)
    message = r"memory: shared memory of the processes takes 40 kB, but only 30.7 kB are free; .*engine=serial"
    with pytest.raises(ExperimentError, match=message):
        share([torch.zeros(10_000)])
