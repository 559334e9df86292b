"""Personal models with BatchNorm, trained and tested with statistics of their own: against plain PyTorch in float64."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F

import fedsim
from fedsim.core.randomness import sample_cohort
from fedsim.data import ListedShards, hold_out
from fedsim.records.reader import Run
from tests import models, plugs
from tests.matrix import in_turn
from tests.textbook import Federation, start_of

WORKERS, COHORT, ROUNDS, BATCH, LR = 5, 2, 3, 16, 0.1
TABLES = {
    **{"workers": WORKERS, "cohort": COHORT, "rounds": ROUNDS, "model": "tests.models:Normalised"},
    **{"data": {"dataset": "tests.plugs:tiny", "worker_test": 0.25}, "partition": "shards", "precision": "float64"},
    **{"evaluation": {"fine_tune": 1}, "records": {"curve": False}},
}
ENGINES = {
    "serial": {"engine": "serial"},
    "batched": {"engine": "batched", "processes": 1, "batched": {"width": 3}},
    "spawn": {"engine": "spawn", "processes": 2},
}


class Workers(Federation):
    """The workers of `TABLES`: their batches, their test samples, and their cohorts."""

    def __init__(self):
        super().__init__(models.Normalised, plugs.tiny, WORKERS, BATCH, "shards")
        trains, self.tests = hold_out(ListedShards.of_arrays([shard.numpy() for shard in self.shards]), 0.25, seed=0)
        self.shards = [trains.of(worker) for worker in range(WORKERS)]
        self.cohorts = [sample_cohort(0, round, WORKERS, COHORT).tolist() for round in range(1, ROUNDS + 1)]

    def test_loss(self, model, worker):
        inputs, targets = self.train.gather(self.tests.of(worker))
        with torch.no_grad():
            return F.cross_entropy(deepcopy(model).eval()(inputs), targets).item()


@pytest.fixture(scope="module")
def workers():
    return Workers()


def losses_of(local, out, session=None, **changes):
    """The test losses of the workers' personal models, and of those after local training."""
    local = {"batch_size": BATCH, "lr": LR, **local}
    fedsim.run({**TABLES, "engine": "serial", **changes, "local": local}, out, session=session)
    found = Run.read(out).workers
    assert found.workers == list(range(WORKERS))
    return [found.loss["personal"], found.loss["fine_tuned"]]


def sgd_step(model, batch):
    model.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= LR * parameter.grad


def alone(workers):
    """The losses of one model for each worker, which nothing but the worker's batches changes."""
    personal = [start_of(models.Normalised) for _ in range(WORKERS)]
    for round, cohort in enumerate(workers.cohorts, 1):
        for k in cohort:
            for batch in workers.epoch(round, k):
                sgd_step(personal[k], batch)
    losses = [[workers.test_loss(model, k) for k, model in enumerate(personal)]]
    for k, model in enumerate(personal):
        for batch in workers.epoch(ROUNDS, k):
            sgd_step(model, batch)
    return [*losses, [workers.test_loss(model, k) for k, model in enumerate(personal)]]


ALONE = {
    "local_only": {"solver": "local_only"},
    "ditto": {"solver": "ditto", "lam": 0.0},
    "apfl": {"solver": "apfl", "alpha": 1.0},
}


@in_turn(("name", "engine"), ALONE, ENGINES)
@pytest.mark.parametrize("buffers", ["average", pytest.param("local", marks=pytest.mark.slow)])
def test_a_model_that_the_global_one_does_not_pull_is_trained_and_tested_alone(
    name, engine, buffers, workers, tmp_path, session
):
    found = losses_of(ALONE[name], tmp_path / "run", session, buffers=buffers, **ENGINES[engine])
    assert found == [pytest.approx(expected, rel=1e-9) for expected in alone(workers)]


def pfedme(workers, eta, lam, inner_steps):
    """Each theta has statistics of its own, from all of its passes; that of a new worker begins as the global model."""
    server, thetas = start_of(models.Normalised), {}

    def train(k, theta, batches):
        x = deepcopy(server).train()
        for batch in batches:
            with torch.no_grad():
                x(batch[0])  # changes the statistics of x
                for ours, start in zip(theta.parameters(), x.parameters(), strict=True):
                    ours.copy_(start)
            for _ in range(inner_steps):
                pulls = [lam * (a - b).detach() for a, b in zip(theta.parameters(), x.parameters(), strict=True)]
                sgd_step(theta, batch)
                with torch.no_grad():
                    for parameter, pull in zip(theta.parameters(), pulls, strict=True):
                        parameter -= LR * pull
            with torch.no_grad():
                for ours, near in zip(x.parameters(), theta.parameters(), strict=True):
                    ours -= eta * lam * (ours - near)
        return x

    for round, cohort in enumerate(workers.cohorts, 1):
        states, sizes = [], [len(workers.shards[k]) for k in cohort]
        for k in cohort:
            theta = thetas.setdefault(k, deepcopy(server))
            states.append(train(k, theta, workers.epoch(round, k)).state_dict())
        for name, mean in server.state_dict().items():
            mean.copy_(sum(n * state[name] for n, state in zip(sizes, states, strict=True)) / sum(sizes))
    assert len(thetas) < WORKERS
    personal = [thetas.get(k, deepcopy(server)) for k in range(WORKERS)]
    losses = [[workers.test_loss(theta, k) for k, theta in enumerate(personal)]]
    for k, theta in enumerate(personal):
        train(k, theta, workers.epoch(ROUNDS, k))
    return [*losses, [workers.test_loss(theta, k) for k, theta in enumerate(personal)]]


@in_turn(("inner_steps", "engine"), [1, 3], list(ENGINES)[:2])
def test_theta_of_pfedme_is_tested_with_its_own_statistics(inner_steps, engine, workers, tmp_path):
    params = {"eta": 0.1, "lam": 2.0, "inner_steps": inner_steps}
    found = losses_of({"solver": "pfedme", **params}, tmp_path / "run", **ENGINES[engine])
    assert found == [pytest.approx(expected, rel=1e-9) for expected in pfedme(workers, **params)]
