"""What the probe of a model detects before rows are stacked, and that stacked models agree with `serial`."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import fedsim
from fedsim.models import model as models
from fedsim.runs.setup import begun
from fedsim.training.probe import TOLERANCE, StackingProbe, Trials
from tests.engines.test_contract import ROUNDING, assert_close
from tests.engines.zoo import PICTURES, REFUSED, TEXTS, experiment
from tests.real_models import CHAR_LSTM, GPT, RESNET


@pytest.fixture
def dry_run():
    """Return a function that returns the StackingProbe of an experiment."""

    def probe(tables):
        wanted = fedsim.Experiment(**{**tables, "engine": "serial"})
        with fedsim.Session() as session, begun(wanted, session) as (task, engine):
            return StackingProbe.of(task, engine.shared)

    return probe


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap, for operations that it loops over
@pytest.mark.parametrize("sync", ["parameters", pytest.param("gradients", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [*PICTURES, *TEXTS])
def test_a_model_that_is_stacked_agrees_with_serial_and_its_batches_are_merged_where_they_can_be(
    kind, sync, monkeypatch
):
    tables, probes, of = {**experiment(kind), "sync": sync}, [], StackingProbe.of
    monkeypatch.setattr(StackingProbe, "of", lambda *arguments: probes.append(of(*arguments)) or probes[0])
    serial = fedsim.run({**tables, "engine": "serial"})
    stacked = fedsim.run({**tables, "engine": "batched", "processes": 1, "batched": {"stack_size": 3}})
    assert_close(serial, stacked, ROUNDING)
    assert [(probe.coupled, probe.merged) for probe in probes] == [(kind in COUPLED, kind not in COUPLED | VMAPPED)]


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_be_stacked_is_refused_with_the_reason(kind, dry_run):
    _, reason = REFUSED[kind]
    with pytest.raises(fedsim.ExperimentError) as refusal:
        dry_run(experiment(kind))
    (line,) = str(refusal.value).splitlines()
    assert line.startswith(f'engine = "batched": the model cannot be trained in stacks of workers: {reason}')
    assert line.endswith("; use engine=processes")


def test_a_difference_in_float32_is_confirmed_in_float64(dry_run, tiny_experiment, monkeypatch):
    """With no tolerance for rounding in float32, only the comparison in float64 can accept the model."""
    tables = {**tiny_experiment, "model": f"{__name__}:with_batch_norm"}
    monkeypatch.setitem(TOLERANCE, torch.float32, -1.0)
    monkeypatch.setattr(Trials, "compare_steps", lambda self: None)
    assert dry_run(tables).coupled
    monkeypatch.setitem(TOLERANCE, torch.float64, -1.0)
    with pytest.raises(fedsim.ExperimentError, match="the gradient of 1.weight differs"):
        dry_run(tables)


def with_batch_norm():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


def test_first_samples_that_are_nan_are_named_and_not_the_model(dry_run, tiny_experiment):
    tables = {**tiny_experiment, "data": "tests.components:with_a_hole", "aggregate": {"nonfinite": "exclude"}}
    line = (
        '^engine = "batched": cannot test the model, because 60 of the first 64 training samples '
        "contain NaN or infinity"
    )
    with pytest.raises(fedsim.ExperimentError, match=f"{line}; remove them, or use engine=processes$"):
        dry_run(tables)


SMALL = {  # parameters that leave the layers of a model as they are, and make trials fast
    "char_lstm": CHAR_LSTM["model"],
    "gpt": {**GPT["model"], "dropout": 0.1},
    "torchvision:googlenet": {"aux_logits": False},
}
FROM_TORCHVISION = ["torchvision:squeezenet1_1"]
FROM_TORCHVISION += [
    pytest.param(f"torchvision:{name}", marks=pytest.mark.slow)
    for name in (
        *("convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "mnasnet0_5"),
        *("mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf", "regnet_y_400mf", "resnet18", "resnext50_32x4d"),
        *("shufflenet_v2_x0_5", "swin_t", "swin_v2_t"),
    )
]


@pytest.mark.parametrize("name", [*models.names(), *FROM_TORCHVISION])
def test_every_model_is_stacked_as_it_declares(name, dry_run):
    pixels = 8 if name.startswith("resnet") else 64 if ":" in name else 28
    data = {"name": "tests.real_models:noise", "shape": [3 if pixels != 28 else 1, pixels, pixels]}
    task = {"data": "tests.real_models:text", "task": "next_token"} if name in ("char_lstm", "gpt") else {"data": data}
    task |= {"task": "regression", "data": "tests.other_tasks:planes"} if name == "linear" else {}
    params = {"inputs": 5} if name == "linear" else SMALL.get(name, {})
    tables = {**task, "model": {"name": name, **params}, "workers": 3, "local": {"batch_size": 4}}
    declared = models.get(name).target.stacked
    if declared not in ("merged", "vmap"):
        with pytest.raises(fedsim.ExperimentError, match=f"stacks of workers: {declared}; use engine=processes$"):
            dry_run({**tables, "precision": "float64"})
        return
    probe = dry_run({**tables, "precision": "float64"})
    assert declared == ("merged" if probe.merged else "vmap")


@pytest.mark.parametrize("norm", ["group", "none"])
def test_a_resnet_without_batch_norm_is_merged(norm, dry_run):
    assert dry_run({**RESNET, "model": {"name": "resnet20", "norm": norm}, "workers": 3, "precision": "float64"}).merged


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap, for attention
def test_functions_of_partial_arguments_in_a_module_are_compared_by_value(dry_run):
    """A vision transformer, whose deep copy holds other objects of functools.partial."""
    data = {"name": "tests.real_models:noise", "shape": [3, 8, 8]}
    tables = {"model": "tests.real_models:small_vit", "data": data, "workers": 3, "precision": "float64"}
    assert not dry_run(tables).merged
    assert models.get("torchvision:vit_b_32").target.stacked == "vmap"


COUPLED = {
    *("BatchNorm", "BatchNorm without statistics", "BatchNorm without parameters", "BatchNorm frozen"),
    *("BatchNorm twice", "BatchNorm and dropout", "InstanceNorm with statistics", "buffers", "centred batch"),
    *("the last of a batch", "the last of a batch, but for the first", "its share of the batch"),
    *("counts its samples", "branches by its samples"),
}
VMAPPED = {  # models that depend on positions, or pass parameters to functions without a stacked version
    *("transposed convolution", "InstanceNorm", "clamped", "without dimensions", "linear, no bias", "linear, one bias"),
    *("linear, single samples", "linear, transposed", "every other sample", "halves of a batch", "einsum"),
    *("centred, if it is many", "transformer", "attention", "recurrent cell"),
}


def test_batch_norm_that_wants_more_than_one_sample_couples_them(dry_run, tiny_experiment):
    assert dry_run({**tiny_experiment, "model": "tests.models:Normalised"}).coupled


def test_dropouts_are_found_in_their_order_with_what_they_draw_for_a_sample(dry_run):
    net = dry_run({"model": "net", "workers": 2, "cohort": 1})
    assert [(dropout.function.__name__, dropout.p, dropout.shape) for dropout in net.dropouts] == [
        ("dropout2d", 0.5, (20, 1, 1)),
        ("dropout", 0.5, (50,)),
    ]
    assert dry_run({"model": {"name": "net", "dropout": 0.0}, "workers": 2, "cohort": 1}).dropouts == ()


def test_the_memory_that_a_sample_takes_is_about_that_of_its_activations(dry_run):
    """`net` in float32: two convolutions, the inputs that pooling and ReLU keep, and the later layers."""
    least = 4 * (10 * 24 * 24 + 20 * 8 * 8)
    assert least < dry_run({"model": "net", "workers": 2, "cohort": 1}).sample_bytes < 8 * least


def test_a_probe_changes_neither_the_random_state_nor_the_rows(dry_run):
    before = torch.get_rng_state()
    with fedsim.Session() as session:
        tables = fedsim.Experiment(**experiment("BatchNorm and dropout"), engine="serial")
        with begun(tables, session) as (task, engine):
            shared = engine.shared
            copies = [tensor.clone() for tensor in (shared.server.row, shared.cohort.rows, shared.cohort.buffers)]
            StackingProbe.of(task, shared)
            for tensor, old in zip((shared.server.row, shared.cohort.rows, shared.cohort.buffers), copies, strict=True):
                assert torch.equal(tensor, old)
    assert torch.equal(before, torch.get_rng_state())


@dataclass(frozen=True)
class Normalised:
    """A client algorithm that normalises the gradient of a whole row."""

    lr: float = 0.05

    def start(self, rows):
        return {}

    def step(self, rows, gradients, state):
        rows -= self.lr * gradients / gradients.norm(dim=-1, keepdim=True)


@dataclass(frozen=True)
class Decaying(Normalised):
    """A client algorithm that counts its steps in a Python number."""

    def start(self, rows):
        return {"steps": torch.zeros(())}

    def step(self, rows, gradients, state):
        state["steps"] += 1
        rows -= self.lr / state["steps"] * gradients


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [("Normalised", "local.algorithm is not element-wise"), ("Decaying", "a step of local.algorithm fails")],
)
def test_an_algorithm_that_is_not_element_wise_is_refused(algorithm, reason, dry_run):
    tables = {**experiment("convolution"), "local": {"algorithm": f"{__name__}:{algorithm}", "batch_size": 4}}
    with pytest.raises(fedsim.ExperimentError, match=re.escape(reason)):
        dry_run(tables)


@pytest.mark.parametrize("kind", ["convolution", "BatchNorm"])  # members side by side, and members picked by an index
def test_an_algorithm_may_replace_what_it_keeps(kind):
    local = {"algorithm": "tests.device.test_captured_steps:Replacing", "late": True, "batch_size": 4}
    tables = {**experiment(kind), "local": local}
    serial = fedsim.run({**tables, "engine": "serial"})
    assert_close(serial, fedsim.run({**tables, "engine": "batched", "processes": 1}), ROUNDING)


LARGER = ["every other sample", "halves of a batch", "centred, if it is many"]
LARGER += ["the last of a batch, but for the first", "its share of the batch"]


@pytest.mark.parametrize("kind", LARGER)
@pytest.mark.parametrize("width", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_a_model_that_depends_on_the_size_of_batches_agrees_with_serial(kind, width):
    tables = {**experiment(kind), "local": {"batch_size": 7, "lr": 0.05}}
    serial = fedsim.run({**tables, "engine": "serial"})
    stacked = fedsim.run({**tables, "engine": "batched", "processes": 1, "batched": {"stack_size": width}})
    assert_close(serial, stacked, ROUNDING)


def test_a_model_that_splits_large_batches_is_refused_when_it_does():
    """Eight samples of two rows are one piece; with eight per row, each piece holds samples of only one row."""
    tables = {**experiment("in pieces"), "local": {"batch_size": 8, "lr": 0.05}}
    with pytest.raises(
        fedsim.ExperimentError,
        match="the model's operations depend on the size or the values of a batch.*; use engine=processes$",
    ):
        fedsim.run({**tables, "engine": "batched", "processes": 1, "batched": {"stack_size": 2}})
