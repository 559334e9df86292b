"""Checks for `fedsim doctor`: what this machine has, which engines work on it, and how to solve the problems found."""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed

from fedsim.config.engines import TRAITS, traits_of
from fedsim.config.experiment import Experiment
from fedsim.data.formats.images import CLASS_NAMES, lacks_files
from fedsim.data.sources import default_root
from fedsim.engines.auto import AutoEngine
from fedsim.engines.base import Engine
from fedsim.engines.named import stacked
from fedsim.errors import ExperimentError, FedsimError, first_line, one_line, show_bytes
from fedsim.processes.shared_memory import memory_file
from fedsim.runs.session import Session
from fedsim.runs.setup import begun, processes_of
from fedsim.system import devices, limits
from fedsim.system.packages import import_torchvision
from fedsim.training.task import STORED_BYTES, RunTask

SHARED_BYTES = 1e9  # bytes of shared memory that are enough for typical experiments
LITTLE_DISK = 2e8  # bytes of free disk space below which the disk counts as almost full


@dataclass(frozen=True)
class Finding:
    """Result of `fedsim doctor` for one component of the machine.

    Attributes:
        about: name of the component, such as "memory".
        found: description in one line.
        problems: pairs (problem, how to solve it).
        fatal: whether the problems prevent fedsim from running.
    """

    about: str
    found: str
    problems: list[tuple[str, str]] = field(default_factory=list)
    fatal: bool = False


def findings() -> Iterator[Finding]:
    """Examine the machine, and yield one finding after another, for example about its memory and each engine.

    This takes about a second.
    """
    for look in (_cores, _memory, _gpu, _torchvision, _shared_memory, _open_files, _backends, _data, _folder):
        yield look()
    yield from _engines()


def _cores() -> Finding:
    usable, cores = devices.usable_cores(), os.cpu_count() or 1
    limit = f", of {cores} (CPU affinity, or the quota of this container or job)" if usable < cores else ""
    return Finding("cores", f"{usable}{limit}")


def _memory() -> Finding:
    free, total = devices.free_memory(), devices.total_memory()
    if math.isinf(total):
        return Finding("memory", "unknown")
    problems = []
    if free < devices.PROCESS_BYTES:
        problems = [(f"a process needs about {show_bytes(devices.PROCESS_BYTES)} of memory", "end other programs")]
    sums = (
        f"more than {show_bytes(STORED_BYTES)} of updates are summed in several parts, unless a rule needs all of them"
    )
    return Finding("memory", f"{show_bytes(total)}, {show_bytes(free)} free; {sums}", problems)


def _gpu() -> Finding:
    device = devices.resolve_device("auto")
    if device.type == "cpu":
        reason = devices.why_gpu_is_unused()
        problems = [("this machine has an NVIDIA GPU that PyTorch cannot use", reason)] if reason else []
        others = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        build = f"PyTorch is built {'for' if torch.version.cuda else 'without'} CUDA"
        return Finding("GPU", f"none for device=auto; device={others} works" if others else f"none; {build}", problems)
    try:
        torch.ones(1, device=device).add_(1).item()
    except RuntimeError as error:
        problem = f"a test computation on {device} failed: {one_line(error)}"
        return Finding("GPU", str(device), [(problem, "set device=cpu, or install a PyTorch build for this GPU")])
    count, memory = torch.cuda.device_count(), show_bytes(devices.total_memory_of(device))
    return Finding("GPU", f"{devices.describe_device(device)}, {memory}" + (f", and {count - 1} more" * (count > 1)))


def _torchvision() -> Finding:
    try:
        return Finding("torchvision", f"{import_torchvision().__version__} works")
    except (ImportError, OSError, RuntimeError) as error:  # for example a build for another version of PyTorch
        problem = f"import torchvision fails: {one_line(error)}"
        return Finding("torchvision", "cannot be imported", [(problem, "pip install --upgrade torch torchvision")])


def _shared_memory() -> Finding:
    try:
        descriptor = memory_file(1)
    except ExperimentError:
        descriptor = None
    if descriptor is not None:
        os.close(descriptor)
    folder = devices.SHARED_MEMORY
    if not folder.is_dir():
        return Finding("shared memory", f"no {folder} here")
    usage = shutil.disk_usage(folder)
    sizes = f"{folder} has {show_bytes(usage.total)}, {show_bytes(usage.free)} free"
    if descriptor is not None:
        return Finding("shared memory", f"files in main memory; {sizes}, not used")
    problems = []
    if usage.free < SHARED_BYTES:
        problems = [(f"{folder}, where processes share tensors, is small", "start docker with --shm-size=8g")]
    return Finding("shared memory", sizes, problems)


def _open_files() -> Finding:
    now, most = limits.limits_of_files()
    processes = devices.usable_cores()
    needed, problems = limits.files_for(processes), []
    if most < needed:
        problem = f"{processes} processes need about {needed} open files"
        problems = [(problem, f"run ulimit -n {needed}, or use fewer processes")]
    limit = "no limit" if math.isinf(now) else f"at most {now} (ulimit -n); fedsim can raise this limit to {most}"
    return Finding("open files", limit, problems)


def _backends() -> Finding:
    distributed = torch.distributed
    if not distributed.is_available():
        return Finding("backends", "none: this PyTorch has no torch.distributed, which engine=distributed needs")
    available = {"gloo": distributed.is_gloo_available(), "nccl": distributed.is_nccl_available()}
    return Finding("backends", ", ".join(f"{name}: {'yes' if has else 'no'}" for name, has in available.items()))


def _data() -> Finding:
    root = default_root()
    missing = [name for name in CLASS_NAMES if lacks_files(name, root)]
    datasets = [f"{name} {'would be downloaded' if name in missing else 'is there'}" for name in CLASS_NAMES]
    problems = []
    nearest = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    if missing and not os.access(nearest, os.W_OK):
        problems = [(f"data sets cannot be downloaded to {root}: no write permission", "set FEDSIM_DATA=FOLDER")]
    return Finding("data", f"in {root}: {', '.join(datasets)}; mnist5k comes with fedsim", problems)


def _folder() -> Finding:
    folder = Path.cwd()
    free = shutil.disk_usage(folder).free
    problems = []
    if not os.access(folder, os.W_OK):
        problems = [("no write permission in this folder", "change to another folder, or use fedsim run --out FOLDER")]
    elif free < LITTLE_DISK:
        problems = [("the disk of this folder is almost full", "free some space, or use fedsim run --out FOLDER")]
    return Finding("this folder", f"{folder}, {show_bytes(free)} free on its disk", problems)


def _engines() -> Iterator[Finding]:
    try:
        with warnings.catch_warnings(), Session() as session:
            warnings.simplefilter("ignore")
            with begun(Experiment(engine="serial"), session) as (task, engine):
                for name, traits in TRAITS.items():
                    if not traits.ranks:
                        yield Finding(f"engine={name}", _engine_plan(name, task, engine))
    except FedsimError as error:
        problem = f"the default experiment cannot run: {first_line(error)}"
        yield Finding("engines", "none works", [(problem, "run fedsim run --dry-run for details")], fatal=True)


def _engine_plan(name: str, task: RunTask, serial: Engine) -> str:
    experiment, shared = Experiment(engine=name), serial.shared
    processes, traits = processes_of(experiment, task.device), traits_of(name)
    if traits.chooses:
        plan = AutoEngine(
            processes, experiment.threads_per_process, experiment.process_timeout, experiment.start_method
        ).choose(task, shared)
        how = "stacks of workers" if plan.stacked else "one worker at a time"
        return f"{_count(plan.processes)}, {how}, because {plan.reason}"
    if not traits.stacks:
        return f"{_count(processes)}, one worker at a time"
    try:
        width = stacked(task, shared, processes, experiment.threads_per_process)[1]["width"]
    except ExperimentError as error:
        return first_line(error)
    return f"{_count(processes)}, stacks of up to {width} workers"


def _count(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"
