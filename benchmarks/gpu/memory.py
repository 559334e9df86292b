"""Memory that runs leave on the device, and memory that processes share there."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.cases import Case, Context, Facts, check, need_gpu
from benchmarks.gpu.comparing import STACKED, TINY, run
from benchmarks.gpu.faults import shared_memory

RUNS = 3
ENGINES: dict[str, dict[str, Any]] = {
    "serial": {"engine": "serial"},
    "batched": STACKED,
    "auto": {"processes": 1},
}
SLACK = 2**20  # bytes that a library may keep


def cases(context: Context) -> list[Case]:
    return [
        *(Case(f"after runs, {name}", partial(after_runs, context, way)) for name, way in ENGINES.items()),
        Case("a tensor in another process", partial(shared, context, kill=False)),
        Case("a process is killed with a tensor open", partial(shared, context, kill=True)),
        *(Case(f"{count} processes that launch", partial(taking_turns, context, count)) for count in (1, 2, 4)),
        Case("after runs, spawn", partial(after_runs, context, {"engine": "spawn", "processes": 2})),
    ]


def after_runs(context: Context, way: dict[str, Any]) -> Facts:
    """Python's collector of cycles is off, so what a cycle holds is found too."""
    need_gpu(context)
    tables = {**TINY, "model": "cnn", "workers": 8, "rounds": 1, "precision": "float32", **way}
    gc.collect()
    torch.cuda.empty_cache()
    before, marks = torch.cuda.memory_allocated(context.device), []
    gc.disable()
    try:
        for seed in range(RUNS):
            run(context, {**tables, "seed": seed})
            marks.append(torch.cuda.memory_allocated(context.device) - before)
    finally:
        gc.enable()
    facts = {"bytes_after_each_run": marks, "reserved": torch.cuda.memory_reserved(context.device)}
    return check(marks[-1] <= marks[0] + SLACK, "memory grows from run to run", **facts)


def shared(context: Context, *, kill: bool) -> Facts:
    """A process opens a tensor of this one and writes to it; it ends, or is killed."""
    need_gpu(context)
    torch.cuda.init()
    before, segments = used(context), shared_memory()
    tensor = torch.ones(2**24, device=context.device)
    spawning = torch.multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    queue = spawning.SimpleQueue()
    process = spawning.Process(target=_open, args=(queue, theirs, kill))
    started = time.perf_counter()
    process.start()
    queue.put(tensor)
    if not ours.poll(40):
        process.kill()
        return check(False, "the other process reported nothing within 40 s")
    total, seconds = ours.recv()
    during = used(context)
    if not kill:
        ours.send("end")
    process.join(20)
    facts = {
        **{"start_seconds": round(time.perf_counter() - started, 2), "open_seconds": round(seconds, 3)},
        "context_mib": round((during - before - tensor.nbytes) / 2**20),
    }
    written = float(tensor[0])
    del tensor
    gc.collect()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    facts |= {"mib_left": round((used(context) - before) / 2**20), "left": sorted(shared_memory() - segments)}
    return check((total, written) == (2.0**24, 7.0), "one process does not see what the other writes", **facts)


def used(context: Context) -> int:
    free, total = torch.cuda.mem_get_info(context.device)
    return total - free


def _open(queue: Any, pipe: Any, kill: bool) -> None:
    started = time.perf_counter()
    tensor = queue.get()
    total = float(tensor.sum())
    tensor[0] = 7.0
    torch.cuda.synchronize()
    pipe.send((total, time.perf_counter() - started))
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.recv()
    del tensor
    gc.collect()


def taking_turns(context: Context, count: int) -> Facts:
    """How many tiny kernels a second several processes launch together."""
    need_gpu(context)
    spawning = multiprocessing.get_context("spawn")
    start, pipes, processes = spawning.Event(), [], []
    for _ in range(count):
        ours, theirs = spawning.Pipe()
        process = spawning.Process(target=_launch, args=(start, theirs, context.device), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()
    start.set()
    rates = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join(10)
    return {"launches_per_second": round(sum(rates)), "each": [round(rate) for rate in rates]}


def _launch(start: Any, pipe: Any, device: str, seconds: float = 1.0) -> None:
    numbers, count = torch.ones(1000, device=device), 0
    torch.cuda.synchronize()
    pipe.send("ready")
    start.wait()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(50):
            numbers.add_(1)
        torch.cuda.synchronize()
        count += 50
    pipe.send(count / seconds)
