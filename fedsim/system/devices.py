"""Devices, cores and memory: the only module that reads what hardware there is."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from fedsim.errors import ExperimentError, show, show_bytes

SHARED_MEMORY = Path("/dev/shm")
CGROUP = Path("/sys/fs/cgroup")  # of this process's container
OWN_CGROUP = Path("/proc/self/cgroup")  # has the group of this process below it
MEMORY = Path("/proc/meminfo")
PCI, NVIDIA = Path("/sys/bus/pci/devices"), "0x10de"  # a folder for each device; the number of a vendor
PROCESS_BYTES = 4e8  # main memory of one process, its copy of PyTorch included
PROCESS_BYTES_ON_GPU = 1.5e9  # context, library workspaces and activations of one process, generously
ROOM_FACTOR = 8  # an optional allocation needs so many times its size of free memory
MAX_PROCESSES_ON_GPU = 4  # processes on one GPU take turns; more of them mostly cost memory


def resolve_device(name: str) -> torch.device:
    """The device called `name`; "auto" is the first CUDA device if there is one, else the CPU.

    Other accelerators are used only if they are named, because their memory cannot be shared between processes.

    Raises ExperimentError if PyTorch cannot use that device here.
    """
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    allowed = "auto, cpu"
    if here:
        allowed += "".join(f", {here.type}:{index}" for index in range(torch.accelerator.device_count()))
    if name == "auto":
        return torch.device("cuda", 0) if here and here.type == "cuda" else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ExperimentError(f"device = {show(name)}: no such device; allowed here: {allowed}") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if here is None or device.type != here.type or (device.index or 0) >= torch.accelerator.device_count():
        raise ExperimentError(
            f"device = {show(name)}: this PyTorch sees no such device{_why_no_gpu(device)}; allowed here: {allowed}"
        )
    return torch.device(device.type, device.index or 0)


def _why_no_gpu(device: torch.device) -> str:
    """A possible reason why there is no CUDA device, for an error; "" if there is one."""
    if device.type != "cuda" or torch.cuda.is_available():
        return ""
    if torch.version.cuda is None and torch.version.hip is None:
        return f" (PyTorch {torch.__version__} is built without CUDA; install a build that has it)"
    return " (nvidia-smi says whether the driver does; CUDA_VISIBLE_DEVICES may hide it)"


def why_gpu_is_unused() -> str:
    """Why PyTorch does not use an NVIDIA GPU that this machine has; "" if it uses it, or there is none."""
    displays = (folder for folder in PCI.glob("*") if _read(folder / "class").startswith("0x03"))
    if torch.cuda.is_available() or not any(_read(folder / "vendor").strip() == NVIDIA for folder in displays):
        return ""
    return _why_no_gpu(torch.device("cuda")).strip(" ()")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def shares_memory(device: torch.device) -> bool:
    """Whether several processes can work on the same tensors of this device."""
    return device.type in ("cpu", "cuda")


def require_shared_memory(nbytes: int) -> None:
    """Raise ExperimentError unless the shared-memory file system has room for so many bytes.

    For systems without files in memory: see `fedsim.engines.pool.shared_memory`.
    """
    if not SHARED_MEMORY.is_dir():
        return  # not Linux: there is no such limit to look up
    free = shutil.disk_usage(SHARED_MEMORY).free
    if nbytes > free:
        raise ExperimentError(
            f"shared memory: this run needs {show_bytes(nbytes)} in {SHARED_MEMORY}, where {show_bytes(free)} are "
            "free; enlarge it (mount -o remount,size=..., docker run --shm-size=...) or use engine=serial"
        )


def require_memory(nbytes: int, purpose: str, instead: str) -> None:
    """Raise ExperimentError unless so many bytes of main memory are free, in the machine and in this container.

    Args:
        what: takes them, for the error.
        instead: a setting that takes less.
    """
    free = free_memory()
    if nbytes > free:
        raise ExperimentError(
            f"memory: {purpose} takes {show_bytes(nbytes)}, and {show_bytes(free)} are free; make room, or use {instead}"
        )


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished the work of this process, so that other processes see the results."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def release_memory(device: torch.device) -> None:
    """Free unused memory of an accelerator, so that other processes can allocate it.

    That is memory of cyclic garbage, memory that PyTorch's allocator caches, and memory that other processes had
    opened and have closed. PyTorch frees none of these by itself. Does nothing for a CPU.
    """
    if device.type == "cpu":
        return
    gc.collect()
    with contextlib.suppress(RuntimeError):  # a device that has failed refuses every call
        if device.type == "cuda":
            torch.cuda.ipc_collect()
        torch.get_device_module(device).empty_cache()


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """The same values on a device. A copy from the host to a CUDA device does not wait for the device.

    The values must not lie in pinned memory: only then CUDA has read them when this returns.
    """
    return values.to(device, non_blocking=device.type == "cuda")


def wide_dtype(device: torch.device) -> torch.dtype:
    """The type of sums and weights: float64, except on devices without it."""
    return torch.float32 if device.type == "mps" else torch.float64


def usable_cores() -> int:
    """Cores that this process may use: its CPU affinity, limited by the CPU quota of its container or job."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _cgroups():
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no quota
            quota, period = (group / "cpu.max").read_text().split()
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def _cgroups() -> list[Path]:
    """The control groups (version 2) of this process, from its container to its own."""
    groups = [CGROUP]
    with contextlib.suppress(OSError, StopIteration):
        lines = OWN_CGROUP.read_text().splitlines()
        group = next(line for line in lines if line.startswith("0::")).removeprefix("0::/")
        parts = [part for part in group.split("/") if part not in ("", "..")]
        groups += [CGROUP.joinpath(*parts[: count + 1]) for count in range(len(parts))]
    return groups


def default_processes(device: torch.device, cohort: int, threads_per_process: int) -> int:
    """The number of processes for a cohort that the cores and the memory of the machine, or of a GPU, allow."""
    processes = min(cohort, max(1, usable_cores() // threads_per_process))
    if device.type == "cpu":
        return int(min(processes, max(1, total_memory() / 2 / PROCESS_BYTES)))  # which may be infinite
    by_memory = max(1, int(0.8 * total_memory_of(device) / PROCESS_BYTES_ON_GPU))
    return min(processes, MAX_PROCESSES_ON_GPU, by_memory)


def total_memory_of(device: torch.device) -> float:
    """Bytes of memory of a device, free or not, so that the result does not depend on other programs."""
    mem_get_info = getattr(torch.get_device_module(device), "mem_get_info", None)  # mps has main memory only
    return total_memory() if device.type == "cpu" or mem_get_info is None else mem_get_info(device)[1]


def has_room(device: torch.device, nbytes: int) -> bool:
    """Whether so many bytes are a small part of the free memory of an accelerator."""
    mem_get_info = None if device.type == "cpu" else getattr(torch.get_device_module(device), "mem_get_info", None)
    return mem_get_info is not None and mem_get_info(device)[0] >= ROOM_FACTOR * nbytes


def total_memory() -> float:
    """Bytes of main memory of the machine, or of this process's container if that has less; infinite if unknown."""
    total = _bytes_of_machine("MemTotal")
    for group in _cgroups():
        with contextlib.suppress(OSError, ValueError):  # no container, or "max": no limit
            total = min(total, int((group / "memory.max").read_text()))
    return total


def free_memory() -> float:
    """Bytes of main memory that are free, in the machine and in this process's container; infinite if unknown."""
    free = _bytes_of_machine("MemAvailable")
    for group in _cgroups() if free < math.inf else ():
        with contextlib.suppress(OSError, StopIteration, ValueError):  # no container, or "max": no limit
            limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
            statistics = (group / "memory.stat").read_text().splitlines()
            cache = next(int(line.split()[1]) for line in statistics if line.startswith("inactive_file "))
            free = min(free, limit - used + cache)
    return free


def _bytes_of_machine(name: str) -> float:
    """An entry of /proc/meminfo; infinite if there is none."""
    numbers = (int(line.split()[1]) * 1024.0 for line in _read(MEMORY).splitlines() if line.startswith(name))
    return next(numbers, math.inf)


def describe_device(device: torch.device) -> str:
    """The device's name and, for an accelerator, its model."""
    if device.type == "cpu":
        return "cpu"
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    return f"{device} ({name_of(device)})" if name_of else str(device)


def device_of_rank(name: str, local_rank: int) -> torch.device:
    """The device called `name` for one of several processes on a host, which share its GPUs out.

    All processes use a GPU that is named with its number.
    """
    device = resolve_device(name)
    if device.type == "cpu" or ":" in name:
        return device
    return torch.device(device.type, local_rank % torch.accelerator.device_count())


def gpu_id(device: torch.device) -> str | None:
    """An identifier of a GPU of this host; None for a CPU."""
    if device.type == "cpu":
        return None
    properties_of = getattr(torch.get_device_module(device), "get_device_properties", None)
    uuid = getattr(properties_of(device), "uuid", None) if properties_of else None
    return str(device) if uuid is None else f"{device.type} {uuid}"


def gloo_can_sum(device: torch.device) -> bool:
    """Whether the backend gloo sums tensors on this device."""
    return device.type in ("cpu", "cuda")
