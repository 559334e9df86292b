"""Steps per second of synchronous SGD with two processes: fedsim and DistributedDataParallel on gloo.

Both take the same steps on the same batches of the embedded MNIST images, from the same initial model, with one thread
per process. Their final parameters must agree up to rounding. Only the steps are timed, without start-up and tests.

    python benchmarks/sync_step.py [--repeats 5]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from common import median, report
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fedsim
from fedsim.core.randomness import batch_order, seed_everything
from fedsim.core.rows import Layout
from fedsim.data import CustomSubset, load_dataset, partition
from fedsim.models import model as models

PROCESSES, BATCH, LR, MOMENTUM, SEED = 2, 64, 0.01, 0.9, 0
STEPS = {"2nn": 300, "cnn": 20, "net": 100}
NO_DROPOUT = {"net": {"dropout": 0.0}}  # DDP's processes would draw other dropout masks


def fedsim_steps(name: str) -> tuple[float, Tensor]:
    """Return the seconds per step and the final row of fedsim."""
    result = fedsim.run(
        {
            "model": {"name": name, **NO_DROPOUT.get(name, {})},
            "engine": "processes",
            "sync": "gradients",
            "workers": PROCESSES,
            "processes": PROCESSES,
            "rounds": 2,
            "seed": SEED,
            "partition": "iid",
            "local": {"steps": STEPS[name], "batch_size": BATCH, "lr": LR, "momentum": MOMENTUM},
        }
    )
    return result.history[-1]["seconds"]["train"] / STEPS[name], result.global_row


def ddp_steps(name: str) -> tuple[float, Tensor]:
    """Return the seconds per step and the final row of DistributedDataParallel, started in the usual way."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_ddp_worker, (name, folder), nprocs=PROCESSES)
        done = torch.load(Path(folder) / "result.pt", weights_only=True)
    return done["seconds"], done["row"]


def _ddp_worker(rank: int, name: str, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=PROCESSES)
    train, _ = load_dataset("mnist5k")
    shard = CustomSubset(train, partition(train.targets, "iid", PROCESSES, seed=SEED)[rank])
    seed_everything(torch.device("cpu"), SEED, "model")
    module = models.get(name).target(**NO_DROPOUT.get(name, {}))
    parallel = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM)
    for round in (1, 2):  # only the second round is timed, after a warm-up
        batches = _preloaded_batches(shard, round, rank, STEPS[name])
        torch.distributed.barrier()
        started = time.perf_counter()
        for inputs, targets in batches:
            optimizer.zero_grad()
            F.cross_entropy(parallel(inputs), targets).backward()
            optimizer.step()
        torch.distributed.barrier()
        seconds = (time.perf_counter() - started) / STEPS[name]
    if rank == 0:
        torch.save({"seconds": seconds, "row": Layout.of(module).read(module)}, Path(folder) / "result.pt")
    torch.distributed.destroy_process_group()


def _preloaded_batches(shard: CustomSubset, round: int, worker: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    batches: list[tuple[Tensor, Tensor]] = []
    for epoch in count():
        batches.extend(shard.batches(BATCH, batch_order(SEED, round, worker, epoch, len(shard))))
        if len(batches) >= steps:
            return batches[:steps]
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    figures: dict[str, Any] = {}
    for name in STEPS:
        pairs = [(fedsim_steps(name), ddp_steps(name)) for _ in range(repeats)]
        (_, ours), (_, theirs) = pairs[0]
        furthest = float((ours - theirs).abs().max())
        assert furthest < 1e-4, f"{name}: fedsim and DDP did different work: rows differ by {furthest}"
        figures[name] = {
            "fedsim_steps_per_second": median([1 / ours[0] for ours, _ in pairs]),
            "ddp_steps_per_second": median([1 / theirs[0] for _, theirs in pairs]),
            "times_faster": median([theirs[0] / ours[0] for ours, theirs in pairs]),
            "largest_difference": furthest,
        }
    report("sync_step", **figures, repeats=repeats)


if __name__ == "__main__":
    main()
