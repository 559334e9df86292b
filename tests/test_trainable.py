"""Training a part of a model: name patterns, low-rank adapters, and weights from a file."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file

import fedsim
from fedsim.comparison.runner import merge
from fedsim.core.randomness import draw_key
from fedsim.core.rows import Layout
from fedsim.errors import ExperimentError
from fedsim.models import two_nn
from fedsim.runs.setup import task_of
from tests import components
from tests.textbook import Federation, small_two_nn

ENGINES = ["serial", "processes", "batched"]


def start_module(tables):
    return task_of(fedsim.Experiment(**tables), torch.device("cpu")).new_module()


def averaged_rounds(federation, row, gradient, rounds=2, lr=0.05):
    """Federated averaging of rows: each worker takes one epoch of plain SGD steps."""
    for round in range(1, rounds + 1):
        rows = {}
        for worker in range(3):
            rows[worker] = row.clone()
            for batch in federation.epoch(round, worker):
                rows[worker] -= lr * gradient(rows[worker], batch)
        row = federation.average(rows)
    return row


@pytest.fixture
def federation():
    return Federation(small_two_nn, components.tiny, 3, 16)


@pytest.fixture
def tables(tiny_experiment):
    local = {"batch_size": 16, "lr": 0.05}
    return {**tiny_experiment, "precision": "float64", "local": local}


@pytest.mark.parametrize("engine", ENGINES)
def test_lora_is_the_low_rank_sum_of_the_paper(engine, tables, federation):
    tables["model"] = {**tables["model"], "lora": {"rank": 3, "alpha": 6.0, "targets": ["1", "5"]}}
    module = start_module(tables)
    shapes = [entry.shape for entry in Layout.of(module).parameters]
    assert [tuple(shape) for shape in shapes] == [(3, 784), (20, 3), (3, 20), (10, 3)]
    base = [parameter.detach() for parameter in federation.model.parameters()]

    def gradient(row, batch):
        row = row.clone().requires_grad_()
        parts = row.split([shape.numel() for shape in shapes])
        a1, b1, a3, b3 = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        w1, bias1, w2, bias2, w3, bias3 = base
        hidden = (batch[0].flatten(1) @ (w1 + 6 / 3 * b1 @ a1).T + bias1).relu()
        logits = (hidden @ w2.T + bias2).relu() @ (w3 + 6 / 3 * b3 @ a3).T + bias3
        return torch.autograd.grad(torch.nn.functional.cross_entropy(logits, batch[1]), row)[0]

    expected = averaged_rounds(federation, Layout.of(module).read(module), gradient)
    result = fedsim.run({**tables, "engine": engine})
    assert torch.allclose(result.global_row, expected, rtol=0, atol=1e-11)
    frozen = dict(result.model.named_parameters())
    assert all(torch.equal(frozen[name], start) for name, start in federation.model.named_parameters())


def test_an_adapted_model_starts_as_the_model_itself(tables):
    plain, adapted = start_module(tables), start_module({**tables, "model": {**tables["model"], "lora": {"rank": 2}}})
    inputs = torch.randn(5, 784, dtype=torch.float64)
    assert torch.equal(adapted(inputs), plain(inputs))


def narrow_layers() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), *(torch.nn.Linear(n, n - 100) for n in range(784, 110, -100)))


def test_adapters_are_drawn_in_the_order_of_the_model(tables):
    """The order of a set would differ between processes."""
    tables = {**tables, "model": {"name": narrow_layers, "lora": {"rank": 2}}}
    with torch.random.fork_rng():
        torch.manual_seed(draw_key(0, "model"))
        layers = narrow_layers()[1:]
        expected = [layer.weight.new_empty(2, layer.in_features) for layer in layers]
        for matrix in expected:
            torch.nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))
    drawn = [layer.lora_a.float() for layer in start_module(tables)[1:]]
    assert len(drawn) == 7
    assert all(map(torch.equal, drawn, expected))
    tables["model"]["lora"]["targets"] = ["7", "*"]
    assert all(
        torch.equal(layer.lora_a.float(), a) for layer, a in zip(start_module(tables)[1:], expected, strict=True)
    )


class Encoder(torch.nn.Module):
    """A transformer layer. Its fast path in evaluation reads the weights of its linear layers directly."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(28, 2, 16, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(28, 10)

    def forward(self, inputs):
        return self.head(self.layer(inputs.reshape(-1, 28, 28)).mean(1))


def test_tests_use_the_adapters_of_transformer_layers(tables):
    module = start_module({**tables, "model": {"name": Encoder, "lora": {"rank": 2}}})
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("lora_b"):
                parameter.fill_(0.1)
    inputs = torch.randn(5, 784, dtype=torch.float64)
    assert torch.allclose(module.eval()(inputs), module.train()(inputs))


@pytest.mark.parametrize("engine", ENGINES)
def test_only_named_parameters_are_trained(engine, tables, federation):
    tables["local"] = {**tables["local"], "trainable": ["5"]}
    last = Layout.of(federation.model).parameters[-2].offset

    def gradient(row, batch):
        return federation.gradient(torch.cat([federation.row[:last], row]), batch)[last:]

    expected = averaged_rounds(federation, federation.row[last:], gradient)
    result = fedsim.run({**tables, "engine": engine})
    assert torch.allclose(result.global_row, expected, rtol=0, atol=1e-11)


def test_adapters_and_named_parameters_are_trained_together(tables):
    tables = {**tables, "model": {**tables["model"], "lora": {"rank": 1, "targets": ["1"]}}}
    module = start_module({**tables, "local": {**tables["local"], "trainable": ["*.bias"]}})
    names = [entry.name for entry in Layout.of(module).parameters]
    assert names == ["1.bias", "1.lora_a", "1.lora_b", "3.bias", "5.bias"]


def test_frozen_parameters_exist_once_per_process(tables):
    task = task_of(
        fedsim.Experiment(**{**tables, "local": {**tables["local"], "trainable": ["5"]}}), torch.device("cpu")
    )
    first, second = task.new_module(), task.new_module()
    shared = [a is b for a, b in zip(first.parameters(), second.parameters(), strict=True)]
    assert shared == [True, True, True, True, False, False]


def change_frozen(model, batches):
    with torch.no_grad():
        model[1].weight.add_(1.0)
    for _ in batches:
        pass


def test_a_change_of_a_shared_frozen_parameter_is_an_error(tables):
    local = {"algorithm": change_frozen, "trainable": ["5"]}
    with pytest.raises(ExperimentError, match="changes the frozen parameter 1.weight"):
        fedsim.run({**tables, "engine": "serial", "local": local})


def test_a_run_starts_from_weights_in_a_file(tables, tmp_path):
    torch.manual_seed(3)
    stored = two_nn(hidden=20)
    save_file(stored.state_dict(), tmp_path / "start.safetensors")
    module = start_module({**tables, "model": {**tables["model"], "weights": tmp_path / "start.safetensors"}})
    assert all(torch.equal(a, b.double()) for a, b in zip(module.parameters(), stored.parameters(), strict=True))


def test_a_finished_run_with_weights_and_adapters_is_read_without_the_file(tables, tmp_path):
    path = tmp_path / "start.safetensors"
    save_file(two_nn(hidden=20).state_dict(), path)
    model = {**tables["model"], "weights": path, "lora": {"rank": 2}}
    result = fedsim.run({**tables, "engine": "serial", "model": model}, tmp_path / "run")
    path.unlink()
    assert torch.equal(fedsim.load_run(tmp_path / "run", allow_imports=True).global_row, result.global_row)


def test_a_finished_comparison_is_read_without_the_weights_and_the_device(tables, tmp_path):
    path, folder = tmp_path / "start.safetensors", tmp_path / "comparison"
    save_file(two_nn(hidden=20).state_dict(), path)
    model = {**tables["model"], "weights": path}
    axes = {"seed": [0, 1]}
    table = fedsim.compare({**tables, "engine": "serial", "device": "cpu", "model": model}, axes, folder, jobs=1).table
    path.unlink()
    for file in (folder / "comparison.json", *folder.rglob("experiment.toml")):
        file.write_text(file.read_text().replace('"cpu"', '"cuda:7"'))
    assert fedsim.load_comparison(folder, allow_imports=True).table == table
    assert len(merge([folder], tmp_path / "merged", allow_imports=True).runs) == 2


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"local": {"trainable": ["4*"]}}, 'local.trainable: no parameter matches "4\\*"; allowed: 1, 3, 5'),
        ({"model": {"lora": {"rank": 1, "targets": ["2"]}}}, 'model.lora.targets: no linear layer matches "2"'),
        ({"model": {"weights": "missing.safetensors"}}, "model.weights = .*: cannot be read: No such file"),
        ({"model": {"weights": "model.pt"}}, "must be a .safetensors file, because reading a pickle can run code"),
        ({"model": {"weights": "damaged.safetensors"}}, "model.weights = .*: is damaged"),
        (
            {"model": {"weights": "small.safetensors"}},
            r'the shape of "1.weight" is \[2, 784\] in the file, but \[20, 784\] in the model',
        ),
        ({"model": {"weights": "nan.safetensors"}}, 'model.weights = .*: "1.weight" contains NaN or infinity'),
    ],
)
def test_what_does_not_fit_the_model_is_one_line(changes, line, tables, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged.safetensors").write_bytes(b"no tensors")
    save_file(two_nn(hidden=2).state_dict(), tmp_path / "small.safetensors")
    save_file(
        {name: value.log() for name, value in two_nn(hidden=20).state_dict().items()}, tmp_path / "nan.safetensors"
    )
    changed = {table: {**tables[table], **values} for table, values in changes.items()}
    with pytest.raises(ExperimentError, match=line):
        fedsim.run({**tables, **changed})


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_biases_of_group_norms_are_trained_alone(engine):
    """PyTorch's backward pass of such a layer crashes the process if its inputs are channels_last."""
    model = {"name": "resnet20", "channels": 3, "classes": 3, "norm": "group"}
    tables = {"data": {"name": "tests.real_models:noise", "shape": [3, 8, 8], "classes": 3}, "model": model}
    tables |= {"workers": 2, "rounds": 1, "engine": engine, "precision": "float64"}
    tables["local"] = {"trainable": ["*bias"], "batch_size": 4, "steps": 1, "lr": 0.1}
    result = fedsim.run(tables)
    names = [name for name, value in result.model.named_parameters() if value.requires_grad]
    assert names
    assert all(name.endswith("bias") for name in names)
    assert result.global_row.isfinite().all()
