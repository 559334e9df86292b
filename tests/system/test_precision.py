from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedsim
from fedsim.core.randomness import batch_order
from fedsim.system.precision import PRECISIONS, cast_for_autocast, full_precision, tf32_allowed
from tests.components import tiny
from tests.matrix import in_turn

CPU = torch.device("cpu")


def switches():
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.fixture
def switches_kept():
    before = switches()
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("before", [(False, True), (True, False), (True, True), (False, False)])
def test_tf32_is_switched_in_products_and_convolutions_and_put_back(before, switches_kept):
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    with tf32_allowed(True):
        with tf32_allowed(False):
            assert switches() == (False, False)
        assert switches() == (True, True)
    assert switches() == before


@pytest.mark.parametrize("before", [(False, True), (True, False), (True, True), (False, False)])
def test_full_precision_leaves_only_convolutions_that_are_not_used_with_tf32(before, switches_kept):
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    with full_precision(torch.device("cuda")):
        assert switches() == (False, False)
    with full_precision(torch.device("cuda"), convolutions=False):
        assert switches() == (False, not before[0] and before[1])
    assert switches() == before


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="this PyTorch only has the older switches")
@pytest.mark.parametrize("allowed", [True, False])
def test_where_the_older_switches_cannot_be_read_the_newer_ones_are_used(allowed):
    newer = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn
    before = [part.fp32_precision for part in newer]
    try:
        newer[0].fp32_precision, newer[1].fp32_precision = "tf32", "ieee"
        with pytest.raises(RuntimeError):
            switches()
        mixed = [part.fp32_precision for part in newer]
        with tf32_allowed(allowed):
            assert [part.fp32_precision for part in newer] == ["tf32" if allowed else "ieee"] * 3
        with full_precision(torch.device("cuda"), convolutions=False):
            assert newer[0].fp32_precision == "ieee"
        assert [part.fp32_precision for part in newer] == mixed
    finally:
        for part, value in zip(newer, before, strict=True):
            part.fp32_precision = value


def test_tf32_is_refused_on_a_cpu(tiny_experiment):
    with pytest.raises(fedsim.ExperimentError, match='precision = "tf32": cpu does not support TF32, .* use float32'):
        fedsim.run({**tiny_experiment, "precision": "tf32", "device": "cpu"})


def test_a_model_that_has_an_operation_without_that_type_is_refused_in_one_line(tiny_experiment):
    tables = {**tiny_experiment, "precision": "bf16", "model": "tests.system.test_precision:Copying"}
    with pytest.raises(fedsim.ExperimentError) as caught:
        fedsim.run(tables)
    (line,) = caught.value.lines
    assert line.startswith(f'precision = "bf16": the model "{__name__}:Copying" cannot be trained')
    fedsim.run({**tables, "precision": "float32", "rounds": 1})


class Copying(nn.Module):
    """A model that writes a tensor which autocast has cast into one which it has not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(784, 10)

    def forward(self, images):
        outputs = self.linear(images.flatten(1))
        return torch.zeros(outputs.shape).index_copy_(0, torch.arange(len(outputs)), outputs)


def test_operands_are_cast_as_autocast_casts_them():
    single, double, whole = torch.ones(2), torch.ones(2, dtype=torch.double), torch.ones(2, dtype=torch.long)
    assert cast_for_autocast(single, None)[0] is single
    with torch.autocast("cpu", torch.bfloat16):
        operands = cast_for_autocast(single, double, whole, None)
    assert operands[-1] is None
    assert [tensor.dtype for tensor in operands[:-1]] == [torch.bfloat16, double.dtype, whole.dtype]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_record_says_what_was_in_force(precision, tiny_experiment, tmp_path):
    if precision == "tf32":
        metadata = PRECISIONS[precision].metadata()
    else:
        fedsim.run({**tiny_experiment, "precision": precision, "rounds": 1}, out=tmp_path / "run")
        metadata = json.loads((tmp_path / "run" / "environment.json").read_text())["arithmetic"]
    assert metadata == {
        "rows": "float64" if precision == "float64" else "float32",
        "forward": {"float64": "float64", "bf16": "bfloat16"}.get(precision, "float32"),
        "tf32": precision == "tf32",
    }


def autocast_run(tables):
    """Return the row of `tiny_experiment` with one worker: autocast and SGD with momentum in plain PyTorch."""
    train, _ = tiny(None)
    inputs, targets = train.to(CPU, torch.float32).gather(torch.arange(len(train)))
    shard = fedsim.dataset_split(train, "iid", 1, seed=0)[0].indices
    model = fedsim.run({**tables, "local": {**tables["local"], "lr": 0.0}, "precision": "float32"}).model.train()
    for round in range(1, tables["rounds"] + 1):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        for places in batch_order(0, round, 0, 0, len(shard)).split(16):
            batch = torch.as_tensor(shard)[places]
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                outputs = model(inputs[batch])
            F.cross_entropy(outputs.float(), targets[batch]).backward()
            optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_bf16_is_autocast_with_float32_rows(engine, tiny_experiment):
    tables = {**tiny_experiment, "workers": 1}
    result = fedsim.run({**tables, "engine": engine, "processes": 1, "precision": "bf16"})
    assert result.global_row.dtype == torch.float32
    assert torch.allclose(result.global_row, autocast_run(tables), rtol=0, atol=2e-5)


@in_turn(("model", "sync"), ["2nn", "net", "tests.models:Normalised", "tests.models:Tied"], ["parameters", "gradients"])
def test_in_bf16_stacked_rows_differ_from_serial_ones_no_more_than_from_float32(model, sync, tiny_experiment):
    tables = {**tiny_experiment, "model": model, "sync": sync, "local": {"batch_size": 13, "momentum": 0.5}}
    full = fedsim.run(tables).global_row
    serial = fedsim.run({**tables, "precision": "bf16"}).global_row
    stacked = fedsim.run({**tables, "precision": "bf16", "engine": "batched", "processes": 1}).global_row
    assert not torch.equal(serial, full)
    scale = full.norm()
    assert (serial - full).norm() < 0.1 * scale
    assert (stacked - serial).norm() < max(2 * (serial - full).norm(), 1e-3 * scale)
    assert (stacked - full).norm() < 0.1 * scale
