"""Client algorithms against loops in plain PyTorch, written from the definitions in their papers, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import fedsim
from fedsim.clients import FedNova, Scaffold, WorkerFacts, WorkerRound
from fedsim.core.randomness import sample_cohort
from fedsim.models import logistic
from tests import plugs
from tests.textbook import Federation

WORKERS, COHORT, ROUNDS, EPOCHS, BATCH, LR, D = 5, 3, 4, 2, 16, 0.05, 7850


def run(rounds=ROUNDS, **changes):
    """The experiment: uneven shards, partial cohorts, several epochs, softmax regression."""
    local = {"lr": LR, "epochs": EPOCHS, "batch_size": BATCH, **changes.pop("local")}
    tables = {"workers": WORKERS, "cohort": COHORT, "partition": "tests.plugs:uneven", "model": "logistic", **changes}
    fixed = {"data": "tests.plugs:tiny", "precision": "float64", "engine": "serial", "rounds": rounds}
    return fedsim.run({**fixed, **tables, "local": local})


class Workers(Federation):
    """The workers of these experiments."""

    def __init__(self) -> None:
        super().__init__(logistic, plugs.tiny, WORKERS, BATCH, "tests.plugs:uneven")
        self.sizes = [len(shard) for shard in self.shards]
        assert len(set(self.sizes)) == WORKERS
        self.data = [self.train.gather(shard) for shard in self.shards]

    def cohorts(self):
        for round in range(1, ROUNDS + 1):
            yield round, sample_cohort(0, round, WORKERS, COHORT).tolist()

    def batches(self, round, worker):
        """Those of all epochs."""
        return [batch for epoch in range(EPOCHS) for batch in self.epoch(round, worker, epoch)]


@pytest.fixture(scope="module")
def workers():
    return Workers()


@pytest.mark.parametrize("option", [1, 2])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_scaffold(option, weight_decay, workers):
    x, c, c_of = workers.row, torch.zeros(D).double(), torch.zeros(WORKERS, D).double()
    for round, cohort in workers.cohorts():
        updates, changes = [], []
        for k in cohort:
            y, steps = x, 0
            for batch in workers.batches(round, k):
                y, steps = y - LR * (workers.gradient(y, batch) + weight_decay * y - c_of[k] + c), steps + 1
            whole = workers.gradient(x, workers.data[k]) + weight_decay * x
            renewed = whole if option == 1 else c_of[k] - c + (x - y) / (steps * LR)
            updates.append(y - x)
            changes.append(renewed - c_of[k])
            c_of[k] = renewed
        x = x + torch.stack(updates).mean(0)
        c = c + COHORT / WORKERS * torch.stack(changes).mean(0)
    local = {"solver": "scaffold", "option": option, "weight_decay": weight_decay}
    result = run(local=local, aggregate="mean")
    assert torch.allclose(result.global_row, x, rtol=0, atol=1e-11)
    assert {(record["bytes_down"], record["bytes_up"]) for record in result.history} == {(2 * COHORT * D * 8,) * 2}


@pytest.mark.parametrize("params", [{}, {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True, "weight_decay": 0.1}])
@pytest.mark.parametrize("rule", ["mean", "weighted_mean"])
def test_fednova(params, rule, workers):
    """The vector a of each worker has one element for each of its steps."""
    r, nesterov, decay = (params.get(name, 0.0) for name in ("momentum", "nesterov", "weight_decay"))
    x = workers.row
    for round, cohort in workers.cohorts():
        normalised, norms, weights = [], [], []
        for k in cohort:
            y, v, a, a_of_v = x, 0, *torch.zeros(2, 200).double()
            for step, batch in enumerate(workers.batches(round, k)):
                one = F.one_hot(torch.tensor(step), 200)
                g = workers.gradient(y, batch) + decay * y
                v, a_of_v = r * v + g, r * a_of_v + one
                y, a = (y - LR * (g + r * v), a + one + r * a_of_v) if nesterov else (y - LR * v, a + a_of_v)
            norms.append(a.norm(1).item())
            normalised.append((y - x) / norms[-1])
            weights.append(workers.sizes[k] if rule == "weighted_mean" else 1)
        p = torch.tensor(weights).double() / sum(weights)
        x = x + p @ torch.tensor(norms, dtype=torch.double) * (p @ torch.stack(normalised))
    result = run(local={"solver": "fednova", **params}, aggregate=rule)
    assert torch.allclose(result.global_row, x, rtol=0, atol=1e-11)
    assert {record["bytes_up"] - record["bytes_down"] for record in result.history} == {COHORT * 2 * 8}


@pytest.mark.parametrize("params", [{"alpha": 0.3}, {"alpha": 0.1, "momentum": 0.9, "weight_decay": 0.1}])
def test_feddyn(params, workers):
    a, r, decay = params["alpha"], params.get("momentum", 0.0), params.get("weight_decay", 0.0)
    w, h, h_of = workers.row, torch.zeros(D).double(), torch.zeros(WORKERS, D).double()
    for round, cohort in workers.cohorts():
        models = []
        for k in cohort:
            x, v = w, 0
            for batch in workers.batches(round, k):
                v = r * v + workers.gradient(x, batch) + decay * x - h_of[k] + a * (x - w)
                x = x - LR * v
            h_of[k] -= a * (x - w)
            models.append(x)
        h = h - a / WORKERS * sum(x - w for x in models)
        w = torch.stack(models).mean(0) - h / a
    result = run(local={"solver": "feddyn", **params}, aggregate="mean")
    assert torch.allclose(result.global_row, w, rtol=0, atol=1e-11)
    assert {(record["bytes_down"], record["bytes_up"]) for record in result.history} == {(COHORT * D * 8,) * 2}


def test_scaffold_of_one_worker_is_sgd():
    """Its control is the server's, so nothing is corrected; in the first round of any cohort neither."""
    alone = {"workers": 1, "cohort": 1}
    scaffold, sgd = (run(local={"solver": name}, **alone).global_row for name in ("scaffold", "sgd"))
    assert torch.allclose(scaffold, sgd, rtol=0, atol=1e-12)
    first, plain = (run(1, local={"solver": name}, aggregate="mean").global_row for name in ("scaffold", "sgd"))
    assert torch.equal(first, plain)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_with_equal_steps_is_fedavg(momentum):
    """The weights differ all the same."""
    fednova, sgd = (
        run(local={"solver": name, "momentum": momentum, "epochs": None, "steps": 4}).global_row
        for name in ("fednova", "sgd")
    )
    assert torch.allclose(fednova, sgd, rtol=0, atol=1e-12)


def test_the_first_round_of_feddyn_with_a_small_alpha_goes_further_along_the_update_of_fedavg(workers):
    """w = mean x_k - h / alpha, and h / alpha = -|S| / N times the mean of the x_k - w, whatever alpha is."""
    feddyn = run(1, local={"solver": "feddyn", "alpha": 1e-9}, aggregate="mean").global_row - workers.row
    fedavg = run(1, local={"solver": "sgd"}, aggregate="mean").global_row - workers.row
    assert torch.allclose(feddyn, (1 + COHORT / WORKERS) * fedavg, rtol=0, atol=1e-8)


def test_a_worker_that_takes_no_step_keeps_its_control_variate():
    """With option 2, whose (x - y) / (K lr) is 0 / 0 then; so does a worker whose learning rate is 0."""
    kept, control = {"c_k": torch.full((2, 3), 5.0)}, torch.ones(3)
    facts = [WorkerFacts(worker=k, round=1, steps=k, steps_per_epoch=k, samples=k, weight=1.0) for k in (0, 2)]
    algorithm, rows = Scaffold(lr=0.5), torch.zeros(2, 3)
    worker = WorkerRound({"c": control}, kept, facts, rows)
    state = algorithm.start_round(rows, worker)
    rows[1] -= 4
    assert algorithm.finish(rows, state, worker)["change"].tolist() == [[0, 0, 0], [3, 3, 3]]
    assert kept["c_k"].tolist() == [[5, 5, 5], [8, 8, 8]]
    state = algorithm.start_round(torch.zeros(2, 3), worker)
    unmoved = replace(algorithm, lr=0.0).finish(torch.zeros(2, 3), state, worker)
    assert not unmoved["change"].any()


def test_the_update_of_a_worker_that_takes_no_step_is_zero_in_fednova():
    facts = [WorkerFacts(worker=0, round=1, steps=0, steps_per_epoch=0, samples=0, weight=2.0)]
    rows = torch.ones(1, 3)
    messages = FedNova().finish(rows, {"start": torch.ones(1, 3)}, WorkerRound({}, {}, facts, rows))
    assert rows.tolist() == [[1, 1, 1]]
    assert [message.item() for message in messages.values()] == [2, 0]
