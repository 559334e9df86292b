from __future__ import annotations

import pytest
import torch

from fedsim.errors import ExperimentError
from fedsim.system import devices


def test_the_cpu_is_always_there():
    assert devices.resolve_device("cpu") == torch.device("cpu")
    assert devices.shares_memory(torch.device("cpu"))
    assert devices.describe_device(torch.device("cpu")) == "cpu"


def test_auto_is_the_accelerator_where_there_is_one():
    assert devices.resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["cuda:99", "cupy", "gpu", "mps" if not torch.backends.mps.is_available() else "xpu"])
def test_a_device_that_is_not_there_is_one_clear_line(name):
    with pytest.raises(ExperimentError, match=f'device = "{name}": .*allowed here: auto, cpu'):
        devices.resolve_device(name)


def test_usable_cores_respect_the_containers_quota(tmp_path, monkeypatch):
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for content, cores in (("250000 100000", 2), ("max 100000", 8), ("50000 100000", 1)):
        (tmp_path / "cpu.max").write_text(content)
        monkeypatch.setattr(devices, "CGROUP", tmp_path)
        assert devices.usable_cores() == cores
    monkeypatch.setattr(devices, "CGROUP", tmp_path / "missing")
    assert devices.usable_cores() == 8


def test_the_quota_of_a_job_within_the_container_counts_too(tmp_path, monkeypatch):
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(devices, "CGROUP", tmp_path)
    monkeypatch.setattr(devices, "OWN_CGROUP", tmp_path / "own")
    (tmp_path / "slice" / "job").mkdir(parents=True)
    (tmp_path / "slice" / "cpu.max").write_text("300000 100000\n")
    for own, cores in (("/slice/job", 3), ("/slice", 3), ("/", 8), ("/../elsewhere", 8)):
        (tmp_path / "own").write_text(f"12:cpu:/old\n0::{own}\n")
        assert devices.usable_cores() == cores, own
    (tmp_path / "slice" / "job" / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "own").write_text("0::/slice/job\n")
    assert devices.usable_cores() == 1


def test_processes_by_default_never_exceed_the_cohort_or_the_cores(monkeypatch):
    monkeypatch.setattr(devices, "usable_cores", lambda: 6)
    cpu = torch.device("cpu")
    assert devices.default_processes(cpu, 4, 1) == 4
    assert devices.default_processes(cpu, 100, 1) == 6
    assert devices.default_processes(cpu, 100, 2) == 3
    assert devices.default_processes(cpu, 100, 16) == 1


def test_too_little_shared_memory_is_told_with_both_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "SHARED_MEMORY", tmp_path)
    devices.require_shared_memory(1000)
    with pytest.raises(ExperimentError, match=r"shared memory: this run needs 1e\+03 PB in .* are free"):
        devices.require_shared_memory(10**18)
    monkeypatch.setattr(devices, "SHARED_MEMORY", tmp_path / "not here")
    devices.require_shared_memory(10**18)


def test_total_memory_is_that_of_the_machine_or_of_its_container(tmp_path, monkeypatch):
    machine = tmp_path / "meminfo"
    machine.write_text("MemTotal: 9000 kB\nMemAvailable: 2000 kB\n")
    monkeypatch.setattr(devices, "MEMORY", machine)
    monkeypatch.setattr(devices, "CGROUP", tmp_path)
    assert devices.total_memory() == 9000 * 1024
    for limit, total in (("1000000\n", 1_000_000), ("max\n", 9000 * 1024)):
        (tmp_path / "memory.max").write_text(limit)
        assert devices.total_memory() == total
    monkeypatch.setattr(devices, "MEMORY", tmp_path / "missing")
    assert devices.total_memory() == float("inf")


def test_a_machine_with_little_memory_runs_fewer_processes(monkeypatch):
    monkeypatch.setattr(devices, "usable_cores", lambda: 64)
    monkeypatch.setattr(devices, "total_memory", lambda: 8e9)
    assert devices.default_processes(torch.device("cpu"), 100, 1) == 10
    monkeypatch.setattr(devices, "total_memory", lambda: float("inf"))  # unknown, as on macOS
    assert devices.default_processes(torch.device("cpu"), 100, 1) == 64


def test_free_memory_respects_the_containers_limit(tmp_path, monkeypatch):
    machine = tmp_path / "meminfo"
    machine.write_text("MemTotal: 9000 kB\nMemAvailable: 2000 kB\n")
    monkeypatch.setattr(devices, "MEMORY", machine)
    monkeypatch.setattr(devices, "CGROUP", tmp_path)
    assert devices.free_memory() == 2000 * 1024
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 100000\n")
    for limit, free in (("1000000\n", 400_000), ("max\n", 2000 * 1024), (f"{10**12}\n", 2000 * 1024)):
        (tmp_path / "memory.max").write_text(limit)
        assert devices.free_memory() == free
    monkeypatch.setattr(devices, "MEMORY", tmp_path / "missing")
    assert devices.free_memory() == float("inf")
