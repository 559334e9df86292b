"""Reference implementations in plain PyTorch that several tests share."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

import fedsim
from fedsim.core.randomness import batch_order, draw_key
from fedsim.core.rows import Layout
from fedsim.models import two_nn
from fedsim.runs.loops.synchronous import SynchronousLoop
from fedsim.runs.setup import begun


def small_two_nn():
    """Return the model of the fixture `tiny_experiment` (16,330 parameters)."""
    return two_nn(hidden=20)


def start_of(factory, seed=0, dtype=torch.float64):
    """Return the initial model of a run with this seed, created without the engines."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(draw_key(seed, "model"))
        return factory().to(dtype)


class Federation:
    """The workers of a run with seed 0: their shards, batches and gradients. `row` is the global model.

    Args:
        factory: function that creates the model.
        data: function that returns (train, test).
        workers, strategy, params: number of workers, and the partition with its parameters.
        batch_size: batch size of the workers.
    """

    def __init__(self, factory, data, workers, batch_size, strategy="iid", dtype=torch.float64, **params):
        self.train = data(None)[0].to(torch.device("cpu"), dtype)
        shards = fedsim.partition(self.train.targets, strategy, workers, seed=0, **params)
        self.shards, self.batch_size = [torch.from_numpy(shard) for shard in shards], batch_size
        self.model = start_of(factory, dtype=dtype)
        self.row = Layout.of(self.model).read(self.model)

    def epoch(self, round, worker, epoch=0):
        """Return the batches (inputs, targets) of an epoch."""
        shard = self.shards[worker]
        order = shard[batch_order(0, round, worker, epoch, len(shard))]
        return [self.train.gather(positions) for positions in order.split(self.batch_size)]

    def batches(self, round, worker):
        """Yield the batches of one epoch after another, without end."""
        for epoch in itertools.count():
            yield from self.epoch(round, worker, epoch)

    def loss(self, row, batch):
        """Return the mean loss of the model with this row on a batch."""
        shapes = [parameter.shape for parameter in self.model.parameters()]
        parts = row.split([shape.numel() for shape in shapes])
        names = [name for name, _ in self.model.named_parameters()]
        parameters = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return F.cross_entropy(torch.func.functional_call(self.model, parameters, (batch[0],)), batch[1])

    def gradient(self, row, batch):
        leaf = row.clone().requires_grad_()
        return torch.autograd.grad(self.loss(leaf, batch), leaf)[0]

    def average(self, rows):
        """Return the mean of the workers' rows, weighted by their sample counts."""
        total = sum(len(self.shards[worker]) for worker in rows)
        return sum(len(self.shards[worker]) / total * row for worker, row in rows.items())


def train_on_joint_batches(model, optimizer, train, shards, rounds, batch_size=16, seed=0):
    """Train with synchronous SGD in one process: each step uses the batches of all workers together."""
    for round in rounds:
        orders = [batch_order(seed, round, worker, 0, len(shard)) for worker, shard in enumerate(shards)]
        for start in range(0, max(map(len, shards)), batch_size):
            batches = [s.indices[order[start : start + batch_size]] for s, order in zip(shards, orders, strict=True)]
            inputs, targets = train.gather(torch.from_numpy(np.concatenate(batches)))
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()


def finished(tables):
    """Run synchronous rounds and return their results as a namespace.

    Attributes: `start` and `row` (global rows), `models` (row and buffers of each global model), `buffers` of the last
    cohort, `records`, `updates` of the last round, `algorithm`, `states` (each participant's worker state by name) and
    `initial` (the state of all other workers).
    """
    experiment = fedsim.Experiment(**tables)
    with fedsim.Session() as session, begun(experiment, session) as (task, engine):
        loop, start = SynchronousLoop(task, engine), engine.shared.server.row.clone()
        records = [loop.run_round(round) for round in range(1, experiment.rounds + 1)]
        saved = engine.states.tensors()
        workers = saved.pop("workers").tolist() if saved else []
        rows = {name.removeprefix("rows."): tensor.clone() for name, tensor in saved.items()}
        states = {worker: {name: rows[name][place] for name in rows} for place, worker in enumerate(workers)}
        updates, buffers = engine.round_rows(records[-1].cohort)
        models = [tuple(map(torch.clone, engine.shared.server.model(c))) for c in range(task.algorithm.clusters)]
        return SimpleNamespace(
            **{"start": start, "row": engine.shared.server.row.clone(), "records": records, "updates": updates.clone()},
            **{"algorithm": task.algorithm, "states": states, "initial": engine.states.initial},
            **{"models": models, "buffers": buffers.clone()},
        )
