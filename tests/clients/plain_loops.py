"""Client algorithms as plain loops over float64 rows, written from their definitions alone."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

import fedsim
from fedsim.core.randomness import batch_order, draw_key, sample_cohort
from fedsim.core.rows import Layout
from tests import plugs

WORKERS, COHORT, ROUNDS, BATCH = 5, 3, 4, 16
MODEL = {"name": "tests.plugs:sized", "hidden": [6]}
TABLES = {
    **{"workers": WORKERS, "cohort": COHORT, "rounds": ROUNDS, "model": MODEL, "data": "tests.plugs:tiny"},
    **{"partition": "tests.plugs:uneven", "precision": "float64"},
}


class Federation:
    """The workers of `TABLES`: their cohorts, batches and gradients. `row` is the global model."""

    def __init__(self):
        train, _ = plugs.tiny(None)
        train = train.to(torch.device("cpu"), torch.float64)
        self.shards = fedsim.dataset_split(train, WORKERS, "tests.plugs:uneven", seed=0)
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(draw_key(0, "model"))
            self.model = plugs.sized(hidden=(6,)).double()
        self.row = Layout.of(self.model).read(self.model)

    def cohorts(self):
        return [sample_cohort(0, round, WORKERS, COHORT).tolist() for round in range(1, ROUNDS + 1)]

    def batches(self, round, worker, epochs=2):
        shard = self.shards[worker]
        for epoch in range(epochs):
            inputs, targets = shard.gather(batch_order(0, round, worker, epoch, len(shard)))
            yield from zip(inputs.split(BATCH), targets.split(BATCH), strict=True)

    def gradient(self, row, batch):
        leaf = row.clone().requires_grad_()
        shapes = [parameter.shape for parameter in self.model.parameters()]
        parts = leaf.split([shape.numel() for shape in shapes])
        names = [name for name, _ in self.model.named_parameters()]
        parameters = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        loss = F.cross_entropy(torch.func.functional_call(self.model, parameters, (batch[0],)), batch[1])
        return torch.autograd.grad(loss, leaf)[0]

    def full_gradient(self, row, worker):
        return self.gradient(row, self.shards[worker].gather(np.arange(len(self.shards[worker]))))

    def average(self, rows):
        """The mean of the workers' rows, weighted by their samples."""
        total = sum(len(self.shards[worker]) for worker in rows)
        return sum(len(self.shards[worker]) / total * row for worker, row in rows.items())


def sgd(fed, lr):
    for round, cohort in enumerate(fed.cohorts(), 1):
        rows = {}
        for k in cohort:
            x = fed.row
            for batch in fed.batches(round, k):
                x = x - lr * fed.gradient(x, batch)
            rows[k] = x
        fed.row = fed.average(rows)
    return {}


def fedsam(fed, lr, rho):
    for round, cohort in enumerate(fed.cohorts(), 1):
        rows = {}
        for k in cohort:
            x = fed.row
            for batch in fed.batches(round, k):
                g = fed.gradient(x, batch)
                x = x - lr * fed.gradient(x + rho * g / g.norm(), batch)
            rows[k] = x
        fed.row = fed.average(rows)
    return {}


def mimelite(fed, lr, beta, corrects=False):
    m = torch.zeros_like(fed.row)
    for round, cohort in enumerate(fed.cohorts(), 1):
        w, rows = fed.row, {}
        c = sum(fed.full_gradient(w, k) for k in cohort) / len(cohort)
        for k in cohort:
            x = w
            for batch in fed.batches(round, k):
                g = fed.gradient(x, batch)
                if corrects:
                    g = g - fed.gradient(w, batch) + c
                x = x - lr * ((1 - beta) * g + beta * m)
            rows[k] = x
        fed.row = fed.average(rows)
        m = beta * m + (1 - beta) * c
    return {}


def mime(fed, lr, beta):
    return mimelite(fed, lr, beta, corrects=True)


def ditto(fed, lr, lam, personal_steps=None):
    personal = dict.fromkeys(range(WORKERS), fed.row)
    for round, cohort in enumerate(fed.cohorts(), 1):
        w, rows = fed.row, {}
        for k in cohort:
            x, v = w, personal[k]
            for step, batch in enumerate(fed.batches(round, k)):
                x = x - lr * fed.gradient(x, batch)
                if personal_steps is None or step < personal_steps:
                    v = v - lr * (fed.gradient(v, batch) + lam * (v - w))
            rows[k], personal[k] = x, v
        fed.row = fed.average(rows)
    return personal


def pfedme(fed, lr, eta, lam, inner_steps, beta):
    personal = dict.fromkeys(range(WORKERS), fed.row)
    for round, cohort in enumerate(fed.cohorts(), 1):
        rows = {}
        for k in cohort:
            x = fed.row
            for batch in fed.batches(round, k):
                theta = x
                for _ in range(inner_steps):
                    theta = theta - lr * (fed.gradient(theta, batch) + lam * (theta - x))
                x = x - eta * lam * (x - theta)
            rows[k], personal[k] = x, theta
        fed.row = (1 - beta) * fed.row + beta * fed.average(rows)
    return personal


def apfl(fed, lr, alpha, adaptive=False):
    own, alphas = dict.fromkeys(range(WORKERS), fed.row), dict.fromkeys(range(WORKERS), alpha)
    for round, cohort in enumerate(fed.cohorts(), 1):
        rows = {}
        for k in cohort:
            x, v, share = fed.row, own[k], alphas[k]
            for batch in fed.batches(round, k):
                g = fed.gradient(share * v + (1 - share) * x, batch)
                change = (v - x) @ g
                x, v = x - lr * fed.gradient(x, batch), v - lr * share * g
                if adaptive:
                    share = float((share - lr * change).clamp(0, 1))
            rows[k], own[k], alphas[k] = x, v, share
        fed.row = fed.average(rows)
    return {k: alphas[k] * own[k] + (1 - alphas[k]) * fed.row for k in range(WORKERS)}


def per_fedavg(fed, lr, inner_lr):
    for round, cohort in enumerate(fed.cohorts(), 1):
        rows = {}
        for k in cohort:
            x, batches = fed.row, list(fed.batches(round, k))
            for first, second in zip(batches[::2], batches[1::2], strict=False):
                ahead = x - inner_lr * fed.gradient(x, first)
                x = x - lr * fed.gradient(ahead, second)
            rows[k] = x
        fed.row = fed.average(rows)
    return {}
