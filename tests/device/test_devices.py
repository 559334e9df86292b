"""Limits in memory, and devices of ranks, on simulated cards of different sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedsim.errors import ExperimentError
from fedsim.system import devices
from tests.device.pretend import GPU, pretend_gpu
from tests.device.pretend.cards import LARGE, SMALL

GB = 10**9


@pytest.mark.parametrize(
    ("total_gb", "cores", "processes"),
    [(141, 64, 4), (8, 64, 4), (7.4, 64, 3), (5.7, 64, 3), (5.6, 64, 2), (3.7, 64, 1), (1, 64, 1), (141, 3, 3)],
)
def test_at_most_four_processes_share_a_gpu_and_each_has_1_5_gb_of_four_fifths(total_gb, cores, processes, monkeypatch):
    monkeypatch.setattr(devices, "usable_cores", lambda: cores)
    with pretend_gpu(replace(SMALL, total=int(total_gb * GB))):
        assert devices.default_processes(GPU, 100, 1) == processes


def test_something_optional_is_kept_on_a_gpu_with_eight_times_its_size_of_free_memory():
    with pretend_gpu(replace(LARGE, free=80 * GB)):
        assert devices.has_room(GPU, 10 * GB)
        assert not devices.has_room(GPU, 10 * GB + 1)
        assert not devices.has_room(torch.device("cpu"), 1)


def test_only_gpus_that_are_there_can_be_named(monkeypatch):
    with pretend_gpu():
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
        assert devices.resolve_device("cuda:1") == torch.device("cuda", 1)
        with pytest.raises(ExperimentError, match=r'device = "cuda:2": .*available here: auto, cpu, cuda:0, cuda:1'):
            devices.resolve_device("cuda:2")


def test_ranks_take_gpus_in_turn_unless_the_device_has_a_number(monkeypatch):
    with pretend_gpu():
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
        assert [devices.device_of_rank("cuda", rank).index for rank in range(4)] == [0, 1, 0, 1]
        assert [devices.device_of_rank("cuda:1", rank).index for rank in range(4)] == [1, 1, 1, 1]
        assert devices.device_of_rank("cpu", 1) == torch.device("cpu")


def test_memory_is_released_for_other_processes_in_both_ways(monkeypatch):
    called = []
    with pretend_gpu():
        for name in ("ipc_collect", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda name=name: called.append(name))
        devices.release_memory(torch.device("cpu"))
        assert not called
        devices.release_memory(GPU)
    assert called == ["ipc_collect", "empty_cache"]
