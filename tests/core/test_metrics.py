"""Test metrics by name, as a function and as a class with update and compute; and the validation split."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fedsim
from fedsim import ExperimentError
from fedsim.core.metrics import metric
from fedsim.rounds.evaluation import EvaluationResult
from tests.components import TINY_TEST, TINY_TRAIN, real_images, tiny

METRICS = [
    "macro_f1",
    {"name": "top_k", "k": 3},
    "tests.core.test_metrics:ShareCorrect",
    "tests.core.test_metrics:largest",
]
SMALL = {"rounds": 2, "workers": 3, "model": "logistic", "engine": "serial"}


class ShareCorrect:
    """A metric with the interface of torchmetrics (constructor arguments, update and compute)."""

    def __init__(self, classes: int = 10, **others: str) -> None:
        self.classes, self.correct, self.samples = classes, 0, 0

    def update(self, outputs, targets):
        self.correct += int((outputs[:, : self.classes].argmax(1) == targets).sum())
        self.samples += len(targets)

    def compute(self):
        return torch.tensor(self.correct / self.samples)


def largest(outputs, targets, *, factor: float = 1.0):
    return factor * outputs.max()


def one_for_each_sample(outputs, targets):
    return outputs.max(1).values


def several_batches(root):
    """A data set with three test batches, of which the last one is smaller."""
    return tiny(root)[0], real_images()[1].take(np.arange(600))


def outputs_of(result, data):
    with torch.no_grad():
        return result.model(data.gather(torch.arange(len(data)))[0])


def bound(name, **params):
    return metric.bind(metric.get(name), params)


def test_metrics_are_computed_from_all_test_samples(tiny_experiment):
    from sklearn.metrics import f1_score

    result = fedsim.run({**tiny_experiment, **SMALL, "metrics": METRICS})
    test = tiny(None)[1]
    outputs, metrics = outputs_of(result, test), result.history[-1].metrics
    answers = outputs.argmax(1)
    assert metrics["ShareCorrect"] == pytest.approx(result.test_accuracy)
    assert metrics["macro_f1"] == pytest.approx(f1_score(test.targets, answers, average="macro"))
    top_3 = [int(target) in row.topk(3).indices.tolist() for row, target in zip(outputs, test.targets, strict=True)]
    assert metrics["top_k"] == pytest.approx(sum(top_3) / TINY_TEST)
    assert metrics["largest"] == pytest.approx(outputs.max().item())


@pytest.mark.parametrize(
    "how",
    [
        {"engine": "processes", "processes": 2},
        {"engine": "batched", "processes": 1},
        {"mode": "clock", "policy": "asgd"},
    ],
)
def test_metrics_and_validation_agree_between_engines(how, tiny_experiment):
    tables = {**tiny_experiment, **SMALL, "precision": "float64", "metrics": METRICS}
    tables["data"] = {"name": "tests.core.test_metrics:several_batches", "validation_fraction": 0.2}
    reference = fedsim.run({**tables, **({} if how.get("engine") else how)}).history
    for ours, theirs in zip(fedsim.run({**tables, **how}).history, reference, strict=True):
        assert ours.metrics.keys() == theirs.metrics.keys()
        assert {"top_k", "validation_top_k"} <= ours.metrics.keys()
        assert [*ours.metrics.values()] == pytest.approx([*theirs.metrics.values()], abs=1e-9)
        assert ours.validation_loss == pytest.approx(theirs.validation_loss, abs=1e-9)


def test_metrics_agree_with_references():
    from sklearn.metrics import f1_score, r2_score, roc_auc_score

    outputs, targets = torch.randn(40, 5, 7), torch.randint(7, (40, 5))
    expected = math.exp(F.cross_entropy(outputs.reshape(-1, 7), targets.reshape(-1)))
    assert bound("perplexity")(outputs, targets) == pytest.approx(expected)
    numbers, wanted = torch.randn(40, 1), torch.randn(40)
    assert bound("mse")(numbers, wanted) == pytest.approx(float(((numbers[:, 0] - wanted) ** 2).mean()))
    assert bound("mae")(numbers, wanted) == pytest.approx(float((numbers[:, 0] - wanted).abs().mean()))
    numbers, wanted = torch.randn(40, 3), torch.randn(40, 3)
    assert bound("r2")(numbers, wanted) == pytest.approx(r2_score(wanted, numbers))
    wanted[:, 0] = numbers[:, 0] = 1.0
    assert bound("r2")(numbers, wanted) == pytest.approx(r2_score(wanted, numbers))
    logits, labels = torch.randn(40, 1), torch.randint(2, (40,))
    expected = f1_score(labels, (logits[:, 0] > 0).long(), average="macro")
    assert bound("macro_f1")(logits, labels) == pytest.approx(expected)
    tied = logits.round(decimals=0)
    for scores in (logits, tied):
        assert bound("auroc")(scores, labels) == pytest.approx(roc_auc_score(labels, scores[:, 0]))
    assert bound("auroc")(logits, torch.ones(40, dtype=torch.int64)) == 0.5
    # class 6 is never predicted
    outputs, labels = torch.randn(40, 7) - 9 * F.one_hot(torch.tensor(6)), torch.randint(6, (40,))
    assert bound("macro_f1")(outputs, labels) == pytest.approx(f1_score(labels, outputs.argmax(1), average="macro"))


def test_metrics_leave_ignored_targets_out():
    outputs, targets = torch.randn(40, 5, 7), torch.randint(7, (40, 5))
    padded = targets.clone()
    padded[:, 3:] = -100
    for name in ("top_k", "macro_f1", "perplexity"):
        assert bound(name)(outputs, padded) == pytest.approx(bound(name)(outputs[:, :3], targets[:, :3]))
        assert bound(name, ignore=9)(outputs, targets) == pytest.approx(bound(name)(outputs, targets))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["top_k", {"name": "top_k", "k": 1}], "label"),
        (["mse"], "one output per target"),
        (["tests.core.test_metrics:one_for_each_sample"], "one_for_each_sample"),
    ],
)
def test_a_metric_that_cannot_be_computed_is_refused_before_the_first_round(wrong, words, tiny_experiment):
    rounds = []
    with pytest.raises(ExperimentError, match=words) as caught:
        fedsim.run({**tiny_experiment, **SMALL, "metrics": wrong}, on_round=rounds.append)
    assert len(str(caught.value).splitlines()) == 1
    assert not rounds


def test_nobody_trains_on_validation_samples(tiny_experiment):
    tables = {
        **tiny_experiment,
        **SMALL,
        "data.validation_fraction": 0.1,
        "metrics": ["tests.core.test_metrics:largest"],
    }
    metadata = []
    result = fedsim.run(tables, on_start=metadata.append)
    assert metadata[0].validation_samples == 20
    assert metadata[0].train_samples == sum(metadata[0].shard_sizes) == TINY_TRAIN - 20
    _, held_out, _ = fedsim.data.subsets.split_validation(tiny(None)[0], 0.1, tiny_experiment.get("seed", 0))
    outputs, last = outputs_of(result, held_out), result.history[-1]
    assert last.validation_loss == pytest.approx(F.cross_entropy(outputs, held_out.targets).item(), rel=1e-5)
    assert last.validation_accuracy == pytest.approx((outputs.argmax(1) == held_out.targets).double().mean().item())
    assert last.metrics["validation_largest"] == pytest.approx(outputs.max().item())
    assert last.metrics["validation_largest"] != last.metrics["largest"]
    assert fedsim.run({**tiny_experiment, **SMALL}).history[-1].validation_loss is None


def test_the_mean_of_several_results_is_that_of_each_metric():
    results = (
        EvaluationResult(1.0, 0.25, 0.5, 3.0, 0.75, {"top_k": 0.5, "validation_top_k": 0.25}),
        EvaluationResult(2.0, 0.75, 1.0, 5.0, 0.5, {"top_k": 1.0, "validation_top_k": 0.75}),
    )
    assert EvaluationResult.mean(results) == EvaluationResult(
        1.5, 0.5, 0.75, 4.0, 0.625, {"top_k": 0.75, "validation_top_k": 0.5}
    )
    undefined = EvaluationResult.mean([results[0], EvaluationResult(2.0, None, metrics=results[1].metrics)])
    assert undefined == EvaluationResult(1.5, None, metrics={"top_k": 0.75, "validation_top_k": 0.5})


def test_the_split_depends_on_the_seed_alone():
    train = fedsim.TensorData(torch.arange(50.0), torch.arange(50))
    first, second, with_seed_2 = (fedsim.data.subsets.split_validation(train, 0.3, seed) for seed in (1, 1, 2))
    assert torch.equal(first[1].targets, second[1].targets)
    assert not torch.equal(first[1].targets, with_seed_2[1].targets)
    assert sorted([*first[0].targets.tolist(), *first[1].targets.tolist()]) == list(range(50))


@pytest.mark.parametrize(("share", "workers", "words"), [(0.95, 20, "fewer than one each"), (0.001, 2, "rounds to 0")])
def test_a_split_that_leaves_nothing_is_refused(share, workers, words, tiny_experiment):
    with pytest.raises(ExperimentError, match=words):
        fedsim.run({**tiny_experiment, **SMALL, "workers": workers, "data.validation_fraction": share})
