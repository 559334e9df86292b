"""What more than one test compares with, in plain PyTorch."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from fedsim.core.randomness import batch_order
from fedsim.models import two_nn


def small_two_nn():
    """The model of the fixture `tiny_experiment`: 16,330 parameters."""
    return two_nn(hidden=20)


def train_on_joint_batches(model, optimizer, train, shards, rounds, batch_size=16, seed=0):
    """Synchronous SGD as one process does it: each step on what all workers' batches hold together."""
    for round in rounds:
        orders = [batch_order(seed, round, worker, 0, len(shard)) for worker, shard in enumerate(shards)]
        for start in range(0, max(map(len, shards)), batch_size):
            batches = [s.indices[order[start : start + batch_size]] for s, order in zip(shards, orders, strict=True)]
            inputs, targets = train.gather(torch.from_numpy(np.concatenate(batches)))
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
