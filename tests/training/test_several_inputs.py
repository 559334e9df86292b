"""Models with several inputs, against plain PyTorch, and models that return objects like those of transformers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import fedsim
from fedsim.core.model_inputs import outputs_of
from fedsim.privacy.mechanisms import MARGIN
from tests.several_inputs import CLASSES, NAMES, Joint, JointWithLoss, JointWithObject, Output, samples
from tests.textbook import Federation

WORKERS, ROUNDS, BATCH, LR = 3, 2, 8, 0.3
SETTINGS = {
    **{"data": "tests.several_inputs:samples", "model": "tests.several_inputs:Joint", "precision": "float64"},
    **{"workers": WORKERS, "rounds": ROUNDS, "partition": "tests.components:uneven", "records": {"figures": []}},
    "local": {"lr": LR, "batch_size": BATCH},
}
BATCHED = {"engine": "batched", "processes": 1, "batched": {"stack_size": 2}}


@pytest.fixture(scope="module")
def trained():
    """Return the parameters and the test loss of a loop that passes the inputs by hand."""
    fed = Federation(Joint, samples, WORKERS, BATCH, "tests.components:uneven")
    row = fed.row
    for round in range(1, ROUNDS + 1):
        rows = {}
        for worker in range(WORKERS):
            model = with_row(fed, row)
            optimizer = torch.optim.SGD(model.parameters(), LR)
            for inputs, targets in fed.epoch(round, worker):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs["image"], inputs["table"], inputs["words"]), targets).backward()
                optimizer.step()
            rows[worker] = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        row = fed.average(rows)
    test = samples(None)[1].to(torch.device("cpu"), torch.float64)
    inputs, targets = test.gather(torch.arange(len(test)))
    with torch.no_grad():
        loss = F.cross_entropy(with_row(fed, row)(*(inputs[name] for name in NAMES)), targets)
    return row, float(loss)


def with_row(fed, row):
    torch.nn.utils.vector_to_parameters(row.clone(), fed.model.parameters())
    return fed.model


@pytest.mark.parametrize("engine", [{"engine": "serial"}, BATCHED], ids=["serial", "batched"])
@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("model", ["Joint", "JointWithObject"])
def test_training_is_that_of_plain_pytorch(trained, engine, by_position, model):
    data = {"name": "tests.several_inputs:samples", "by_position": by_position}
    result = fedsim.run({**SETTINGS, **engine, "data": data, "model": f"tests.several_inputs:{model}"})
    row, loss = trained
    assert torch.allclose(result.global_row, row, rtol=0, atol=1e-12)
    assert result.history[-1]["test_loss"] == pytest.approx(loss, rel=1e-12)


def with_labels(root):
    """Return the samples, whose targets are among the inputs too."""
    return tuple(replace(part, inputs={**part.inputs, "labels": part.targets}) for part in samples(root))


@pytest.mark.parametrize("engine", [{"engine": "serial"}, BATCHED], ids=["serial", "batched"])
def test_a_model_may_compute_its_loss(trained, engine):
    task = "tests.several_inputs:own_loss"
    result = fedsim.run({**SETTINGS, **engine, "data": with_labels, "model": JointWithLoss, "task": task})
    assert torch.allclose(result.global_row, trained[0], rtol=0, atol=1e-12)
    assert result.history[-1]["test_loss"] == pytest.approx(trained[1], rel=1e-12)


def test_full_gradients_of_scaffold_are_means_over_all_samples():
    """With one step of all samples per round, SCAFFOLD is gradient descent."""
    settings = {
        **SETTINGS,
        "partition": "iid",
        "local": {"algorithm": "scaffold", "option": 1, "lr": LR, "batch_size": 96},
    }
    result = fedsim.run({**settings, "engine": "serial", "aggregate": "mean"})
    fed = Federation(Joint, samples, WORKERS, 96)
    inputs, targets = fed.train.gather(torch.cat(fed.shards))
    for _ in range(ROUNDS):
        fed.model.zero_grad()
        F.cross_entropy(fed.model(**inputs), targets).backward()
        with torch.no_grad():
            for parameter in fed.model.parameters():
                parameter -= LR * parameter.grad
    expected = torch.nn.utils.parameters_to_vector(fed.model.parameters())
    assert torch.allclose(result.global_row, expected, rtol=0, atol=1e-12)


def test_private_gradients_are_those_of_single_samples():
    """One step of DP-SGD without noise: the mean of all samples' clipped gradients."""
    clip = 0.05
    local = {"algorithm": "dp_sgd", "clip": clip, "noise": 0.0, "lr": LR, "batch_size": 96}
    settings = {**SETTINGS, "workers": 1, "rounds": 1, "partition": "iid", "local": local}
    fed = Federation(Joint, samples, 1, 96)
    inputs, targets = fed.train.gather(torch.arange(96))
    total = torch.zeros_like(fed.row)
    for index, target in enumerate(targets):
        loss = F.cross_entropy(fed.model(**{name: values[[index]] for name, values in inputs.items()}), target[None])
        gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, [*fed.model.parameters()])])
        total += gradient * min(1, clip * (1 - MARGIN) / float(gradient.norm()))
    for engine in ({"engine": "serial"}, BATCHED):
        result = fedsim.run({**settings, **engine})
        assert torch.allclose(result.global_row, fed.row - LR * total / 96, rtol=0, atol=1e-12)


def test_the_patch_of_a_backdoor_is_on_the_image():
    attack = fedsim.byzantine.attack_strategy.get("backdoor").target(size=2, poisoned=1.0, value=9.0, target=1)
    inputs, targets = samples(None)[0].gather(torch.arange(5))
    poisoned, labels = attack.poison(inputs, targets, CLASSES, fedsim.Draws.of("test", seed=0))
    assert (poisoned["image"][:, 0, -2:, -2:] == 9).all()
    assert torch.equal(poisoned["image"][:, :, :4], inputs["image"][:, :, :4])
    assert all(torch.equal(poisoned[name], inputs[name]) for name in ("table", "words"))
    assert labels.tolist() == [1] * 5
    towards, goals = attack.goal(inputs, targets, CLASSES)
    assert {len(tensor) for tensor in towards.values()} == {len(goals)} == {int((targets != 1).sum())}


@pytest.mark.parametrize(
    ("returned", "outputs"),
    [
        (Output(logits=torch.ones(2, 3)), torch.ones(2, 3)),
        (OrderedDict(loss=None, logits=torch.ones(2, 3)), torch.ones(2, 3)),
        ({"logits": torch.zeros(2, 3), "loss": torch.tensor(4.0)}, torch.full((2,), 4.0)),
        (Output(loss=torch.tensor([1.0, 2.0])), torch.tensor([1.0, 2.0])),
        ((torch.ones(2), torch.ones(2)), None),
        (Output(), None),
    ],
)
def test_outputs_of_models_that_return_objects(returned, outputs):
    found = outputs_of(lambda a, b: returned, (torch.zeros(2, 1), torch.zeros(2, 1)))
    assert found is returned if outputs is None else torch.equal(found, outputs)


def test_a_training_function_gets_the_inputs_as_they_are():
    def train(model, batches):
        optimizer, losses = torch.optim.SGD(model.parameters(), LR), []
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(**inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return sum(losses) / len(losses)

    settings = {**SETTINGS, "engine": "serial"}
    own = fedsim.run({**settings, "local": {"algorithm": train, "batch_size": BATCH}})
    assert torch.allclose(own.global_row, fedsim.run(settings).global_row, rtol=0, atol=1e-12)


def test_a_model_for_other_inputs_is_one_line():
    with pytest.raises(
        fedsim.errors.ExperimentError, match=r"does not work on inputs of shape words .*unexpected keyword"
    ):
        fedsim.run({**SETTINGS, "data": with_labels, "engine": "serial"})
    assert isinstance(JointWithObject()(*[torch.zeros(2, 36), torch.zeros(2, 3), torch.zeros(2, 4).long()]), Output)
