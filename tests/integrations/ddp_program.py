"""A rank that trains a model with DistributedDataParallel and several rules, and saves the parameters."""

from __future__ import annotations

import datetime
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fedsim.integrations.ddp import RobustState, robust_hook

STEPS = 3
SMALL = 0.0001  # MB per bucket, which makes several buckets


def new_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    inputs = torch.randn(5, 6, generator=generator) * (1 + 20 * (rank == 1))
    return inputs, torch.randint(3, (5,), generator=generator)


def loss(model, rank, step):
    inputs, targets = batch(rank, step)
    return nn.functional.cross_entropy(model(inputs), targets)


class CountingState(RobustState):
    def add(self, bucket):
        self.buckets = bucket.index() + 1
        return super().add(bucket)


def trained(rule, params, bucket_cap_mb):
    """Train with one rule and return the parameters after each step."""
    rank = dist.get_rank()
    model = DistributedDataParallel(new_model(), bucket_cap_mb=bucket_cap_mb)
    state = CountingState(rule, **params)
    model.register_comm_hook(state, robust_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
        steps.append(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
    assert state.buckets > 1
    return torch.stack(steps)


def main(cases, folder):
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo", rank=rank, world_size=count, timeout=datetime.timedelta(seconds=30))
    for name, (rule, params) in json.loads(cases).items():
        try:
            steps = trained(rule, params, SMALL)
        except Exception as error:
            print(f"{name}: {error}", flush=True)
            continue
        torch.save(steps, f"{folder}/{name}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
