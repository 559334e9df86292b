"""Post-local SGD with PyTorch's own classes on joined ranks, the reference for `sync = "post_local"`."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import fedsim
from fedsim.core.randomness import batch_order
from fedsim.core.rows import Layout
from fedsim.models import two_nn
from tests import components
from tests.textbook import start_of

SAMPLES, BATCH, LR, SWITCH, ROUNDS = 200, 20, 0.1, 2, 4
TABLES = {
    **{"rounds": ROUNDS, "workers": 2, "model": "2nn", "data": {"name": "tests.components:tiny", "train": SAMPLES}},
    **{"sync": "post_local", "switch_after_round": SWITCH, "local": {"batch_size": BATCH, "lr": LR}},
    **{"aggregate": "mean", "precision": "float64"},
}


def post_local_row() -> torch.Tensor:
    """Return the averaged model [d] of one worker per rank, trained on fedsim's batches."""
    from torch.distributed.optim import PostLocalSGDOptimizer  # warns on import

    rank, count = dist.get_rank(), dist.get_world_size()
    train = components.tiny(None, train=SAMPLES)[0].to(torch.device("cpu"), torch.float64)
    shard = fedsim.dataset_split(train, "iid", count, seed=0)[rank]
    steps = SAMPLES // count // BATCH  # per round
    model = DistributedDataParallel(start_of(two_nn))
    state = PostLocalSGDState(None, None, SWITCH * steps, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=steps, warmup_steps=SWITCH * steps + steps - 1)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=LR), averager)
    for round in range(1, ROUNDS + 1):
        order = batch_order(0, round, rank, 0, len(shard))
        for start in range(0, len(order), BATCH):
            inputs, targets = train.gather(shard.indices[order[start : start + BATCH]])
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return Layout.of(model.module).read(model.module)
