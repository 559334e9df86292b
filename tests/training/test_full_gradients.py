"""The gradient over all samples of a worker, against plain PyTorch, for every task and both trainers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedsim
from fedsim.core.learning_task import learning_task
from fedsim.runs.loops.synchronous import SynchronousLoop
from fedsim.runs.setup import begun
from tests.matrix import in_turn
from tests.other_tasks import NEXT_TOKEN, PADDING, REGRESSION, counting, planes

WORKERS, BATCH = 3, 4


def labelled(root, *, classes: int = 3):
    """A data set of the inputs of `planes`, with class labels."""
    return tuple(fedsim.TensorData(d.inputs, d.targets.argsort().argsort() % classes) for d in planes(root))


def of_tokens(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=PADDING)


def of_logits(outputs, targets):
    return F.binary_cross_entropy_with_logits(outputs[:, 0], targets.double())


LABELS = {"data": labelled, "model": lambda: nn.Linear(5, 3)}
TASKS = {  # by name: tables, data set, loss
    "classification": ({**LABELS, "task": "classification"}, labelled, F.cross_entropy),
    "binary": (
        {"task": "binary", "data": {"name": labelled, "classes": 2}, "model": lambda: nn.Linear(5, 1)},
        lambda root: labelled(root, classes=2),
        of_logits,
    ),
    "regression": (REGRESSION, planes, lambda outputs, targets: F.mse_loss(outputs[:, 0], targets)),
    "next_token": (NEXT_TOKEN, counting, of_tokens),
}
ALGORITHMS = {  # by name: settings, and the server's state that is the mean of the full gradients, with its factor
    "mime": ({}, "mean_gradient", 1.0),
    "mimelite": ({"beta": 0.75}, "momentum", 0.25),
    "scaffold": ({"option": 1}, "c", 1.0),
}


def test_every_task_is_tested():
    assert {registration.target for registration in learning_task} == {learning_task.get(name).target for name in TASKS}


def mean_of_full_gradients(tables, key):
    """Return a state of the server after one round, and the initial model."""
    experiment = fedsim.Experiment(**tables)
    with fedsim.Session() as session, begun(experiment, session) as (task, engine):
        model = task.new_module()
        SynchronousLoop(task, engine).run_round(1)
        return engine.shared.server.algorithm[key].clone(), model


@pytest.mark.parametrize("engine", ["serial", "batched"])
@in_turn(("name", "algorithm"), TASKS, ALGORITHMS)
def test_the_full_gradient_is_the_mean_over_batches_weighted_by_their_samples(name, algorithm, engine):
    (tables, data, loss), (settings, key, factor) = TASKS[name], ALGORITHMS[algorithm]
    train = data(None)[0].to(torch.device("cpu"), torch.float64)
    shards = [list(range(12)), list(range(12, 30)), list(range(30, len(train)))]
    local = {"algorithm": algorithm, "batch_size": BATCH, "steps": 1, "lr": 0.01, **settings}
    tables = {**tables, "workers": WORKERS, "rounds": 1, "precision": "float64", "engine": engine, "local": local}
    actual, model = mean_of_full_gradients({**tables, "partition": shards}, key)
    expected = torch.zeros_like(actual)
    for shard in shards:
        for start in range(0, len(shard), BATCH):
            inputs, targets = train.gather(torch.tensor(shard[start : start + BATCH]))
            gradients = torch.autograd.grad(loss(model.train()(inputs), targets), list(model.parameters()))
            expected += torch.cat([g.flatten() for g in gradients]) * len(targets) / len(shard) / WORKERS
    assert torch.allclose(actual, factor * expected, rtol=0, atol=1e-12)
