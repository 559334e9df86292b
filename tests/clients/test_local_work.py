"""Local work that differs between workers and rounds, and epochs of full batches only, against plain PyTorch loops."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedsim
from fedsim.clients.schedule import Schedule, Varying
from fedsim.core.randomness import draw_key
from fedsim.errors import ExperimentError
from tests.asynchronous.test_clock_runs import points
from tests.textbook import Federation

BATCH, LR, ROUNDS, WORKERS = 4, 0.1, 3, 4


def zero() -> nn.Module:
    module = nn.Linear(6, 3)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    return module


EXPERIMENT = {
    "rounds": ROUNDS,
    "workers": WORKERS,  # 15 samples each, so batches of 4, 4, 4 and 3
    "engine": "serial",
    "precision": "float64",
    "model": {"name": "tests.clients.test_local_work:zero"},
    "data": "tests.asynchronous.test_clock_runs:points",
    "aggregate": "mean",
}
STACKED = {"engine": "batched", "processes": 1, "batched": {"stack_size": 3}}
ENGINES = {"serial": {}, "stacks": STACKED}


def of_local(**local):
    return {**EXPERIMENT, "local": {"batch_size": BATCH, "lr": LR, **local}}


def averaged(steps_of, train_round, workers=WORKERS):
    """Return the global row of federated averaging, where `train_round(model, batches, round)` trains one worker."""
    federation = Federation(zero, points, workers, BATCH)
    model = federation.model
    for round in range(1, ROUNDS + 1):
        rows = []
        for worker in range(workers):
            nn.utils.vector_to_parameters(federation.row.clone(), model.parameters())
            train_round(model, list(islice(federation.batches(round, worker), steps_of(worker, round))), round)
            rows.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        federation.row = torch.stack(rows).mean(0)
    return federation.row


def round_of(*, accumulation_steps=1, clip_norm=None, gamma=1.0, per="step", **of_sgd):
    """Return a function that trains a worker for one round in PyTorch; `gamma` decays its rate per step or round."""

    def train(model, batches, round):
        lr = LR * gamma ** (round - 1) if per == "round" else LR
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, **of_sgd)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma if per == "step" else 1.0)
        for start in range(0, len(batches), accumulation_steps):
            optimizer.zero_grad()
            group = batches[start : start + accumulation_steps]
            for inputs, targets in group:
                (F.cross_entropy(model(inputs), targets) / len(group)).backward()
            if clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            scheduler.step()

    return train


def drawn(form, values):
    return Varying(form, values, seed=0).of


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("local", "steps_of"),
    [
        ({"steps": [1, 7, 2, 5]}, lambda worker, round: [1, 7, 2, 5][worker]),
        ({"epochs": [3, 1, 1, 2]}, lambda worker, round: 4 * [3, 1, 1, 2][worker]),
        ({"steps": {"uniform": [1, 9]}}, drawn("uniform", [1, 9])),
        ({"epochs": {"choice": [1, 5]}}, lambda worker, round: 4 * drawn("choice", [1, 5])(worker, round)),
    ],
    ids=["listed steps", "listed epochs", "drawn steps", "drawn epochs"],
)
def test_each_worker_takes_its_own_number_of_steps(local, steps_of, engine):
    result = fedsim.run({**of_local(**local), **ENGINES[engine]})
    assert torch.allclose(result.global_row, averaged(steps_of, round_of()), rtol=0, atol=1e-12)
    sizes = [4, 4, 4, 3]
    for record in result.history:
        steps = [steps_of(worker, record["round"]) for worker in range(WORKERS)]
        assert record["samples"] == [sum(sizes[step % 4] for step in range(count)) for count in steps]


CLIPPING = {"momentum": 0.5, "weight_decay": 0.1, "clip_norm": 0.5}
CLIPPED = of_local(epochs=2, **CLIPPING)


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_are_clipped_as_by_pytorch(engine):
    result = fedsim.run({**CLIPPED, **ENGINES[engine]})
    assert torch.allclose(
        result.global_row, averaged(lambda worker, round: 8, round_of(**CLIPPING)), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_the_gradients_of_workers_are_clipped_before_they_are_averaged(engine):
    """With one worker, averaged gradients equal local steps; with several, each worker's gradient is clipped."""
    alone = {**CLIPPED, "workers": 1, "rounds": 1, **ENGINES[engine]}
    rows = [fedsim.run({**alone, "sync": sync}).global_row for sync in ("parameters", "gradients")]
    assert torch.allclose(*rows, rtol=0, atol=1e-12)
    tables = {**of_local(steps=1, lr=1.0, clip_norm=1e-3), "sync": "gradients", "rounds": 1, **ENGINES[engine]}
    assert fedsim.run(tables).global_row.norm() <= 1e-3


def test_all_gradients_of_a_client_algorithm_are_clipped():
    tables = of_local(algorithm="fedsam", rho=0.1, steps=1, lr=1.0, clip_norm=1e-3)
    rows = [fedsim.run({**tables, "rounds": 1, **extra}).global_row for extra in ENGINES.values()]
    assert 0 < rows[0].norm() <= 1e-3
    assert torch.allclose(*rows, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("local", "batches"),
    [({"steps": [1, 3, 2, 4]}, [3, 9, 6, 12]), ({"epochs": [1, 2, 1, 3]}, [4, 8, 4, 12]), ({"epochs": 2}, [8] * 4)],
    ids=["steps", "listed epochs", "epochs"],
)
def test_a_step_takes_the_mean_gradient_of_several_batches(local, batches, engine):
    schedule = {"name": "exponential", "gamma": 0.5, "per": "step"}
    tables = of_local(**local, accumulation_steps=3, clip_norm=0.5, momentum=0.5, schedule=schedule)
    result = fedsim.run({**tables, **ENGINES[engine]})
    train_round = round_of(accumulation_steps=3, clip_norm=0.5, momentum=0.5, gamma=0.5)
    expected = averaged(lambda worker, round: batches[worker], train_round)
    assert torch.allclose(result.global_row, expected, rtol=0, atol=1e-12)
    sizes = [4, 4, 4, 3]
    assert result.history[0]["samples"] == [sum(sizes[step % 4] for step in range(n)) for n in batches]


def test_amounts_are_drawn_uniformly_for_each_worker_and_round():
    values = [Varying("uniform", [1, 5], seed=3).of(worker, round) for worker in range(100) for round in range(1, 51)]
    assert all(abs(values.count(value) / len(values) - 0.2) < 0.03 for value in range(1, 6))
    widest = Varying("uniform", [1, 2**40 - 1], seed=3)
    assert widest.of(np.arange(9), np.full(9, 1)).tolist() == [widest.of(worker, 1) for worker in range(9)]


def test_averaged_gradients_end_for_a_worker_after_its_own_steps():
    """In the last steps of a round, only the gradients of workers that have steps left are averaged."""
    result = fedsim.run({**of_local(steps=[1, 2, 2, 2]), "sync": "gradients", "rounds": 1})
    federation = Federation(zero, points, WORKERS, BATCH)
    sources = [federation.batches(1, worker) for worker in range(WORKERS)]
    for workers in (range(4), range(1, 4)):
        gradients = [federation.gradient(federation.row, next(sources[worker])) for worker in workers]
        federation.row = federation.row - LR * sum(gradients) / len(gradients)
    assert torch.allclose(result.global_row, federation.row, rtol=0, atol=1e-12)


def test_the_longest_round_of_a_worker_is_checked():
    schedule = Schedule(batch_size=4, steps=Varying("choice", [1, 4]))
    assert schedule.longest(0).smallest_batch(13) == 1
    assert Schedule(batch_size=4, steps=Varying("list", [1, 4])).longest(0).smallest_batch(13) == 4


MODES = {
    "parameters": {},
    "parameters in stacks": STACKED,
    "gradients": {"workers": 1, "sync": "gradients"},
    "gradients in stacks": {"workers": 1, "sync": "gradients", **STACKED},
    "the clock": {"workers": 1, "mode": "clock", "policy": "asgd"},
}


@pytest.mark.parametrize("mode", MODES)
def test_epochs_have_whole_batches_only(mode):
    """With one worker, a step along its gradient is a local step."""
    tables, train = {**of_local(epochs=2, drop_last=True), **MODES[mode]}, round_of()
    if mode == "the clock":
        del tables["aggregate"]
    result, workers = fedsim.run(tables), tables["workers"]
    epochs = 2 * {4: 4, 1: 15}[workers]

    def whole(model, batches, round):
        train(model, [batch for batch in batches if len(batch[1]) == BATCH], round)

    expected = averaged(lambda worker, round: epochs, whole, workers)
    assert torch.allclose(result.global_row, expected, rtol=0, atol=1e-12)
    assert [record["samples"] for record in result.history] == [[2 * {4: 12, 1: 60}[workers]] * workers] * ROUNDS


def test_a_shard_smaller_than_a_batch_is_one_batch():
    record = fedsim.run(of_local(batch_size=100, drop_last=True)).history[0]
    assert record["samples"] == [15] * 4
    assert record["train_loss"] > 0


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("per_update", [1, 3])
@pytest.mark.parametrize(
    "amount",
    [
        {"epochs": 2},
        {"steps": 5},
        {"epochs": Varying("list", [1, 2, 3, 1])},
        {"steps": Varying("list", [4, 1, 2, 9])},
        "drawn",
    ],
)
def test_a_schedule_of_many_workers_counts_their_batches(amount, per_update, drop_last):
    """The reference cuts the shuffled samples of each worker into batches, epoch by epoch."""
    workers, rounds, sizes = np.arange(4), np.array([1, 1, 7, 2]), np.array([1, 5, 9, 12])
    drawn = {"steps": Varying("choice", [1, 4, 6], seed=3)} if amount == "drawn" else amount
    amounts = {"epochs": None, **drawn, "accumulation_steps": per_update}
    schedule = Schedule(4, **amounts, drop_last=drop_last).of(workers, rounds)
    steps, first = schedule.steps_for(sizes), schedule.batch_size_at(0, sizes)
    samples, third = schedule.samples_in(steps, sizes), schedule.batch_size_at(2, sizes)
    for worker, size in enumerate(sizes.tolist()):
        epoch = [min(4, size - start) for start in range(0, size, 4)]
        epoch = [whole for whole in epoch if whole == 4] or epoch if drop_last else epoch
        [(unit, numbers)] = drawn.items()
        if amount == "drawn":
            number = (1, 4, 6)[draw_key(3, "local_work", int(rounds[worker]), worker) % 3]
        else:
            number = numbers.values[worker] if isinstance(numbers, Varying) else numbers
        count = number * len(epoch) if unit == "epochs" else number * per_update
        batches = (epoch * count)[:count]
        assert (steps[worker], samples[worker]) == (count, sum(batches))
        assert (first[worker], third[worker]) == (batches[0], batches[2] if count > 2 else 0)


@pytest.fixture
def normalised(tiny_experiment):
    """Return an experiment with BatchNorm in which worker 0 has 65 samples, one more than four batches of 16."""
    partition = {"name": "tests.components:same_last", "first": 65}
    return {**tiny_experiment, "model": "tests.models:Normalised", "partition": partition, "rounds": 1}


LAST_BATCH = (
    r"^local.batch_size = 16: the last batch of worker 0 \(65 samples\) has one sample, on which the model cannot be "
    r"trained \(ValueError: Expected more than 1 value per channel.*\); set local.drop_last = true$"
)


@pytest.mark.parametrize(("engine", "sync"), [({}, "parameters"), (STACKED, "gradients")], ids=["serial", "batched"])
def test_a_last_batch_of_one_sample_with_batchnorm_is_an_error_before_the_run(normalised, engine, sync):
    tables = {**normalised, **engine, "sync": sync}
    with pytest.raises(ExperimentError, match=LAST_BATCH):
        fedsim.run(tables)
    result = fedsim.run({**tables, "local": {**tables["local"], "drop_last": True}})
    assert result.history[0]["samples"] == [64, 80, 48]


def test_a_last_batch_of_one_sample_at_the_server_with_batchnorm_is_an_error_before_the_run(normalised):
    tables = {**normalised, "partition": "iid", "workers": 3, "local": {"batch_size": 16, "steps": 4}}
    line = r"^local.batch_size = 16: the last batch of the server \(17 samples\) has one sample, .*drop_last = true$"
    for samples, match in ((17, line), (1, r"^aggregate.root_samples = 1: the server has one sample, .* 2 or more$")):
        with pytest.raises(ExperimentError, match=match):
            fedsim.run({**tables, "aggregate": {"rule": "fltrust", "root_samples": samples}})


def test_a_shard_of_one_sample_with_batchnorm_is_an_error_that_names_the_worker(normalised):
    tables = {
        **normalised,
        "partition": "tests.components:ending_in_one",
        "local": {"batch_size": 16, "drop_last": True},
    }
    with pytest.raises(ExperimentError, match=r"^partition.name = .*: worker 2 has one sample, on which the model "):
        fedsim.run(tables)
