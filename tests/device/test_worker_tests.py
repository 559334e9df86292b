"""Losses and tests of single workers on a GPU: counts of launches and waits, and plain loops for the numbers."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import fedsim
from fedsim.core.rows import Layout
from fedsim.data import TensorData
from fedsim.errors import FedsimWarning
from fedsim.rounds import cohort_training
from fedsim.rounds.cluster_round import ClusterRound
from fedsim.rounds.executor import Executor
from fedsim.rounds.local_tests import LocalTests
from fedsim.runs.setup import begun
from fedsim.training import shared_state
from fedsim.training.batches import LOCAL_TESTS, LOSSES, WorkItem
from fedsim.training.stacked_tests import ModelTests, passes_of
from tests.clients import test_ifca
from tests.device.agreement import ENGINES, some_gpu
from tests.device.pretend import pretend_gpu
from tests.device.test_waits import counts_of_the_last_round, tables
from tests.engines import zoo

FEW, MANY, WIDTH = 4, 16, 4
MODEL = {"model": "tests.models:sized"}
TESTED = {**MODEL, "data": {"name": "tests.components:tiny", "local_test_fraction": 0.25}}
FAIR = {"aggregate": {"rule": "qfedavg"}}
IFCA = {**MODEL, "local": {"batch_size": 2, "epochs": 1, "algorithm": "ifca", "k": 2}}
OWN_BUFFERS = {**IFCA, "model": "tests.models:Normalised", "buffers": "local"}
COUNTED = {  # settings, and the function in which they need losses or tests of single workers
    "clusters": (IFCA, (ClusterRound, "pull_down")),
    "clusters with own buffers": (OWN_BUFFERS, (ClusterRound, "pull_down")),
    "a rule": (FAIR, (cohort_training, "compute_losses")),
    "a rule in each group": ({**FAIR, "groups": 2}, (cohort_training, "compute_losses")),
    "a cohort by losses": ({"sampling": {"name": "power_of_choice", "candidates": FEW}}, (Executor, "global_losses")),
    "tests of workers": (TESTED, (LocalTests, "__call__")),
    "tests of personal models": ({**TESTED, "local": {"algorithm": "ditto"}}, (LocalTests, "__call__")),
    "tests of trained models": ({**TESTED, "worker_evaluation": {"fine_tune": 1}}, (LocalTests, "__call__")),
}


def counts_in(place, tables):
    """Return the counts in the last call of the function with the name `place[1]` of a module or class."""
    counts, function = [], getattr(*place)
    with pretend_gpu() as gpu, pytest.MonkeyPatch.context() as patch:

        def counting(*arguments, **keywords):
            with gpu.counting() as of_call:
                result = function(*arguments, **keywords)
            counts.append(of_call)
            return result

        patch.setattr(*place, counting)
        fedsim.run(tables)
    return counts[-1]


@pytest.mark.parametrize("engine", ["serial", "batched"])
@pytest.mark.parametrize("case", COUNTED)
def test_waits_do_not_grow_with_the_workers_and_launches_grow_with_the_stacks(case, engine):
    (changes, place), stacks = COUNTED[case], {"batched": {"stack_size": WIDTH}} if engine == "batched" else {}
    counts = []
    for workers in (FEW, MANY):
        sampling = {"sampling": {**changes["sampling"], "candidates": workers}} if "sampling" in changes else {}
        everything = tables(workers, **{**ENGINES[engine], **stacks, **changes, **sampling})
        everything["data"] = {**everything["data"], "train": 8 * workers}
        counts.append(counts_in(place, everything))
    few, many = counts
    assert 0 < many.waits <= few.waits, many.table()
    if engine == "batched":
        assert many.launches <= MANY // WIDTH * few.launches, many.table()


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_losses_of_gradients_are_read_once_a_step(engine):
    stacks = {"batched": {"stack_size": WIDTH}} if engine == "batched" else {}
    changes = {**FAIR, "sync": "gradients", **ENGINES[engine], **stacks}
    few, many = (counts_of_the_last_round(tables(workers, **changes))[-1] for workers in (FEW, MANY))
    assert many.waits <= few.waits, many.table()


class Noisy(nn.Module):
    """A model that draws random numbers in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(128, zoo.CLASSES)

    def forward(self, inputs):
        outputs = self.layer(inputs.flatten(1))
        return outputs if self.training else outputs + torch.randn_like(outputs)


def per_sample(outputs, targets):
    return (outputs.exp().sum(1) - outputs[torch.arange(len(targets)), targets]).square()


def joint(outputs, targets):
    return (outputs - torch.nn.functional.one_hot(targets, zoo.CLASSES)).norm()


def numbers(root):
    train, test = zoo.pictures(root)
    return tuple(TensorData(part.inputs, part.inputs.flatten(1)[:, :3].clone()) for part in (train, test))


def labels(root):
    """Several labels per sample, 0 or 1."""
    train, test = zoo.pictures(root)
    return tuple(TensorData(part.inputs, (part.inputs.flatten(1)[:, :3] > 0).float()) for part in (train, test))


def sentences(root):
    train, test = zoo.texts(root)
    return tuple(TensorData(part.inputs, part.inputs.roll(-1, 1), dtype=torch.long) for part in (train, test))


def next_words():
    return nn.Sequential(nn.Embedding(zoo.WORDS, zoo.WIDTH), nn.Linear(zoo.WIDTH, zoo.WORDS))


def one_logit():
    return nn.Sequential(nn.Flatten(), nn.Linear(128, 1))


def two_labels(root):
    train, test = zoo.pictures(root)
    return tuple(TensorData(part.inputs, part.targets % 2) for part in (train, test))


HERE, LINEAR = __name__, zoo.experiment("log-probabilities")
EACH = {"name": "torch.nn:BCEWithLogitsLoss", "reduction": "none"}
TASKS = {
    "class weights": {"task": {"name": "classification", "class_weights": [0.5, 1.0, 3.0]}},
    "label smoothing": {"task": {"name": "classification", "label_smoothing": 0.1}},
    "binary": {"model": f"{HERE}:one_logit", "data": f"{HERE}:two_labels", "task": "binary"},
    "regression": {"data": f"{HERE}:numbers", "task": "regression"},
    "several labels": {"data": f"{HERE}:labels", "task": EACH},
    "tokens": {"model": f"{HERE}:next_words", "data": f"{HERE}:sentences", "task": {"name": "next_token", "ignore": 0}},
    "a loss per sample": {"task": f"{HERE}:per_sample"},
    "a joint loss": {"task": f"{HERE}:joint"},
    "noise": {"model": f"{HERE}:Noisy"},
}
DEFAULT = {
    *("convolution", "BatchNorm", "BatchNorm without statistics", "BatchNorm and dropout", "buffers", "transformer"),
    *("dropout of channels", "frozen convolution", "halves of a batch", "centred, if it is many", "tied", "RNN"),
}
ON_CPU = {"its share of the batch", "every other sample"}  # models that work only on a CPU
MODELS = [
    pytest.param(zoo.experiment(kind), id=kind, marks=() if kind in DEFAULT else pytest.mark.slow)
    for kind in (*zoo.PICTURES, *zoo.TEXTS)
    if kind not in ON_CPU
]
ONE_BY_ONE = {  # which cannot be tested in stacks
    *("BatchNorm without statistics", "centred batch", "the last of a batch", "counts its samples", "a joint loss"),
    *("the last of a batch, but for the first", "branches by its samples", "centred, if it is many", "noise"),
}


def plain_sums(task, shared, model, worker, size, purpose):
    """Return the loss and the accuracy of a model on a worker's samples in batches of `size`, from the definitions."""
    learning, (row, buffers), module = task.learning_task, model, task.new_module().cpu().eval()
    layout, weights = Layout.of(module), task.class_weights
    layout.write(row.cpu(), module)
    layout.write_buffers(buffers.cpu(), module)
    positions = (shared.data.worker_tests if purpose == LOCAL_TESTS else shared.data.shards).of(worker)
    inputs, targets = (tensor.cpu() for tensor in shared.data.train.gather(positions))
    loss_sum, hits, count, all_outputs = 0.0, 0, 0, []
    for batch, labels in zip(inputs.split(size), targets.split(size), strict=True):
        outputs = module(batch)
        answers = int(learning.counts(labels).sum()) if hasattr(learning, "counts") else len(labels)
        loss = learning.loss(outputs, labels).item()
        if weights and purpose == LOSSES:
            of_samples = torch.nn.functional.cross_entropy(outputs, labels, reduction="none")
            loss = (of_samples * torch.tensor(weights)[labels]).mean().item()
        loss_sum, count = loss_sum + loss * answers, count + answers
        hits += int(learning.correct(outputs, labels).sum()) if hasattr(learning, "correct") else 0
        all_outputs.append(outputs)
    if hasattr(learning, "is_joint") and learning.is_joint(all_outputs[0], targets):
        loss_sum = learning.loss(torch.cat(all_outputs), targets).item() * count
    loss, accuracy = (loss_sum / count, hits / count) if count else (math.nan, math.nan)
    return loss, accuracy if hasattr(learning, "correct") else None


def models_of(executor):
    """Give each worker another model. Return tests of these, of the global model, and of that with own buffers."""
    cohort, server = executor.shared.cohort, executor.shared.server
    for slot in range(len(cohort.rows)):
        cohort.rows[slot] = server.row * (1 + 0.1 * slot) + 0.01 * slot
        cohort.buffers[slot] = server.buffers * (1 + 0.1 * slot)
    work = executor.batch_source.work([WorkItem(slot, slot, 1) for slot in range(len(cohort.rows))])
    own, common = list(zip(cohort.rows, cohort.buffers, strict=True)), (server.row, server.buffers)
    mixed = [(server.row, buffers) for buffers in cohort.buffers]
    return [
        ModelTests(work, lambda member: own[member.slot]),
        ModelTests(work, lambda member: common, shared=True),
        ModelTests(work, lambda member: mixed[member.slot]),
    ]


@torch.no_grad()
def compare(executor, size, purpose):
    """Compare tests of all workers with plain loops. Return whether the models were tested in stacks."""
    tester, several = executor.worker_tests, models_of(executor)
    if purpose == LOSSES:
        results = [[(loss, None) for loss in losses] for losses in tester.training_losses(*several)]
    else:
        tested = tester._tested(dict(enumerate(several)))
        results = [[tested[member.worker][key] for member in tests.members] for key, tests in enumerate(several)]
    for tests, values in zip(several, results, strict=True):
        for member, (loss, accuracy) in zip(tests.members, values, strict=True):
            model = tests.model_of(member)
            expected = plain_sums(executor.task, executor.shared, model, member.worker, size, purpose)
            assert loss == pytest.approx(expected[0], rel=1e-9, abs=1e-9, nan_ok=True)
            if purpose == LOCAL_TESTS:
                assert str(accuracy) == str(expected[1])  # equal, None or NaN
    return tester._stacked.are_possible


def stacked_of(tables, size, purpose, monkeypatch):
    """Compare the workers' losses or tests with plain loops. Return whether models were tested in stacks."""
    monkeypatch.setattr(shared_state, "TEST_BATCH_ON_GPU", size)
    where = {**ENGINES["batched"], "device": "cuda", "batched": {"stack_size": 2}}
    held_out = {"data": {"name": tables["data"], "local_test_fraction": 0.4}} if purpose == LOCAL_TESTS else {}
    experiment = fedsim.Experiment(**{**tables, **where, **held_out})
    with some_gpu(), warnings.catch_warnings(), fedsim.Session() as session:
        warnings.simplefilter("ignore")
        with begun(experiment, session) as (_, engine):
            [stacked] = engine.run(lambda executor: compare(executor, size, purpose))
    return stacked


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_losses_of_models_are_those_of_plain_loops(model, monkeypatch, request):
    """Shards have 1 to 20 samples, in batches of 4 with smaller last ones, padded to the largest of a stack."""
    stacked = stacked_of(model, 4, LOSSES, monkeypatch)
    assert stacked == (request.node.callspec.id not in ONE_BY_ONE)


@pytest.mark.gpu
@pytest.mark.parametrize("purpose", [LOSSES, LOCAL_TESTS])
@pytest.mark.parametrize("case", [case for case in TASKS if case != "noise"])
def test_losses_of_tasks_are_those_of_plain_loops(case, purpose, monkeypatch):
    stacked = stacked_of({**LINEAR, **TASKS[case]}, 6, purpose, monkeypatch)
    assert stacked == (case not in ONE_BY_ONE)


@pytest.mark.gpu
def test_workers_select_the_clusters_of_a_plain_loop():
    """The loop computes each loss on the whole shard, on the CPU."""
    fed, k = test_ifca.Workers(), 3
    _, selected = test_ifca.reference(fed, k, [len(shard) for shard in fed.shards])
    with some_gpu():
        result = fedsim.run({**test_ifca.tables_of(k), **ENGINES["batched"], "device": "cuda"})
    assert [record.clusters for record in result.history] == selected
    assert len({cluster for clusters in selected for cluster in clusters}) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("nonfinite", [math.nan, math.inf])
def test_a_worker_selects_a_model_whose_loss_is_not_nan(nonfinite):
    def clusters(executor):
        members = executor.batch_source.work([WorkItem(0, 2, 1)])
        executor.shared.server.row.fill_(nonfinite)
        executor.worker_tests.load(members)
        return executor.shared.cohort.clusters.tolist()[0], executor.shared.cohort.rows[0].isfinite().all().item()

    where = {**ENGINES["batched"], "device": "cuda"}
    experiment = fedsim.Experiment(**{**test_ifca.tables_of(2), **where})
    with some_gpu(), fedsim.Session() as session, begun(experiment, session) as (_, engine):
        assert engine.run(clusters) == [(1, True)]


ALTERED = {
    "label flipping": {"attack": {"name": "label_flipping", "workers": [1, 3]}},
    "views with noise": {"partition": {"name": "feature_noise", "sigma": 1.0}},
    "views and a backdoor": {
        "partition": {"name": "feature_noise", "sigma": 1.0},
        "attack": {"name": "backdoor", "workers": [1, 3]},
    },
    "a server with samples of its own": {"aggregate": {"rule": f"{__name__}:by_root_and_losses", "root_samples": 9}},
}


def by_root_and_losses(updates, losses, root):
    return (losses.to(updates) @ updates + root) / (1 + losses.sum().item())


@pytest.mark.gpu
@pytest.mark.parametrize("case", ALTERED)
def test_stacks_see_the_samples_that_single_workers_see(case, monkeypatch):
    """Batches of 4 samples are altered by their numbers."""
    monkeypatch.setattr(shared_state, "TEST_BATCH_ON_GPU", 4)
    everything = {**zoo.experiment("convolution"), **FAIR, "device": "cuda", **ALTERED[case]}
    with some_gpu():
        stacked, single = (fedsim.run({**everything, **ENGINES[engine]}) for engine in ("batched", "serial"))
    for ours, theirs in zip(stacked.history, single.history, strict=True):
        assert ours.test_loss == pytest.approx(theirs.test_loss, abs=1e-9)
    assert torch.allclose(stacked.global_row, single.global_row, rtol=0, atol=1e-9)


@pytest.mark.gpu
def test_a_model_that_cannot_be_stacked_is_named_once():
    everything = {**LINEAR, **FAIR, "model": f"{HERE}:Noisy", **ENGINES["batched"], "device": "cuda"}
    with some_gpu(), pytest.warns(FedsimWarning) as warned:
        fedsim.run(everything)
    lines = [str(warning.message) for warning in warned if "one after another" in str(warning.message)]
    assert lines == [
        "workers are tested one after another, with the same results: a forward pass in evaluation mode changes "
        "attributes, or draws random numbers"
    ]


def test_a_pass_holds_at_most_a_number_of_batches_and_samples():
    """Batches of similar sizes are tested together, so that padding is short."""
    samples = np.array([3, 0, 25, 9, 1])
    passes = list(passes_of(samples, 10, most_batches=3, most_samples=20))
    assert [part.sizes.tolist() for part in passes] == [[10, 10], [9, 5], [3, 1]]
    assert [part.position.tolist() for part in passes] == [[2, 2], [3, 2], [0, 4]]
    assert [part.number.tolist() for part in passes] == [[0, 1], [0, 2], [0, 0]]
    assert [len(part.sizes) for part in passes_of(samples, 10, most_batches=1, most_samples=5)] == [1] * 6
