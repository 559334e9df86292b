"""User-defined functions `train(model, batches, ...)` as client algorithms."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedsim
from fedsim.config.validation import warnings_about
from tests.models import Normalised

TABLES = {
    "data": "tests.components:tiny",
    "model": "tests.clients.test_train_function:Dropping",
    "precision": "float64",
}
TABLES |= {"workers": 3, "rounds": 2, "engine": "serial"}
WORK = {"epochs": 2, "batch_size": 16, "lr": 0.1}


class Dropping(Normalised):
    """A network with BatchNorm and dropout."""

    def forward(self, images):
        return self.layers(F.dropout(images, 0.2, self.training))


def by_optimizer(model, batches, lr, worker):
    """Train with a torch optimizer and return the mean loss, as in clients written for other simulators."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    total, samples = 0.0, 0
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total, samples = total + loss.item() * len(targets), samples + len(targets)
    return total / samples


def by_a_copy(model, batches, lr):
    """Train a copy of the model, catch an error in its forward pass, load its parameters and return the loss."""
    copied = copy.deepcopy(model)
    loss = by_optimizer(copied, batches, lr, None)
    with pytest.raises(RuntimeError):
        copied(torch.zeros(1, 1))
    assert not torch.is_autocast_enabled("cpu")
    model.load_state_dict(copied.state_dict())
    return loss


def by_replaced_data(model, batches, *, lr: float = 0.1):
    for inputs, targets in batches:
        gradients = torch.autograd.grad(F.cross_entropy(model(inputs), targets), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.data = parameter.data - lr * gradient


def careless(model, batches, lr):
    """Require a freshly prepared model, train it, then freeze it and leave it in evaluation mode."""
    assert model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    by_optimizer(model, batches, lr, None)
    model.requires_grad_(requires_grad=False).eval()


def marking(model, batches, lr):
    """Set an attribute on the model, which must be gone in the next round."""
    assert not hasattr(model, "seen")
    by_optimizer(model, batches, lr, None)
    model.seen = True


def worker_as_loss(model, batches, worker):
    return torch.tensor(float(worker))


def silent(model, batches):
    """Do not train."""


def talkative(model, batches):
    return {"loss": 0.5}


def reading_twice(model, batches):
    for _ in range(2):
        list(batches)


def growing(model, batches):
    model.further = nn.Linear(2, 2)


def of_other_names(net, loader):
    """A function without the parameters `model` and `batches`."""


def costing(gradients):
    def function(model, batches):
        """A function that declares `gradients` gradients per batch."""

    function.gradients_per_step = gradients
    return function


def run(algorithm, local=(), **changes):
    return fedsim.run({**TABLES, **changes, "local": {"algorithm": algorithm, **WORK, **dict(local)}})


def without_lr(algorithm, **changes):
    local = {"algorithm": algorithm, "epochs": 2, "batch_size": 16}
    return fedsim.run({**TABLES, "rounds": 1, **changes, "local": {**local, **changes.get("local", {})}})


def assert_same(first, second):
    torch.testing.assert_close(first.global_row, second.global_row, rtol=0, atol=1e-12)
    assert first.test_loss == pytest.approx(second.test_loss, rel=1e-12)  # also depends on the BatchNorm statistics


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"engine": "auto", "workers": 12, "local": {"drop_last": True}},
        {"local": {"schedule": {"name": "exponential", "gamma": 0.5}}},
        {"attack": {"name": "label_flipping", "workers": [0]}},
    ],
)
def test_a_function_that_takes_the_steps_of_sgd_is_sgd(changes):
    """Both use the same batches, dropout masks and BatchNorm statistics and report the same training loss."""
    mine, sgd = run(by_optimizer, **changes), run("sgd", **changes)
    assert_same(mine, sgd)
    losses = [[record["train_loss"] for record in result.history] for result in (mine, sgd)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize("function", [by_optimizer, by_a_copy])
def test_in_bfloat16_each_step_has_the_weights_of_the_step_before(function):
    """The loss is computed from float32 outputs."""
    tables = {"precision": "bf16", "model": "2nn", "rounds": 1, "local": {"lr": 0.3}}
    mine, sgd = run(function, **tables), run("sgd", **tables)
    torch.testing.assert_close(mine.global_row, sgd.global_row, rtol=0, atol=1e-6)
    assert mine.history[0]["train_loss"] == pytest.approx(sgd.history[0]["train_loss"], rel=1e-6)


@pytest.mark.parametrize("function", [by_replaced_data, careless, marking])
def test_what_a_function_does_to_the_model_besides_is_forgotten(function):
    assert_same(run(function), run("sgd"))


def test_the_engine_auto_does_not_stack_and_batched_refuses():
    started = []
    tables = {**TABLES, "workers": 12, "rounds": 1, "processes": 1, "model": "logistic"}
    tables["local"] = {"algorithm": by_optimizer, **WORK}
    fedsim.run({**tables, "engine": "auto"}, on_start=started.append)
    assert started[0].how["engine"] == "serial"
    fedsim.run({**tables, "engine": "auto", "local": {"algorithm": "sgd", **WORK}}, on_start=started.append)
    assert started[1].how["engine"] == "batched"
    with pytest.raises(
        fedsim.ExperimentError, match=r'^engine = "batched": .*by_optimizer.* one .*; use engine=processes$'
    ):
        fedsim.run({**tables, "engine": "batched"})


def test_the_training_loss_is_the_mean_of_what_the_function_returns():
    record = without_lr(worker_as_loss).history[0]
    total = sum(worker * samples for worker, samples in zip(record["cohort"], record["samples"], strict=True))
    assert record["train_loss"] == pytest.approx(total / sum(record["samples"]))
    assert math.isnan(without_lr(silent).history[0]["train_loss"])


@pytest.mark.parametrize("stop", [{"patience": 1}, {"target": 0.1}])
@pytest.mark.parametrize("mode", [{}, {"mode": "clock", "policy": "fedbuff"}])
def test_a_stop_by_a_loss_that_a_function_does_not_return_gives_a_one_line_error(mode, stop):
    with pytest.raises(fedsim.ExperimentError, match=r"^stop\.metric = .* NaN in round 1; return .*loss") as caught:
        without_lr(silent, rounds=3, stop={"metric": "train_loss", **stop}, **mode)
    assert len(caught.value.lines) == 1
    assert len(without_lr(worker_as_loss, rounds=3, stop={"metric": "train_loss", "target": 5}, **mode).history) == 1


def test_a_batch_takes_the_time_of_the_gradients_that_a_function_declares():
    """Each worker passes twice over 8 samples in batches of 3."""
    tables = {"mode": "clock", "data": {"name": "tests.components:tiny", "train": 8}, "workers": 1}
    for function, seconds in ((silent, 6), (costing(3), 18)):
        done = without_lr(function, local={"batch_size": 3}, **tables)
        assert done.history[0]["virtual_seconds"] == seconds


@pytest.mark.parametrize(
    ("algorithm", "local", "line"),
    [
        (of_other_names, {}, r"local\.algorithm = .*of_other_names.*ClientAlgorithm.*own-client-algorithm\.md"),
        (by_optimizer, {}, r"local\.lr: is required"),
        (silent, {"keep_optimizer_state": True}, r"local\.keep_optimizer_state = true: "),
        (silent, {"schedule": "cosine"}, r"local\.schedule: needs .*`lr`"),
        (talkative, {}, r"local\.algorithm = .*talkative.*returned a dict"),
        (reading_twice, {}, r"local\.algorithm: the function iterates over its batches twice.*local\.epochs"),
        (costing(0), {}, r"local\.algorithm = .*gradients_per_step .* must be greater than 0, not 0"),
        (growing, {}, r"local\.algorithm: .*names or shapes"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_used_gives_a_one_line_error(algorithm, local, line):
    with pytest.raises(fedsim.ExperimentError, match=f"^{line}") as caught:
        fedsim.run({**TABLES, "local": {"algorithm": algorithm, **local}})
    assert len(caught.value.lines) == 1


def test_settings_of_single_steps_have_no_effect_on_a_function():
    keys = {"clip_norm": 1.0, "accumulation_steps": 2, "schedule": {"name": "exponential", "gamma": 0.5, "per": "step"}}
    experiment = fedsim.Experiment(**{**TABLES, "local": {"algorithm": by_optimizer, "lr": 0.1, "steps": 2, **keys}})
    lines = [line for line in warnings_about(experiment) if "by_optimizer, which performs the steps itself" in line]
    assert [line.partition(" ")[0] for line in lines] == [
        "local.accumulation_steps",
        "local.clip_norm",
        "local.schedule.per",
    ]


def test_gradients_that_are_averaged_at_each_step_are_no_work_for_a_function():
    with pytest.raises(fedsim.ExperimentError, match=r"^local\.algorithm = .*silent.*needs local steps"):
        fedsim.Experiment(**{**TABLES, "sync": "gradients", "local": {"algorithm": silent}})
