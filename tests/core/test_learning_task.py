"""Tasks against plain PyTorch: which inputs they refuse, and what a run without accuracy records and shows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedsim
from fedsim import ExperimentError, TensorData
from fedsim.core.learning_task import Classification, NextToken, regression
from fedsim.core.metrics import r2
from fedsim.core.randomness import batch_order
from fedsim.records.record import metrics_in
from fedsim.runs.setup import begun
from tests.components import tiny
from tests.matrix import in_turn
from tests.other_tasks import NEXT_TOKEN, PADDING, REGRESSION, Bigrams, counting, planes
from tests.textbook import start_of


def even_digits(root):
    """A data set with the label 1 for even digits and 0 for odd ones."""
    return tuple(TensorData(d.inputs, 1 - d.targets % 2, d.scale, d.shift) for d in tiny(root))


def one_logit() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 1))


BINARY = {
    "task": "binary",
    "data": "tests.core.test_learning_task:even_digits",
    "model": "tests.core.test_learning_task:one_logit",
}
SMOOTHED = {"task": {"name": "classification", "label_smoothing": 0.1}}
OWN = {"task": {"name": "tests.components:Smoothed", "smoothing": 0.3}}


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
    """Return the row after one full-batch step of plain PyTorch from the run's initial model."""
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
    result = fedsim.run({**tables, "engine": engine, "processes": 1})
    data = {of_logits: even_digits, of_differences: planes}.get(loss, tiny)(None)
    expected = plain_sgd(fedsim.run({**tables, "engine": "serial"}), data[0], loss, 0.1)
    assert torch.allclose(result.global_row, expected, rtol=0, atol=1e-12)
    inputs, targets = data[1].to(torch.device("cpu"), torch.float64).gather(torch.arange(len(data[1])))
    with torch.no_grad():
        outputs = result.model(inputs)
    assert result.history[0].test_loss == pytest.approx(float(loss(outputs, targets)), rel=1e-12)
    accuracy = correct and pytest.approx(correct(outputs, targets).double().mean().item())
    assert result.test_accuracy == accuracy


SHORT = {"workers": 4, "rounds": 2, "engine": "serial", "partition": "iid", "local": {"lr": 0.05, "batch_size": 16}}
THEIRS = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": lambda x, y: F.huber_loss(x, y, delta=0.5)}


@pytest.mark.parametrize("loss", THEIRS)
def test_losses_of_regression_equal_those_of_pytorch(loss):
    torch.manual_seed(0)
    task = regression(loss=loss, **({"delta": 0.5} if loss == "huber" else {}))
    for outputs, targets in [(torch.randn(6, 1), torch.randn(6)), (torch.randn(6, 3), torch.randn(6, 3))]:
        expected = THEIRS[loss](outputs.reshape(targets.shape), targets)
        assert torch.allclose(task.loss(outputs, targets), expected)
        assert torch.allclose(task.loss(outputs, targets, "none").mean(), expected)
        assert task.loss(outputs, targets, "none").shape == (6,)


def test_the_loss_of_tokens_is_that_of_pytorch():
    torch.manual_seed(0)
    outputs, targets = torch.randn(4, 6, 7), torch.randint(7, (4, 6))
    targets[1, 3:], targets[2] = 9, 9
    task = NextToken(ignore=9)
    expected = F.cross_entropy(outputs.reshape(-1, 7), targets.flatten(), ignore_index=9)
    losses, counts = task.loss(outputs, targets, "none"), task.counts(targets)
    assert counts.tolist() == [6, 3, 0, 6]
    assert torch.allclose(task.loss(outputs, targets), expected)
    assert torch.allclose((losses * counts).sum() / counts.sum(), expected)
    assert task.loss(outputs[2:3], targets[2:3]) == 0
    assert task.correct(outputs, targets).sum() == (outputs.argmax(2) == targets).sum()
    assert not NextToken(ignore=0).correct(torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.int64)).any()


def test_the_test_counts_each_token_once(monkeypatch):
    """The count depends neither on the batches nor on the padding."""
    test = counting(None)[1]
    expected = {}
    for size in (7, 1000):
        monkeypatch.setattr("fedsim.training.shared_state.TEST_BATCH_ON_CPU", size)
        result = fedsim.run({**SHORT, **NEXT_TOKEN, "metrics": ["perplexity"], "precision": "float64"})
        with torch.no_grad():
            outputs = result.model(test.inputs)
        known = test.targets != PADDING
        loss = F.cross_entropy(outputs[known], test.targets[known]).item()
        expected = {
            "test_loss": loss,
            "test_accuracy": (outputs.argmax(2) == test.targets)[known].double().mean().item(),
        }
        last = result.history[-1]
        assert {key: last[key] for key in expected} == pytest.approx(expected)
        assert last.metrics["perplexity"] == pytest.approx(np.exp(loss))


def cubes(outputs, targets, power: float = 3.0):
    return (outputs - targets).abs() ** power


MSE_TASKS = {
    "function": F.mse_loss,
    "path": "torch.nn.functional:mse_loss",
    "module": nn.MSELoss(),
    "module without reduction": nn.MSELoss(reduction="none"),
    "class": nn.MSELoss,
    "own function": {"name": cubes, "power": 2.0},
    "name": "mse",
}


@pytest.mark.parametrize("form", MSE_TASKS)
def test_a_loss_is_a_task(form):
    """A step follows the gradient of the mean loss over the samples."""
    tables = {**SHORT, **REGRESSION, "rounds": 1}
    expected = fedsim.run(tables)
    result = fedsim.run({**tables, "task": MSE_TASKS[form]})
    assert torch.allclose(result.global_row, expected.global_row)
    assert (result.test_loss, result.test_accuracy) == (pytest.approx(expected.test_loss), None)


def test_a_loss_is_called_with_its_own_reduction():
    outputs, labels, weight = torch.randn(6, 3, dtype=torch.double), torch.tensor([0, 1, 2, 0, 1, 2]), torch.rand(3)
    of_samples = F.cross_entropy(outputs, labels, weight=weight.double(), reduction="none")
    theirs = {"mean": of_samples.sum() / weight.double()[labels].sum(), "sum": of_samples.sum()}
    theirs |= {"none": of_samples.mean()}
    for reduction, expected in theirs.items():  # float32 weights, float64 outputs
        loss = nn.CrossEntropyLoss(weight=weight, reduction=reduction)
        assert torch.allclose(fedsim.Experiment(task=loss).task.component.loss(outputs, labels), expected)
        assert loss.reduction == reduction
    task = fedsim.Experiment(task={"name": F.mse_loss, "reduction": "none"}).task.component
    targets = torch.randn(6, 3)
    assert torch.allclose(task.loss(outputs, targets, "none"), (outputs - targets).square().mean(1))
    with pytest.raises(ExperimentError, match="has 3 classes, but the labels go up to 4"):
        fedsim.Experiment(task=F.cross_entropy).task.component.check_outputs(outputs, labels, 5)


WEIGHT = torch.tensor([1.0, 9.0, 3.0], dtype=torch.double)


def three_classes(root):
    """A data set whose targets are 0, 1 or 2. The classes are of different sizes."""
    return tuple(TensorData(d.inputs, (d.targets > -1).long() + (d.targets > 0.5).long()) for d in planes(root))


def as_numbers(root):
    return tuple(TensorData(d.inputs, (d.targets > 0).double()[:, None].expand(-1, 3)) for d in planes(root))


def weighted(outputs, targets):
    return F.cross_entropy(outputs, targets, weight=WEIGHT)


class Spread(nn.Module):
    """A loss that is not a weighted mean over the samples of a batch."""

    def forward(self, outputs, targets):
        return F.cross_entropy(outputs, targets) + outputs.std()


JOINT = {
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHT), three_classes),
    "class weights in a function": (weighted, three_classes),
    "ignored targets": (nn.CrossEntropyLoss(ignore_index=2), three_classes),
    "smoothed labels and class weights": (nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.3), three_classes),
    "log-likelihood": (nn.NLLLoss(weight=WEIGHT), three_classes),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), three_classes),
    "weights of samples": (nn.CrossEntropyLoss(weight=WEIGHT, reduction="none"), three_classes),
    "weights of positive targets": (nn.BCEWithLogitsLoss(pos_weight=WEIGHT), as_numbers),
    "own": (Spread(), three_classes),
}


def linear() -> nn.Module:
    return nn.Linear(5, 3)


@pytest.mark.parametrize("engine", ["serial", pytest.param("processes", marks=pytest.mark.slow), "batched"])
@pytest.mark.parametrize("name", JOINT)
def test_what_a_loss_returns_for_a_batch_is_the_loss_of_the_batch(name, engine):
    """Batches of workers in a stack differ in size. The loss of a data set is that of all its samples at once."""
    (loss, data), lr, batch = JOINT[name], 0.02, 16
    shards = [range(12), range(12, 30), range(30, 80), range(80, 120)]
    tables = {
        **{"task": loss, "data": data, "model": "tests.core.test_learning_task:linear", "engine": engine},
        **{"workers": 4, "rounds": 1, "partition": list(map(list, shards)), "precision": "float64"},
        **{
            "local": {"lr": lr, "batch_size": batch},
            **({"processes": 2} if engine == "processes" else {"processes": 1}),
        },
    }
    result = fedsim.run(tables)
    train, test = (part.to(torch.device("cpu"), torch.float64) for part in data(None))
    expected, losses = torch.zeros(18, dtype=torch.double), []
    for worker, shard in enumerate(shards):
        model = start_of(linear)
        order = torch.tensor(shard)[batch_order(0, 1, worker, 0, len(shard))]
        for positions in order.split(batch):
            inputs, targets = train.gather(positions)
            value = loss(model(inputs), targets).mean()
            gradients = torch.autograd.grad(value, list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter -= lr * gradient
            losses.append(value.item() * len(positions) / len(train))
        expected += nn.utils.parameters_to_vector(model.parameters()).detach() * len(shard) / len(train)
    assert torch.allclose(result.global_row, expected, rtol=0, atol=1e-12)
    inputs, targets = test.gather(torch.arange(len(test)))
    record = result.history[0]
    assert record.test_loss == pytest.approx(loss(result.model(inputs), targets).mean().item(), rel=1e-12)
    assert record.train_loss == pytest.approx(sum(losses), rel=1e-12, nan_ok=True)  # NaN if all targets are ignored


def test_the_joint_loss_of_a_data_set_is_that_of_all_its_samples(monkeypatch):
    """It depends neither on the batches of tests nor on who tests."""
    for module in ("training.shared_state", "rounds.evaluation"):
        monkeypatch.setattr(f"fedsim.{module}.test_batch_size", lambda device: 7)
    tables = {**SHORT, "task": nn.CrossEntropyLoss(weight=WEIGHT), "data": three_classes, "precision": "float64"}
    tables |= {"model": linear, "rounds": 1, "workers": 1, "data.local_test_fraction": 0.5, "local": {"lr": 1e-300}}
    result = fedsim.run({**tables, "data.validation_fraction": 0.3, "worker_evaluation": {"every": 1}})
    with fedsim.Session() as session, begun(result.experiment, session) as (_, engine):
        data = engine.shared.data
        parts = {
            "test": data.test.gather(torch.arange(len(data.test))),
            "validation": data.validation.gather(torch.arange(len(data.validation))),
            "worker": data.train.gather(data.worker_tests.of(0)),
        }
    expected = {
        name: F.cross_entropy(result.model(inputs), targets, weight=WEIGHT).item()
        for name, (inputs, targets) in parts.items()
    }
    record = result.history[0]
    assert record.test_loss == pytest.approx(expected["test"], rel=1e-12)
    assert record.validation_loss == pytest.approx(expected["validation"], rel=1e-12)
    assert record.metrics["global_worker_loss_mean"] == pytest.approx(expected["worker"], rel=1e-12)


def test_clipping_the_gradients_of_samples_needs_their_losses():
    tables = {**SHORT, "data": three_classes, "model": linear, "rounds": 1}
    tables |= {"local": {"algorithm": "dp_sgd", "clip": 1.0, "noise": 1.0, "lr": 0.1}}
    with pytest.raises(ExperimentError, match=r'returns one number for a batch, .*; use reduction="none"$'):
        fedsim.run({**tables, "task": nn.CrossEntropyLoss(weight=WEIGHT)})
    fedsim.run({**tables, "task": nn.CrossEntropyLoss(weight=WEIGHT, reduction="none")})


def rounded(root, *, to: str = "int64"):
    """A data set whose targets are whole numbers, some of which are negative."""
    dtype = getattr(torch, to)
    return tuple(TensorData(d.inputs, (5 * d.targets).round().to(dtype)) for d in planes(root))


@pytest.mark.parametrize("engine", ["serial", "batched"])
@pytest.mark.parametrize(
    "task", ["regression", nn.MSELoss(), F.huber_loss, {"name": "torch.nn:HuberLoss", "delta": 0.5}], ids=range(4)
)
def test_integer_targets_are_numbers_as_floats_are(task, engine):
    tables = {
        **SHORT,
        **REGRESSION,
        "engine": engine,
        "processes": 1,
        "rounds": 1,
        "task": task,
        "metrics": ["r2", "mae"],
    }
    results = [fedsim.run({**tables, "data": {"name": rounded, "to": to}}) for to in ("int64", "float32")]
    assert torch.equal(*(result.global_row for result in results))
    first, second = (result.history[0] for result in results)
    assert (first.test_loss, first.train_loss, first.metrics) == (second.test_loss, second.train_loss, second.metrics)


def test_indices_of_several_labels_stay_integers():
    def data(root):
        labels = torch.tensor([[0, 2, -1], [1, -1, -1], [2, 1, -1], [0, -1, -1]]).repeat(30, 1)
        train, test = planes(root)
        return TensorData(train.inputs, labels), TensorData(test.inputs, labels[: len(test)])

    loss = nn.MultiLabelMarginLoss()
    result = fedsim.run({**SHORT, "data": data, "model": linear, "rounds": 1, "task": loss})
    inputs, labels = data(None)[1].gather(torch.arange(40))
    assert result.test_loss == pytest.approx(loss(result.model(inputs), labels).item())


def test_r2_of_integers_is_that_of_floats():
    outputs, targets = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1, 2, 3])
    assert r2(outputs, targets) == r2(outputs, targets.float()) == 0.5


@dataclass(frozen=True)
class WithoutReduction(Classification):
    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets)


def test_a_task_whose_loss_takes_no_reduction_is_refused():
    with pytest.raises(ExperimentError, match="its method `loss` must take outputs, targets and reduction"):
        fedsim.Experiment(task=WithoutReduction())


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (
            lambda outputs, targets: (outputs - targets)[:5],
            r"must return a tensor with one number, or with one loss per sample, \[batch\]; .*\(5,\)$",
        ),
        (nn.CosineEmbeddingLoss(), "the loss <CosineEmbeddingLoss.*> fails for outputs .8. and targets float32 .8.: "),
    ],
    ids=["another size", "three inputs"],
)
def test_what_is_not_a_loss_per_sample_gives_a_one_line_error(loss, line):
    with pytest.raises(ExperimentError, match=line) as caught:
        fedsim.run({**SHORT, **REGRESSION, "task": loss})
    assert len(caught.value.lines) == 1


@in_turn(
    ("how", "tables"),
    [
        {"mode": "clock", "policy": "asgd"},
        {"mode": "clock", "policy": "fedasync"},
        {"mode": "race", "policy": "hogwild", "race": {"runs": 2}, "engine": "processes", "rounds": 1},
        {"sync": "gradients"},
        {"local": {"algorithm": "scaffold", "option": 1, "batch_size": 16}},
        {"data.validation_fraction": 0.2, "precision": "bf16"},
    ],
    [REGRESSION, NEXT_TOKEN],
)
def test_losses_fall_however_a_run_goes(how, tables):
    history = fedsim.run({**SHORT, **tables, "rounds": 3, **how}).history
    start = fedsim.run({**SHORT, **tables, "rounds": 1, "local": {"lr": 1e-300}}).history[-1].test_loss
    assert history[-1].test_loss < start
    assert (history[-1].test_accuracy is None) == (tables is REGRESSION)


def test_a_run_without_accuracy_records_and_shows_its_loss(tmp_path, capsys):
    tables = {**SHORT, **REGRESSION, "data.local_test_fraction": 0.3, "worker_evaluation": {"every": 1, "fine_tune": 1}}
    tables |= {"metrics": ["r2"], "data.validation_fraction": 0.2, "mode": "clock", "checkpoint.every": 1}
    tables |= {"records.figures": []}
    result = fedsim.run(tables, tmp_path / "run", progress=True)
    printed = capsys.readouterr().out
    assert "final test loss " in printed
    assert "accuracy" not in printed
    assert result.test_accuracy is None
    assert f"test loss {result.test_loss:.4f}" in repr(result)
    last = result.history[-1]
    assert last.test_accuracy is last.validation_accuracy is None
    assert last.metrics["fine_tuned_worker_loss_worst10"] >= last.metrics["fine_tuned_worker_loss_mean"]
    assert not [metric.key for metric in metrics_in(result.history) if "accuracy" in metric.key]
    resumed = fedsim.run({**tables, "rounds": 3}, tmp_path / "run", resume=True)
    assert len(resumed.history) == 3
    assert resumed.history[:2] == result.history


def test_a_model_for_other_inputs_is_refused():
    with pytest.raises(ExperimentError, match="Embedding|index out of range") as caught:
        fedsim.run({**SHORT, **NEXT_TOKEN, "model": lambda: Bigrams(5)})
    assert len(str(caught.value).splitlines()) == 1


def test_attackers_cannot_hold_a_class_where_targets_are_numbers(tiny_experiment):
    attack = {"name": "sign_flipping", "fraction": 0.4, "by_class": 1}
    line = r"^attack\.by_class = 1: needs one class label per sample, .* by attack\.f or attack\.workers"
    with pytest.raises(ExperimentError, match=line):
        fedsim.run({**tiny_experiment, **REGRESSION, "attack": attack})


def pinball(outputs, targets):
    errors = targets.float().unsqueeze(1) - outputs
    levels = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
    return torch.maximum(levels * errors, (levels - 1) * errors).mean()


class Logistic(nn.Module):
    def forward(self, outputs, targets):
        return F.binary_cross_entropy_with_logits(outputs.squeeze(1), targets.float())


def integers(classes, test_classes=None):
    """Random inputs, float32 [40, 2], with targets 0 to `classes` - 1, int64 [40]."""
    inputs = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    return tuple((inputs, torch.arange(40) % count) for count in (classes, test_classes or classes))


TWO = {"workers": 2, "rounds": 1, "engine": "serial"}


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (lambda outputs, targets: F.binary_cross_entropy_with_logits(outputs.squeeze(1), targets.float()), 1, (2,)),
        (lambda outputs, targets: F.mse_loss(outputs.squeeze(-1), targets.float()), 1, (9,)),
        (Logistic(), 1, (2,)),
        (pinball, 5, (2,)),
        (pinball, 5, (2, 4)),
        (pinball, 5, (9,)),
    ],
    ids=["logistic", "squared", "module", "quantiles", "other test targets", "more targets than outputs"],
)
@pytest.mark.filterwarnings("error::fedsim.errors.SettingWarning")
def test_an_own_loss_decides_whether_outputs_and_integer_targets_fit(loss, outputs, targets):
    data = integers(*targets)
    held_out = {"name": data, "validation_fraction": 0.2, "local_test_fraction": 0.2}
    result = fedsim.run(data=held_out, model=nn.Linear(2, outputs), task=loss, **TWO)
    with torch.no_grad():
        expected = loss(result.model(data[1][0]), data[1][1])
    assert result.test_loss == pytest.approx(expected.item(), rel=1e-6)


def test_a_loss_that_squeezes_the_outputs_of_floating_targets_is_an_error_with_the_remedy():
    data = tuple((inputs, targets.float()) for inputs, targets in integers(2))
    line = r"fails for outputs \[8\] and targets .*: IndexError: .*; outputs \[batch, 1\] are .*; use outputs.flat"
    with pytest.raises(ExperimentError, match=line):
        fedsim.run(data=data, model=nn.Linear(2, 1), task=lambda x, y: F.mse_loss(x.squeeze(1), y), **TWO)
    for pair in (data, integers(2)):
        fedsim.run(data=pair, model=nn.Linear(2, 1), task=lambda x, y: F.mse_loss(x.flatten(), y.float()), **TWO)


LOSSES_OF_CLASSES = [
    nn.CrossEntropyLoss(),
    nn.NLLLoss(),
    nn.MultiMarginLoss(),
    F.cross_entropy,
    F.nll_loss,
    F.multi_margin_loss,
]


@pytest.mark.parametrize("loss", LOSSES_OF_CLASSES, ids=range(6))
def test_losses_of_pytorch_for_classes_need_an_output_for_each_class(loss):
    line = "the model has 5 classes, but the labels go up to 8; it needs at least 9 outputs$"
    with pytest.raises(ExperimentError, match=line):
        fedsim.run(data=integers(9), model=nn.Linear(2, 5), task=loss, **TWO)
    with pytest.warns(
        fedsim.errors.SettingWarning, match="3 of the model's 5 outputs, such as number 2, belong to classes without"
    ):
        fedsim.run(data=integers(2), model=nn.Linear(2, 5), task=loss, **TWO)


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(ignore_index=5), {"name": "torch.nn.functional:cross_entropy", "ignore_index": 5}],
    ids=range(2),
)
def test_an_ignored_class_needs_no_output(loss):
    data = integers(6)
    result = fedsim.run(data=data, model=nn.Linear(2, 5), task=loss, **TWO)
    used = data[1][1] < 5
    with torch.no_grad():
        expected = F.cross_entropy(result.model(data[1][0])[used], data[1][1][used])
    assert result.test_loss == pytest.approx(expected.item(), rel=1e-6)


class Scaled(nn.Module):
    def __init__(self, *, trainable=True):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=trainable)

    def forward(self, outputs, targets):
        return F.cross_entropy(self.scale * outputs, targets)


def test_a_loss_with_trainable_parameters_is_an_error():
    module = Scaled()
    for loss in (module, lambda outputs, targets: module(outputs, targets)):
        with pytest.raises(
            ExperimentError, match="the loss <.*> has trainable parameters, .*; move them into the m"
        ) as caught:
            fedsim.run(data=integers(2), model=nn.Linear(2, 2), task=loss, **TWO)
        assert len(caught.value.lines) == 1
    assert fedsim.run(data=integers(2), model=nn.Linear(2, 2), task=Scaled(trainable=False), **TWO).test_loss > 0


def squeezed(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none").squeeze()


def test_a_loss_of_samples_that_squeezes_a_single_sample_is_not_joint(tiny_experiment):
    with fedsim.Session() as session, begun(fedsim.Experiment(**tiny_experiment, task=squeezed), session) as (task, _):
        assert not task.learning_task.is_joint(torch.zeros(1, 3), torch.zeros(1, dtype=torch.long))
