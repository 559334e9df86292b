from __future__ import annotations

import pytest
import torch

from fedsim.core.randomness import global_states, preserve_random_state, seed_everything
from fedsim.data.tensors import as_tensor_data
from fedsim.errors import ExperimentError
from fedsim.system import devices
from tests.device.pretend import GPU, pretend_gpu


def test_the_cpu_is_always_there_and_auto_is_the_accelerator_where_there_is_one():
    assert devices.resolve_device("cpu") == torch.device("cpu")
    assert devices.resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["cuda:99", "cupy", "gpu", "mps" if not torch.backends.mps.is_available() else "xpu"])
def test_a_device_that_is_not_there_gives_a_one_line_error(name):
    with pytest.raises(ExperimentError, match=f'device = "{name}": .*available here: auto, cpu'):
        devices.resolve_device(name)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_data_cannot_be_moved_to_a_device_that_is_not_there():
    data = as_tensor_data((torch.rand(3, 2), torch.arange(3)))
    with pytest.raises(ExperimentError, match='device = "cuda": PyTorch does not find this device .*auto, cpu'):
        data.to(torch.device("cuda"), torch.float32)


def test_a_device_without_a_number_is_the_current_one(monkeypatch):
    assert devices.with_index(torch.device("cpu")) == torch.device("cpu")
    with pretend_gpu(), monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "current_device_index", lambda: 3)
        assert devices.with_index(torch.device("cuda")) == torch.device("cuda", 3)
    with pretend_gpu():
        unnumbered = torch.device("cuda")
        assert devices.with_index(unnumbered) == GPU
        assert devices.resolve_device("cuda") == GPU
        data = as_tensor_data((torch.rand(3, 2), torch.arange(3))).to(GPU, torch.float32)
        assert data.to(unnumbered, torch.float32).inputs is data.inputs
        with preserve_random_state(unnumbered):
            seed_everything(unnumbered, 0, "x")
            seeded = global_states(unnumbered)
            torch.rand(2, device=unnumbered)
            assert global_states(GPU) != seeded


def test_usable_cores_respect_the_quotas_of_the_container_and_of_a_job_within(tmp_path, monkeypatch):
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(devices, "CGROUP", tmp_path)
    monkeypatch.setattr(devices, "OWN_CGROUP", tmp_path / "own")
    assert devices.usable_cores() == 8
    for content, cores in (("250000 100000", 2), ("50000 100000", 1), ("max 100000", 8)):
        (tmp_path / "cpu.max").write_text(content)
        assert devices.usable_cores() == cores
    (tmp_path / "slice" / "job").mkdir(parents=True)
    (tmp_path / "slice" / "cpu.max").write_text("300000 100000\n")
    for group, cores in (("/", 8), ("/../elsewhere", 8), ("/slice", 3), ("/slice/job", 3)):
        (tmp_path / "own").write_text(f"12:cpu:/old\n0::{group}\n")
        assert devices.usable_cores() == cores, group
    (tmp_path / "slice" / "job" / "cpu.max").write_text("100000 100000\n")
    assert devices.usable_cores() == 1
    (tmp_path / "own").write_text("4:memory:/elsewhere\n2:cpu,cpuacct:/job\n")
    (tmp_path / "cpu" / "job").mkdir(parents=True)  # version 1
    (tmp_path / "cpu" / "job" / "cpu.cfs_period_us").write_text("100000\n")
    for quota, cores in (("-1\n", 8), ("600000\n", 6)):
        (tmp_path / "cpu" / "job" / "cpu.cfs_quota_us").write_text(quota)
        assert devices.usable_cores() == cores


@pytest.mark.parametrize(
    ("cores", "memory", "cohort", "threads", "processes"),
    [
        *((6, 1e12, 4, 1, 4), (6, 1e12, 100, 1, 6), (6, 1e12, 100, 2, 3), (6, 1e12, 100, 16, 1)),
        *((64, 8e9, 100, 1, 10), (64, float("inf"), 100, 1, 64)),  # unknown memory, as on macOS
    ],
)
def test_processes_by_default_never_exceed_the_cohort_the_cores_or_the_memory(
    cores, memory, cohort, threads, processes, monkeypatch
):
    monkeypatch.setattr(devices, "usable_cores", lambda: cores)
    monkeypatch.setattr(devices, "total_memory", lambda: memory)
    assert devices.default_processes(torch.device("cpu"), cohort, threads) == processes


def test_memory_is_that_of_the_machine_or_of_its_container(tmp_path, monkeypatch):
    machine = tmp_path / "meminfo"
    machine.write_text("MemTotal: 9000 kB\nMemAvailable: 2000 kB\n")
    monkeypatch.setattr(devices, "MEMORY", machine)
    monkeypatch.setattr(devices, "CGROUP", tmp_path)
    assert (devices.total_memory(), devices.free_memory()) == (9000 * 1024, 2000 * 1024)
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 100000\n")
    for limit, total, free in (
        ("1000000\n", 1_000_000, 400_000),
        ("max\n", 9000 * 1024, 2000 * 1024),
        (f"{10**12}\n", 9000 * 1024, 2000 * 1024),
    ):
        (tmp_path / "memory.max").write_text(limit)
        assert (devices.total_memory(), devices.free_memory()) == (total, free)
    (tmp_path / "memory.max").unlink()
    (tmp_path / "memory" / "job").mkdir(parents=True)  # version 1
    monkeypatch.setattr(devices, "OWN_CGROUP", tmp_path / "own")
    (tmp_path / "own").write_text("12:cpu,cpuacct:/other\n4:memory:/job\n")
    (tmp_path / "memory" / "job" / "memory.limit_in_bytes").write_text("900000\n")
    (tmp_path / "memory" / "job" / "memory.usage_in_bytes").write_text("700000\n")
    (tmp_path / "memory" / "job" / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 100000\n")
    assert (devices.total_memory(), devices.free_memory()) == (900_000, 300_000)
    (tmp_path / "memory" / "job" / "memory.limit_in_bytes").unlink()
    monkeypatch.setattr(devices, "MEMORY", tmp_path / "missing")
    assert devices.total_memory() == devices.free_memory() == float("inf")
