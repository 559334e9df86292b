"""The tasks that come with fedsim, against plain PyTorch, in rows and in stacks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedsim
from fedsim import ExperimentError, TensorData
from fedsim.core.learning_task import Binary, Classification
from tests.other_tasks import REGRESSION, planes
from tests.plugs import tiny


def even_digits(root):
    """Whether a digit is even."""
    return tuple(TensorData(d.inputs, 1 - d.targets % 2, d.scale, d.shift) for d in tiny(root))


def one_logit() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 1))


BINARY = {"task": "binary", "data": "tests.core.test_tasks:even_digits", "model": "tests.core.test_tasks:one_logit"}
SMOOTHED = {"task": {"name": "classification", "label_smoothing": 0.1}}
OWN = {"task": {"name": "tests.plugs:Smoothed", "smoothing": 0.3}}


def of_logits(outputs, targets):
    return F.binary_cross_entropy_with_logits(outputs[:, 0], targets.to(outputs.dtype))


def of_differences(outputs, targets):
    return (outputs[:, 0] - targets).abs().mean()


def positive(outputs, targets):
    return (outputs[:, 0] > 0).long() == targets


def first(outputs, targets):
    return outputs.argmax(1) == targets


def among_two(outputs, targets):
    return (outputs.topk(2).indices == targets.unsqueeze(1)).any(1)


def plain_sgd(result, train, loss, lr):
    """One full-batch step of plain PyTorch from the model's start."""
    start = fedsim.run({**result.experiment.resolved(), "local": {"lr": 1e-300}})
    model = start.model.train()
    inputs, targets = train.to(torch.device("cpu"), torch.float64).gather(torch.arange(len(train)))
    value = loss(model(inputs), targets)
    value.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= lr * parameter.grad
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("engine", ["serial", "batched"])
@pytest.mark.parametrize(
    ("tables", "loss", "correct"),
    [
        (BINARY, of_logits, positive),
        (SMOOTHED, nn.CrossEntropyLoss(label_smoothing=0.1), first),
        (OWN, nn.CrossEntropyLoss(label_smoothing=0.3), among_two),
        ({**REGRESSION, "task": {"name": "regression", "loss": "l1"}}, of_differences, None),
    ],
    ids=["binary", "smoothed", "own", "regression"],
)
def test_a_step_is_that_of_plain_pytorch(engine, tables, loss, correct, tiny_experiment):
    local = {"lr": 0.1, "batch_size": 1000}
    tables = {**tiny_experiment, **tables, "rounds": 1, "workers": 1, "precision": "float64", "local": local}
    result = fedsim.run({**tables, "engine": engine})
    data = {of_logits: even_digits, of_differences: planes}.get(loss, tiny)(None)
    expected = plain_sgd(fedsim.run({**tables, "engine": "serial"}), data[0], loss, 0.1)
    assert torch.allclose(result.global_row, expected, rtol=0, atol=1e-12)
    inputs, targets = data[1].to(torch.device("cpu"), torch.float64).gather(torch.arange(len(data[1])))
    with torch.no_grad():
        outputs = result.model(inputs)
    assert result.history[0].test_loss == pytest.approx(float(loss(outputs, targets)), rel=1e-12)
    accuracy = correct and pytest.approx(correct(outputs, targets).double().mean().item())
    assert result.test_accuracy == accuracy


@pytest.mark.parametrize("task", [Classification(label_smoothing=0.2), Binary()])
def test_the_mean_loss_is_the_mean_of_the_samples(task):
    outputs, targets = torch.randn(6, 1 if isinstance(task, Binary) else 3).double(), torch.tensor([0, 1, 1, 0, 1, 0])
    losses = task.loss(outputs, targets, "none")
    assert losses.shape == (6,)
    assert torch.allclose(losses.mean(), task.loss(outputs, targets))


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"task.label_smoothing": 1.0}, "task.label_smoothing = 1.0"),
        ({**BINARY, "model": "logistic"}, r"must return logits \[batch\] or \[batch, 1\]"),
        ({**BINARY, "data": "tests.plugs:tiny"}, "the labels go up to 9"),
    ],
)
def test_what_does_not_fit_the_task_is_refused(tables, words, tiny_experiment):
    with pytest.raises(ExperimentError, match=words):
        fedsim.run({**tiny_experiment, **tables})
