"""Devices, cores and memory. No other module queries the hardware."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fedsim.errors import ExperimentError, show, show_bytes

SHARED_MEMORY = Path("/dev/shm")
CGROUP = Path("/sys/fs/cgroup")  # control group of this process's container
OWN_CGROUP = Path("/proc/self/cgroup")  # names the control group of this process, relative to CGROUP
MEMORY = Path("/proc/meminfo")
PCI, NVIDIA = Path("/sys/bus/pci/devices"), "0x10de"  # one folder per PCI device; vendor id of NVIDIA
PROCESS_BYTES = 4e8  # main memory of one process, including PyTorch
PROCESS_BYTES_ON_GPU = 1.5e9  # generous estimate for one process: context, library workspaces and activations
ROOM_FACTOR = 8  # an optional allocation requires this many times its size of free memory
MAX_PROCESSES_ON_GPU = 4  # processes take turns on a GPU, so more processes mostly cost memory


def resolve_device(name: str) -> torch.device:
    """Return the device called `name`. "auto" is the first CUDA device, or the CPU if there is none.

    Other accelerators must be named explicitly, because processes cannot share their memory.

    Raises ExperimentError if PyTorch cannot use the device.
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
        raise ExperimentError(f"device = {show(name)}: no such device; available here: {allowed}") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if here is None or device.type != here.type or (device.index or 0) >= torch.accelerator.device_count():
        raise ExperimentError(
            f"device = {show(name)}: PyTorch does not find this device{_why_no_gpu(device)}; available here: {allowed}"
        )
    return torch.device(device.type, device.index or 0)


def with_index(device: torch.device) -> torch.device:
    """Return `device` with an index. A device without an index means the current device, as in PyTorch.

    Raises ExperimentError if `device` has no index and PyTorch finds no device of this type.
    """
    if device.type in ("cpu", "meta") or device.index is not None:
        return device
    resolve_device(device.type)
    return torch.device(device.type, torch.accelerator.current_device_index())


def _why_no_gpu(device: torch.device) -> str:
    """Return a possible reason why there is no CUDA device, for an error message, or "" if there is one."""
    if device.type != "cuda" or torch.cuda.is_available():
        return ""
    if torch.version.cuda is None and torch.version.hip is None:
        return f" (PyTorch {torch.__version__} is built without CUDA; install a build with CUDA)"
    return " (run nvidia-smi to check the driver; CUDA_VISIBLE_DEVICES may hide the device)"


def why_gpu_is_unused() -> str:
    """Return why PyTorch does not use the NVIDIA GPU of this machine, or "" if it does, or if there is no GPU."""
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
    """Whether several processes can use the same tensors on this device."""
    return device.type in ("cpu", "cuda")


def require_shared_memory(nbytes: int) -> None:
    """Raise ExperimentError unless `nbytes` bytes of shared memory are free."""
    if not SHARED_MEMORY.is_dir():
        return  # not Linux: the limit cannot be queried
    free = shutil.disk_usage(SHARED_MEMORY).free
    if nbytes > free:
        raise ExperimentError(
            f"shared memory: this run needs {show_bytes(nbytes)} in {SHARED_MEMORY}, but only {show_bytes(free)} are "
            "free; enlarge it (mount -o remount,size=..., docker run --shm-size=...) or use engine=serial"
        )


def require_memory(nbytes: int, purpose: str, instead: str) -> None:
    """Raise ExperimentError unless `nbytes` bytes of main memory are free (see `free_memory`).

    Args:
        nbytes: number of bytes.
        purpose: what needs the memory, for the error message.
        instead: setting that needs less memory, which the error message recommends.
    """
    free = free_memory()
    if nbytes > free:
        raise ExperimentError(
            f"memory: {purpose} takes {show_bytes(nbytes)}, but only {show_bytes(free)} are free; "
            f"close other programs, or use {instead}"
        )


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished the work of this process, so that other processes can see the results."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def release_memory(device: torch.device) -> None:
    """Free unused memory of a GPU, so that other processes can allocate it. Does nothing for a CPU."""
    if device.type == "cpu":
        return
    gc.collect()
    with contextlib.suppress(RuntimeError):  # every call fails after an error of the device
        if device.type == "cuda":
            torch.cuda.ipc_collect()
        torch.get_device_module(device).empty_cache()


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values to a device. A copy from the host to a CUDA device does not wait for the device.

    The values are first copied to pinned memory, which PyTorch keeps until the GPU has read it, and then reuses. From
    other memory, CUDA may wait for earlier work (above 64 KB), or, on GPUs that access all memory of the host, read the
    values after this function has returned.
    """
    if device.type == "cuda" and values.device.type == "cpu":
        pinned = torch.empty_like(values, memory_format=torch.contiguous_format, pin_memory=True)
        return pinned.copy_(values).to(device, non_blocking=True)  # a strided copy would go through other memory
    return values.to(device)


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums and weights: float64, or float32 on devices without float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def usable_cores() -> int:
    """Return the number of cores that this process may use (CPU affinity and CPU quota of its container or job)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit_files = [(group, ["cpu.max"]) for group in _cgroups("")]
    limit_files += [(group, ["cpu.cfs_quota_us", "cpu.cfs_period_us"]) for group in _cgroups("cpu")]  # version 1
    for group, names in limit_files:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no quota
            quota, period = (int(number) for name in names for number in (group / name).read_text().split())
            cores = min(cores, quota // period) if quota > 0 else cores  # -1: no quota
    return max(1, cores)


def _cgroups(controller: str) -> list[Path]:
    """Return the folders of the control groups from the container down to the group of this process.

    `controller`: a controller of version 1, such as "memory"; "" for all controllers of version 2.
    """
    groups = [CGROUP / controller]
    with contextlib.suppress(OSError, StopIteration):
        lines = (line.split(":", 2) for line in OWN_CGROUP.read_text().splitlines())
        relative = next(path for _, names, path in lines if controller in names.split(","))
        parts = [part for part in relative.split("/") if part not in ("", "..")]
        groups += [groups[0].joinpath(*parts[: count + 1]) for count in range(len(parts))]
    return groups


def default_processes(device: torch.device, cohort: int, threads_per_process: int) -> int:
    """Return how many processes to use for `cohort` concurrent workers, limited by cores, memory and GPU memory."""
    processes = min(cohort, max(1, usable_cores() // threads_per_process))
    if device.type == "cpu":
        return int(min(processes, max(1, total_memory() / 2 / PROCESS_BYTES)))  # total_memory may be infinite
    by_memory = max(1, int(0.8 * total_memory_of(device) / PROCESS_BYTES_ON_GPU))
    return min(processes, MAX_PROCESSES_ON_GPU, by_memory)


def total_memory_of(device: torch.device) -> float:
    """Return the total memory of a device in bytes, which does not depend on other programs."""
    mem_get_info = getattr(torch.get_device_module(device), "mem_get_info", None)  # mps uses main memory
    return total_memory() if device.type == "cpu" or mem_get_info is None else mem_get_info(device)[1]


def has_room(device: torch.device, nbytes: int) -> bool:
    """Whether `nbytes` bytes are a small part of a GPU's free memory. False for a CPU."""
    mem_get_info = None if device.type == "cpu" else getattr(torch.get_device_module(device), "mem_get_info", None)
    return mem_get_info is not None and mem_get_info(device)[0] >= ROOM_FACTOR * nbytes


def total_memory() -> float:
    """Return the smaller of the machine's main memory and the container's limit, in bytes (infinite if unknown)."""
    return min([_bytes_of_machine("MemTotal"), *(limit for limit, _ in _memory_of_groups())])


def free_memory() -> float:
    """Return the free main memory in bytes (infinite if unknown).

    In a container, this is the smaller of two numbers: the machine's free memory, and the memory that the container's
    limit leaves free.
    """
    free = _bytes_of_machine("MemAvailable")
    return min([free, *(limit - used for limit, used in _memory_of_groups())]) if free < math.inf else free


def _memory_of_groups() -> Iterator[tuple[int, int]]:
    """Yield the limit in bytes and the used bytes, without cached files, of each control group that has a limit."""
    limit_files = [(group, "memory.max", "memory.current", "inactive_file ") for group in _cgroups("")]
    of_version_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "
    limit_files += [(group, *of_version_1) for group in _cgroups("memory")]
    for group, limit, used, cache in limit_files:
        with contextlib.suppress(OSError, StopIteration, ValueError):  # no container, or "max" for no limit
            lines = (group / "memory.stat").read_text().splitlines()
            cached = next(int(line.split()[1]) for line in lines if line.startswith(cache))
            yield int((group / limit).read_text()), int((group / used).read_text()) - cached


def _bytes_of_machine(name: str) -> float:
    """Return an entry of /proc/meminfo in bytes (infinite if missing)."""
    numbers = (int(line.split()[1]) * 1024.0 for line in _read(MEMORY).splitlines() if line.startswith(name))
    return next(numbers, math.inf)


def describe_device(device: torch.device) -> str:
    """Return the name of a device and, for an accelerator, its model."""
    if device.type == "cpu":
        return "cpu"
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    return f"{device} ({name_of(device)})" if name_of else str(device)


def device_of_rank(name: str, local_rank: int) -> torch.device:
    """Return the device of process number `local_rank` on a host. GPUs are assigned to the processes in turn.

    If `name` includes a device number, all processes use this device.
    """
    device = resolve_device(name)
    if device.type == "cpu" or ":" in name:
        return device
    return torch.device(device.type, local_rank % torch.accelerator.device_count())


def gpu_id(device: torch.device) -> str | None:
    """Return an identifier of a GPU of this host, or None for a CPU."""
    if device.type == "cpu":
        return None
    properties_of = getattr(torch.get_device_module(device), "get_device_properties", None)
    uuid = getattr(properties_of(device), "uuid", None) if properties_of else None
    return str(device) if uuid is None else f"{device.type} {uuid}"


def gloo_can_sum(device: torch.device) -> bool:
    """Whether the backend gloo can sum tensors on this device."""
    return device.type in ("cpu", "cuda")
