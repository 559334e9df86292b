"""Worker state that persists between rounds: momentum, optimizer states, residuals and personal models."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F

import fedsim
from fedsim.clients import SGD
from fedsim.core.randomness import sample_cohort
from fedsim.core.rows import Layout
from fedsim.models import logistic
from tests import components
from tests.clients.test_definitions import in_pytorch
from tests.lethal import order
from tests.textbook import Federation, finished

PLAIN = {"rounds": 4, "model": "logistic", "data": "tests.components:tiny", "precision": "float64", "engine": "serial"}
PLAIN |= {"records": {"curve": False}}
TABLES = {**PLAIN, "workers": 7, "cohort": 3, "partition": "tests.components:uneven"}
HALF = {"name": "tests.processing.test_processing:half", "error_feedback": True}
AT_WORKER = {"batch_size": 16, "lr": 0.5, "steps": 3, "momentum": 0.9, "dampening": 0.9, "momentum_at": "worker"}
ALIE = {"attack": {"name": "alie", "workers": [4], "z": 1.5}, "aggregate": {"rule": "median", "nonfinite": "exclude"}}
OWN_BUFFERS = {"model": "tests.models:Normalised", "buffers": "local"}
CASES = {
    "algorithm state and own buffers": {
        **{**OWN_BUFFERS, "local": {"batch_size": 16, "steps": 3, "algorithm": "adam", "keep_optimizer_state": True}},
        "partition": "iid",
    },
    "algorithm state and residuals of updates": {
        "local": {"batch_size": 16, "steps": 3, "lr": 0.1, "momentum": 0.9, "keep_optimizer_state": True},
        "processors": [HALF],
    },
    "momentum and residuals of gradients": {"sync": "gradients", "local": AT_WORKER, "processors": [HALF]},
    "momentum under attack": {"sync": "gradients", "local": AT_WORKER, **ALIE, "cohort": None},
    "mime": {"local": {"algorithm": "mime", "lr": 0.2, "batch_size": 16}},
    "ditto": {"local": {"algorithm": "ditto", "lr": 0.1, "batch_size": 16}, **OWN_BUFFERS, "partition": "iid"},
    "apfl": {"local": {"algorithm": "apfl", "lr": 0.1, "adaptive": True, "batch_size": 16}},
    "learning rates": {"local": {"steps": 2, "schedule": {"name": "cosine", "T_max": 4}}},
}


def run(case, out=None, engine="serial", session=None, **changes):
    tables = {**TABLES, **CASES[case], "engine": engine, **changes}
    resume = {"resume": True} if out else {}
    return fedsim.run(tables, out, session=session, **resume).global_row


whole = cache(run)  # of a case, in one process


@pytest.mark.parametrize("case", list(CASES)[:4])  # the other cases are in engines/test_contract.py
def test_spawn_is_bit_identical_to_serial_and_stacks_agree(case, session):
    serial = whole(case)
    assert torch.equal(serial, run(case, engine="processes", processes=2, session=session))
    stacked = run(case, engine="batched", processes=1, batched={"stack_size": 2})
    assert torch.allclose(serial, stacked, rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_has_bitwise_the_same_result(case, tmp_path):
    """The resumed part has another memory limit for worker state."""
    limit = {} if case in ("mime", "learning rates") else {"worker_state_memory": 1}
    for rounds, changes in ((2, {}), (4, limit)):
        row = run(case, tmp_path / "run", rounds=rounds, checkpoint={"every": 1}, **changes)
    assert torch.equal(row, whole(case))


@pytest.mark.parametrize(
    ("case", "engine"),
    [("algorithm state and residuals of updates", "batched"), ("momentum and residuals of gradients", "processes")],
)
def test_a_round_that_lost_a_process_is_repeated_with_what_was_kept_before(case, engine, tmp_path):
    model = {"name": "tests.lethal:Mortal", "folder": str(tmp_path)}
    tables = {**TABLES, **CASES[case], "model": model}

    def kill_in_round_2(record):
        order(str(tmp_path), *(["train"] if record["round"] == 1 else []))

    with pytest.warns(fedsim.errors.FedsimWarning, match="killed"):
        result = fedsim.run({**tables, "engine": engine, "processes": 2}, on_round=kill_in_round_2)
    serial = fedsim.run({**tables, "engine": "serial"})
    assert torch.allclose(result.global_row, serial.global_row, rtol=0, atol=1e-9 if engine == "batched" else 0)


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "beta1": 0.8, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1}),
}


def with_kept_state(algorithm="adam", **changes):
    local = {"batch_size": 16, "keep_optimizer_state": True, "algorithm": algorithm, **OPTIMIZERS[algorithm][1]}
    return {**PLAIN, "workers": 5, "cohort": 2, "local": local, **changes}


@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_each_worker_s_optimizer_lives_on_between_its_rounds(algorithm):
    """Compare with plain PyTorch: one model and one optimizer per worker, where only the model restarts each round."""
    result = fedsim.run(with_kept_state(algorithm, rounds=6))
    federation = Federation(logistic, components.tiny, 5, 16)
    models = [logistic().double() for _ in range(5)]
    layout = Layout.of(models[0])
    make = in_pytorch(*OPTIMIZERS[algorithm]) if algorithm != "sgd" else partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizers = [make(model.parameters()) for model in models]
    for round in range(1, 7):
        rows = {}
        for worker in sample_cohort(0, round, 5, 2).tolist():
            model, optimizer = models[worker], optimizers[worker]
            layout.write(federation.row, model)
            for x, y in federation.epoch(round, worker):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            rows[worker] = layout.read(model)
        federation.row = federation.average(rows)
    assert torch.allclose(result.global_row, federation.row, rtol=0, atol=1e-12)


def test_a_run_on_the_clock_is_resumed_bit_for_bit(tmp_path):
    changes = {"mode": "clock", "policy": "fedbuff", "clock": {"slowdown": "lognormal"}, "checkpoint": {"every": 1}}
    whole = fedsim.run(with_kept_state(**changes))
    fedsim.run(with_kept_state(**changes, rounds=2), tmp_path / "run")
    resumed = fedsim.run(with_kept_state(**changes), tmp_path / "run", resume=True)
    assert torch.equal(resumed.global_row, whole.global_row)


def with_momentum(engine="serial", local=(), **changes):
    tables = {**PLAIN, "rounds": 3, "workers": 5, "sync": "gradients", "engine": engine, **changes}
    return {**tables, "local": {**AT_WORKER, **dict(local)}}


@pytest.mark.parametrize("dampening", [0.0, 0.9])
def test_partial_cohorts_follow_a_loop_in_plain_pytorch(dampening):
    """Workers outside the cohort keep their momentum; each worker continues with the batches of its own shard."""
    local = {"momentum": 0.9, "dampening": dampening, "weight_decay": 0.01}
    result = fedsim.run(with_momentum(workers=6, cohort=2, rounds=6, aggregate="mean", local=local))
    federation, momenta = Federation(logistic, components.tiny, 6, 16), {}
    for round in range(1, 7):
        cohort = sample_cohort(0, round, 6, 2).tolist()
        batches = {worker: federation.batches(round, worker) for worker in cohort}
        for _ in range(3):
            for worker in cohort:
                gradient = federation.gradient(federation.row, next(batches[worker]))
                momenta[worker] = 0.9 * momenta.get(worker, 0.0) + (1 - dampening) * gradient
            mean = torch.stack([momenta[worker] for worker in cohort]).mean(0)
            federation.row = federation.row - 0.5 * (mean + 0.01 * federation.row)
    assert len(momenta) > 2
    assert torch.allclose(result.global_row, federation.row, rtol=0, atol=1e-12)


def test_dampened_momentum_begins_at_zero():
    """PyTorch does not dampen the first step; from equal states both take the same steps."""
    parameter, params = torch.nn.Parameter(torch.zeros(1)), {"lr": 1.0, "momentum": 0.9, "dampening": 0.5}
    algorithm, theirs, row = SGD(**params), torch.optim.SGD([parameter], **params), torch.zeros(1)
    state, theirs.state[parameter]["momentum_buffer"] = algorithm.start(row), torch.zeros(1)
    for _ in range(2):
        parameter.grad = torch.ones(1)
        theirs.step()
        algorithm.step(row, torch.ones(1), state)
    assert parameter.item() == row.item() == pytest.approx(-1.45)


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_an_excluded_worker_keeps_the_momentum_of_before(engine):
    """Worker 2 has one sample, for which its gradient is not finite, so it is excluded in every round."""
    changes = {"model": "tests.models:OneIsTooFew", "partition": "tests.components:ending_in_one", "workers": 3}
    aggregate = {"rule": "median", "nonfinite": "exclude"}
    run = finished(with_momentum(engine, aggregate=aggregate, processes=1, rounds=2, **changes))
    assert run.row.isfinite().all()
    assert [record.excluded for record in run.records] == [[2], [2]]
    assert {worker: bool(kept["momentum"].any()) for worker, kept in run.states.items()} == {0: True, 1: True}
