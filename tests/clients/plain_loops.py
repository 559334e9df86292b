"""Client algorithms as plain loops over float64 rows, written from the published definitions alone."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from fedsim.core.randomness import sample_cohort
from tests import components, models
from tests.textbook import Federation

WORKERS, COHORT, ROUNDS, BATCH = 5, 3, 4, 16
MODEL = {"name": "tests.models:sized", "hidden": [6]}
TABLES = {
    **{"workers": WORKERS, "cohort": COHORT, "rounds": ROUNDS, "model": MODEL, "data": "tests.components:tiny"},
    **{"partition": "tests.components:uneven", "precision": "float64", "records": {"figures": []}},
}


class Workers(Federation):
    """The workers of the experiment `TABLES`."""

    def __init__(self):
        super().__init__(partial(models.sized, hidden=(6,)), components.tiny, WORKERS, BATCH, "tests.components:uneven")
        self.start, self.personal = self.row, {}

    def cohorts(self):
        return [sample_cohort(0, round, WORKERS, COHORT).tolist() for round in range(1, ROUNDS + 1)]

    def batches(self, round, worker):
        """Return the batches of two epochs."""
        return [*self.epoch(round, worker), *self.epoch(round, worker, 1)]

    def full_gradient(self, row, worker):
        return self.gradient(row, self.train.gather(self.shards[worker]))


def averaged(train):
    """Turn `train(fed, worker, batches, **params)`, which returns a trained row, into a loop that averages these rows.

    The loop returns the workers' personal models.
    """

    def loop(fed, *, beta=1, **params):
        for round, cohort in enumerate(fed.cohorts(), 1):
            rows = {k: train(fed, k, fed.batches(round, k), **params) for k in cohort}
            fed.row = (1 - beta) * fed.row + beta * fed.average(rows)
        return fed.personal

    return loop


@averaged
def fedsam(fed, k, batches, lr, rho):
    x = fed.row
    for batch in batches:
        g = fed.gradient(x, batch)
        x = x - lr * fed.gradient(x + rho * g / g.norm(), batch)
    return x


@averaged
def ditto(fed, k, batches, lr, lam, personal_steps=None):
    x, v = fed.row, fed.personal.setdefault(k, fed.start)
    for step, batch in enumerate(batches):
        x = x - lr * fed.gradient(x, batch)
        if personal_steps is None or step < personal_steps:
            v = v - lr * (fed.gradient(v, batch) + lam * (v - fed.row))
    fed.personal[k] = v
    return x


@averaged
def pfedme(fed, k, batches, lr, eta, lam, inner_steps):
    x = fed.row
    for batch in batches:
        theta = x
        for _ in range(inner_steps):
            theta = theta - lr * (fed.gradient(theta, batch) + lam * (theta - x))
        x = x - eta * lam * (x - theta)
    fed.personal[k] = theta
    return x


def apfl(fed, lr, alpha, adaptive=False):
    personal, alphas = dict.fromkeys(range(WORKERS), fed.row), dict.fromkeys(range(WORKERS), alpha)

    @averaged
    def mixed(fed, k, batches):
        x, v, share = fed.row, personal[k], alphas[k]
        for batch in batches:
            g = fed.gradient(share * v + (1 - share) * x, batch)
            change = (v - x) @ g
            x, v = x - lr * fed.gradient(x, batch), v - lr * share * g
            if adaptive:
                share = float((share - lr * change).clamp(0, 1))
        personal[k], alphas[k] = v, share
        return x

    mixed(fed)
    return {k: alphas[k] * personal[k] + (1 - alphas[k]) * fed.row for k in range(WORKERS)}


@averaged
def per_fedavg(fed, k, batches, lr, inner_lr):
    x = fed.row
    for first, second in zip(batches[::2], batches[1::2], strict=False):
        ahead = x - inner_lr * fed.gradient(x, first)
        x = x - lr * fed.gradient(ahead, second)
    return x


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


def scaffold(fed, lr, option=2, weight_decay=0.0):
    c, c_of = 0 * fed.row, dict.fromkeys(range(WORKERS), 0 * fed.row)
    for round, cohort in enumerate(fed.cohorts(), 1):
        x, rows, changes = fed.row, [], []
        for k in cohort:
            y, steps = x, 0
            for batch in fed.batches(round, k):
                y, steps = y - lr * (fed.gradient(y, batch) + weight_decay * y - c_of[k] + c), steps + 1
            whole = fed.full_gradient(x, k) + weight_decay * x
            renewed = whole if option == 1 else c_of[k] - c + (x - y) / (steps * lr)
            rows.append(y)
            changes.append(renewed - c_of[k])
            c_of[k] = renewed
        fed.row = sum(rows) / COHORT
        c = c + sum(changes) / WORKERS
    return {}


def fednova(fed, lr, momentum=0.0, nesterov=False, weight_decay=0.0, weighted=True):
    """FedNova, where the vector a of each worker has one element per local step."""
    for round, cohort in enumerate(fed.cohorts(), 1):
        normalised, norms, x = [], [], fed.row
        for k in cohort:
            y, v, a, a_of_v = x, 0, *torch.zeros(2, 200).double()
            for step, batch in enumerate(fed.batches(round, k)):
                one_hot = F.one_hot(torch.tensor(step), 200)
                g = fed.gradient(y, batch) + weight_decay * y
                v, a_of_v = momentum * v + g, momentum * a_of_v + one_hot
                y, a = (
                    (y - lr * (g + momentum * v), a + one_hot + momentum * a_of_v)
                    if nesterov
                    else (y - lr * v, a + a_of_v)
                )
            norms.append(a.norm(1))
            normalised.append((y - x) / norms[-1])
        p = torch.tensor([len(fed.shards[k]) if weighted else 1 for k in cohort]).double()
        p = p / p.sum()
        fed.row = x + p @ torch.stack(norms) * (p @ torch.stack(normalised))
    return {}


def feddyn(fed, lr, alpha, momentum=0.0, weight_decay=0.0):
    h, h_of = 0 * fed.row, dict.fromkeys(range(WORKERS), 0 * fed.row)
    for round, cohort in enumerate(fed.cohorts(), 1):
        w, rows = fed.row, []
        for k in cohort:
            x, v = w, 0
            for batch in fed.batches(round, k):
                v = momentum * v + fed.gradient(x, batch) + weight_decay * x - h_of[k] + alpha * (x - w)
                x = x - lr * v
            h_of[k] = h_of[k] - alpha * (x - w)
            rows.append(x)
        h = h - alpha / WORKERS * sum(x - w for x in rows)
        fed.row = sum(rows) / COHORT - h / alpha
    return {}
