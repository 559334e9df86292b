"""Learning-rate schedules equal PyTorch's in every engine and keep no state."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.optim import lr_scheduler

import fedsim
from fedsim.errors import ExperimentError
from fedsim.runs.setup import task_of
from tests.clients.test_local_work import BATCH, ENGINES, EXPERIMENT, LR, averaged, of_local, round_of

SCHEDULES = {
    "step": ({"name": "step", "step_size": 2}, lambda o: lr_scheduler.StepLR(o, 2)),
    "multi_step": (
        {"name": "multi_step", "milestones": [1, 4], "gamma": 0.5},
        lambda o: lr_scheduler.MultiStepLR(o, [1, 4], 0.5),
    ),
    "exponential": ({"name": "exponential", "gamma": 0.9}, lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
    "linear": ({"name": "linear", "total_iters": 4}, lambda o: lr_scheduler.LinearLR(o, total_iters=4)),
    "constant": (
        {"name": "constant", "factor": 0.5, "total_iters": 2},
        lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=2),
    ),
    "cosine": ({"name": "cosine", "eta_min": 0.01}, lambda o: lr_scheduler.CosineAnnealingLR(o, 6, 0.01)),
    "cosine of 3 rounds": ({"name": "cosine", "T_max": 3}, lambda o: lr_scheduler.CosineAnnealingLR(o, 3)),
    "one_cycle": (
        {"name": "one_cycle", "pct_start": 0.5},
        lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=6, pct_start=0.5, cycle_momentum=False),
    ),
}


def task(**tables):
    return task_of(fedsim.Experiment(rounds=6, **tables), torch.device("cpu"))


def rates_of_torch(make, lr, count):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    scheduler, rates = make(optimizer), []
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("case", SCHEDULES)
def test_the_rates_equal_those_of_pytorch(case):
    table, make = SCHEDULES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_rounds = task(local={"lr": 0.3, "schedule": table})
        rates = [by_rounds.algorithm_at(round, step=7).lr for round in range(1, 7)]
    last_step = 6 if case == "one_cycle" else 5
    expected = rates_of_torch(make, 0.3, last_step)
    assert rates[: len(expected)] == expected[:6]
    by_steps = task(local={"lr": 0.3, "steps": 6, "schedule": {**table, "per": "step"}})
    assert [by_steps.algorithm_at(4, step).lr for step in range(6)] == rates
    of_server = task(server={"lr": 0.3, "schedule": table})
    assert [of_server.server_at(round).lr for round in (6, 1)] == [rates[5], rates[0]]


def test_the_rate_grows_linearly_in_the_warm_up():
    warmed = task(local={"lr": 0.3, "schedule": {"name": "cosine", "warmup": 2}})
    expected = [0.15, 0.3, *rates_of_torch(lambda o: lr_scheduler.CosineAnnealingLR(o, 4), 0.3, 4)]
    assert [warmed.algorithm_at(round).lr for round in range(1, 7)] == pytest.approx(expected, rel=1e-12)
    constant = task(local={"lr": 0.3, "schedule": {"warmup": 3}})
    rates = [constant.experiment.local_lr_at(round) for round in range(1, 6)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.3, 0.3], rel=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("per", ["round", "step"])
def test_training_equals_a_loop_of_pytorch(per, engine):
    schedule = {"name": "exponential", "gamma": 0.5, "per": per}
    tables = of_local(steps=[3, 1, 5, 4], momentum=0.5, schedule=schedule)
    row = fedsim.run({**tables, **ENGINES[engine]}).global_row
    train_round = round_of(momentum=0.5, gamma=0.5, per=per)
    expected = averaged(lambda worker, round: [3, 1, 5, 4][worker], train_round)
    assert torch.allclose(row, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("per", ["round", "step"])
def test_averaged_gradients_step_by_the_rate_of_their_round_or_step(per):
    """With one worker, synchronous SGD equals federated averaging."""
    local = {"batch_size": BATCH, "lr": LR, "schedule": {"name": "exponential", "gamma": 0.5, "per": per}}
    tables = {**EXPERIMENT, "workers": 1, "local": local}
    rows = [fedsim.run({**tables, "sync": sync}).global_row for sync in ("parameters", "gradients")]
    assert torch.allclose(*rows, rtol=0, atol=1e-12)
    constant = fedsim.run({**tables, "local": {"batch_size": BATCH, "lr": LR}}).global_row
    assert not torch.allclose(rows[0], constant, rtol=0, atol=1e-3)


def ended(optimizer, *, rounds: int = 2):
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=rounds, cycle_momentum=False)


@pytest.mark.parametrize("per", ["round", "step"])
def test_a_schedule_that_ends_before_the_run_is_refused_before_the_first_round(per):
    tables = of_local(steps=3, schedule={"name": f"{__name__}:ended", "per": per})
    with pytest.raises(ExperimentError, match=f"local.schedule.name: cannot compute the learning rate of {per} 4"):
        fedsim.run({**tables, "rounds": 4 if per == "round" else 1, "local": {**tables["local"], "steps": 4}})
