"""Class weights in the training loss against plain loops over samples, and tests that stay unweighted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedsim
from fedsim.core.learning_task import Binary, Classification, class_weights_of
from fedsim.errors import FedsimError
from fedsim.privacy.mechanisms import MARGIN
from fedsim.rounds.executor import Executor
from fedsim.rounds.synchronous_rounds import SynchronousRounds
from fedsim.runs.setup import begun
from tests.components import one_table
from tests.textbook import Federation

pytestmark = pytest.mark.filterwarnings("ignore:data.local_test_fraction = .* owner")  # each sample has an owner here


def data(root):
    return fedsim.load_dataset(one_table)


def two_classes(root):
    """The same samples, of which few have the label 1."""
    return tuple(fedsim.TensorData(part.inputs, (part.targets == 0).long()) for part in data(root))


def network():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def one_logit():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def balanced(targets):
    """n / (classes n_c) for each class."""
    counts = [int((targets == label).sum()) for label in range(int(targets.max()) + 1)]
    return [len(targets) / (len(counts) * count) for count in counts]


class Weighted(Federation):
    """Workers whose loss is the sum of weight times loss over the samples of a batch, divided by their number."""

    weights: list[float]
    smoothing = 0.0

    def loss_of(self, outputs, target):
        """The loss of one sample: for several outputs as in softmax regression, for one output as in logistic."""
        if len(outputs) == 1:
            return torch.log1p(torch.exp(-outputs[0] if target else outputs[0]))
        log_probabilities = outputs - torch.log(torch.exp(outputs).sum())
        return -(1 - self.smoothing) * log_probabilities[target] - self.smoothing * log_probabilities.mean()

    def loss(self, row, batch):
        shapes = [parameter.shape for parameter in self.model.parameters()]
        names, parts = [n for n, _ in self.model.named_parameters()], row.split([s.numel() for s in shapes])
        parameters = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        outputs = torch.func.functional_call(self.model, parameters, (batch[0],))
        pairs = list(zip(outputs, batch[1].tolist(), strict=True))
        return sum(self.weights[target] * self.loss_of(of, target) for of, target in pairs) / len(pairs)


LR, BATCH, WORKERS = 0.3, 6, 3
RUN = {"workers": WORKERS, "rounds": 2, "precision": "float64", "engine": "serial", "partition": "iid"}
RUN |= {"data": f"{__name__}:data", "model": f"{__name__}:network"}
LISTED = [0.5, 2.0, 7.0]
CASES = {
    "balanced": ("balanced", {}, {}),
    "listed, stacked": (LISTED, {}, {"engine": "batched", "processes": 1, "batched": {"stack_size": 3}}),
    "listed, two processes": (LISTED, {}, {"engine": "processes", "processes": 2}),
    "smoothed": ("balanced", {"label_smoothing": 0.2}, {"engine": "batched", "processes": 1}),
    "two micro-batches": (LISTED, {}, {"local": {"accumulation_steps": 2, "batch_size": BATCH // 2, "lr": LR}}),
}


def federation(weights, binary=False, **attributes):
    workers = Weighted(one_logit if binary else network, two_classes if binary else data, WORKERS, BATCH)
    workers.weights = balanced(workers.train.targets) if weights == "balanced" else weights
    for name, value in attributes.items():
        setattr(workers, name, value)
    return workers


def averaged(workers, rounds=2):
    """Return the row of FedAvg after some rounds, and the mean training loss of the last one."""
    for round in range(1, rounds + 1):
        rows, losses = {}, []
        for worker in range(WORKERS):
            row = workers.row
            for batch in workers.epoch(round, worker):
                losses.append((len(batch[1]), workers.loss(row, batch).item()))
                row = row - LR * workers.gradient(row, batch)
            rows[worker] = row
        workers.row = workers.average(rows)
    return workers.row, sum(n * loss for n, loss in losses) / sum(n for n, _ in losses)


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_a_plain_loop_over_samples(case):
    weights, more, changes = CASES[case]
    workers = federation(weights, smoothing=more.get("label_smoothing", 0.0))
    row, train_loss = averaged(workers)
    task = {"name": "classification", "class_weights": weights, **more}
    result = fedsim.run({**RUN, "task": task, "local": {"lr": LR, "batch_size": BATCH}, **changes})
    assert torch.allclose(result.global_row, row, rtol=0, atol=1e-12)
    if "micro" not in case:  # whose last batches differ in size
        assert result.history[-1].train_loss == pytest.approx(train_loss, rel=1e-9)


@pytest.mark.parametrize("held_out", [{"validation_fraction": 0.3}, {"local_test_fraction": 0.3}, {}])
def test_balanced_weights_count_only_samples_that_workers_train_on(held_out):
    tables = {**RUN, "data": {"name": RUN["data"], **held_out}, "task": {"class_weights": "balanced"}}
    tables["partition"] = "contiguous" if held_out else [[*range(9)], [9, 10], [20, 21, 22]]
    with fedsim.Session() as session, begun(fedsim.Experiment(**tables), session) as (task, engine):
        train, shards = engine.shared.data.train, engine.shared.data.shards
        trained = torch.cat([train.targets[shards.of(worker)] for worker in range(WORKERS)])
        assert len(trained) < len(data(None)[0])
        assert task.class_weights == pytest.approx(balanced(trained))


def test_the_loss_of_tests_and_their_accuracy_are_not_weighted():
    task = {"name": "classification", "class_weights": LISTED}
    local = {"lr": LR, "batch_size": BATCH}
    tested = {"name": RUN["data"], "validation_fraction": 0.2, "local_test_fraction": 0.25}
    result = fedsim.run({**RUN, "task": task, "local": local, "data": tested})
    test = data(None)[1]
    with torch.no_grad():
        outputs = result.model.double()(test.inputs.double())
    assert result.test_loss == pytest.approx(F.cross_entropy(outputs, test.targets).item())
    assert result.test_accuracy == (outputs.argmax(1) == test.targets).double().mean().item()
    experiment = fedsim.Experiment(**{**RUN, "task": task, "local": local, "data": tested})
    workers = federation(LISTED)
    with fedsim.Session() as session, begun(experiment, session) as (task, engine):
        shared, row = engine.shared.data, engine.shared.server.row.clone()
        [seen] = engine.run(Executor.global_losses, [0, 1], 1)[:1]
        batches = [shared.train.gather(shared.shards.of(worker)) for worker in (0, 1)]
        assert seen == pytest.approx([workers.loss(row, batch).item() for batch in batches]), "as in training"
        [results] = engine.run(SynchronousRounds.test_workers, experiment.worker_evaluation.every, of="rounds")[:1]
        outputs = task.new_module().eval()
        for worker, loss in zip(results.workers, results.loss["global"], strict=True):
            inputs, targets = shared.train.gather(shared.worker_tests.of(worker))
            assert loss == pytest.approx(F.cross_entropy(outputs(inputs), targets).item())
        validation = shared.validation.gather(torch.arange(len(shared.validation)))
        with torch.no_grad():
            outputs = result.model.double()(validation[0])
    assert result.history[-1].validation_loss == pytest.approx(F.cross_entropy(outputs, validation[1]).item())


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_the_binary_task_and_synchronous_gradients_have_weights_too(engine):
    workers = federation("balanced", binary=True)
    for round in (1, 2):
        epochs = [workers.epoch(round, worker) for worker in range(WORKERS)]
        for step in range(max(map(len, epochs))):
            batches = [epoch[step] for epoch in epochs if step < len(epoch)]
            total = sum(len(batch[1]) for batch in batches)
            parts = [workers.gradient(workers.row, batch) * len(batch[1]) / total for batch in batches]
            workers.row = workers.row - LR * sum(parts)
    changes = {"task": {"name": "binary", "class_weights": "balanced"}, "sync": "gradients", "engine": engine}
    names = {"data": f"{__name__}:two_classes", "model": f"{__name__}:one_logit"}
    local = {"lr": LR, "batch_size": BATCH}
    result = fedsim.run({**RUN, **names, **changes, "processes": 1, "local": local})
    assert torch.allclose(result.global_row, workers.row, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_gradients_of_samples_are_clipped_after_their_weight(engine):
    """With one sample per batch, division by the sum of the weights would cancel each weight."""
    clip, workers = 1.5, federation(LISTED)
    rows, clipped = {}, []
    for worker in range(WORKERS):
        row = workers.row
        for inputs, targets in workers.epoch(1, worker):
            parts = [workers.gradient(row, (inputs[k : k + 1], targets[k : k + 1])) for k in range(len(targets))]
            factors = [min(1.0, clip * (1 - MARGIN) / float(part.norm())) for part in parts]
            clipped += [factor < 1 for factor in factors]
            row = row - LR * sum(factor * part for factor, part in zip(factors, parts, strict=True)) / len(parts)
        rows[worker] = row
    assert 5 < sum(clipped) < len(clipped) - 5, "a weight matters only where a gradient is not clipped"
    expected = workers.average(rows)
    local = {"algorithm": "dp_sgd", "lr": LR, "batch_size": BATCH, "clip": clip, "noise": 0.0}
    changes = {"task": {"name": "classification", "class_weights": LISTED}, "rounds": 1, "engine": engine}
    result = fedsim.run({**RUN, **changes, "processes": 1, "local": local})
    assert torch.allclose(result.global_row, expected, rtol=0, atol=1e-12)


def test_balanced_weights_have_the_mean_one_and_absent_classes_the_weight_one():
    targets = torch.tensor([0] * 6 + [2] * 2 + [3] * 4)
    weights = class_weights_of(Classification(class_weights="balanced"), lambda: targets, 5)
    assert weights == pytest.approx((12 / 18, 1.0, 12 / 6, 12 / 12, 1.0))
    assert np.mean([weights[label] for label in targets.tolist()]) == pytest.approx(1.0)
    assert class_weights_of(Binary(class_weights=(1.0, 2.0)), lambda: targets, 2) == (1.0, 2.0)
    assert class_weights_of(Classification(), lambda: targets, 5) is None
    assert math.prod(class_weights_of(Binary(class_weights="balanced"), lambda: targets % 2, 2)) > 0


def test_balanced_weights_do_not_depend_on_samples_that_are_held_out():
    class Look(fedsim.Callback):
        def on_start(self, run):
            self.data, self.weights = run.engine.shared.data, run.task.class_weights

    look, held_out = Look(), {"name": f"{__name__}:data", "validation_fraction": 0.3, "local_test_fraction": 0.3}
    task = {"name": "classification", "class_weights": "balanced"}
    fedsim.run({**RUN, "rounds": 1, "data": held_out, "task": task}, callbacks=[look])
    used = torch.cat([look.data.shards.of(worker) for worker in range(WORKERS)])
    assert look.weights == pytest.approx(balanced(look.data.train.targets[used]))


def numbers():
    return tuple(fedsim.TensorData(part.inputs, part.targets.float()) for part in data(None))


def by_itself(model, batches):
    return 0.0


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"class_weights": [1.0, 2.0]},
            r"the model has 3 classes, so task.class_weights must be 3 positive numbers, or",
        ),
        ({"class_weights": [1.0, 0.0, 2.0]}, r'must be 3 positive numbers, or "balanced"; it is \[1.0, 0.0, 2.0\]$'),
        ({"class_weights": "even"}, r'^task.class_weights = "even": must be .*"balanced"'),
        ({"name": "binary", "class_weights": [1.0] * 3}, "2 classes, so task.class_weights must be 2 positive"),
        ({"name": "regression", "class_weights": [1.0]}, "task.class_weights = .*: unknown key"),
        (
            {"local": {"algorithm": by_itself}},
            r"^task.class_weights: local.algorithm = .* computes the loss itself; omit it$",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(changes, match):
    binary = changes.get("name") == "binary"
    names = {"data": f"{__name__}:two_classes", "model": f"{__name__}:one_logit"} if binary else {}
    more = {key: changes[key] for key in ("local", "data") if key in changes}
    task = {"name": "classification", "class_weights": "balanced"} | {k: v for k, v in changes.items() if k not in more}
    with pytest.raises(FedsimError, match=match) as caught:
        fedsim.run({**RUN, **names, "task": task, **more})
    assert "\n" not in str(caught.value)
