"""Functions, classes, modules and data sets that Python code passes in an experiment."""

from __future__ import annotations

import functools
import gc
import threading
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import fedsim
from fedsim.cli.main import app
from fedsim.clients.sgd import SGD
from fedsim.comparison import plan_comparison
from fedsim.comparison.folder import ComparisonFolder
from fedsim.config.files import to_toml
from fedsim.config.load import load_experiment
from fedsim.core.objects import name_of
from fedsim.errors import DataError, ExperimentError, FedsimWarning
from fedsim.server import ServerStep
from tests.commands import ended, start
from tests.components import tiny


class Perceptron(nn.Module):
    def __init__(self, hidden: int = 8, activation=nn.ReLU):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), activation(), nn.Linear(hidden, 10))

    def forward(self, images):
        return self.layers(images)


@dataclass(frozen=True)
class HalfStep(ServerStep):
    lr: float = 0.5

    def step(self, rows, update, state):
        rows.add_(update, alpha=self.lr)


@pytest.fixture
def short(tiny_experiment):
    return {**tiny_experiment, "rounds": 1, "model": "logistic", "records": {"figures": []}}


def layered(layers=()):
    return Perceptron()


class NotCallable:
    """A class whose instances cannot be called."""


def malformed(updates, *, c: nowhere = 1):  # noqa: F821
    return updates.mean(0)


def local_class():
    class Local(Perceptron):
        pass

    return Local


@pytest.fixture
def pair():
    generator = torch.Generator().manual_seed(0)
    images, targets = torch.randn(90, 1, 28, 28, generator=generator), torch.arange(90) % 10
    return TensorDataset(images[:60], targets[:60]), TensorDataset(images[60:], targets[60:])


def same(first, second):
    return torch.equal(first.global_row, second.global_row)


@pytest.mark.parametrize(
    "model",
    [
        lambda: Perceptron,
        local_class,
        lambda: lambda: Perceptron(),
        lambda: {"name": Perceptron, "hidden": 8},
        lambda: {"name": functools.partial(Perceptron, hidden=8)},
    ],
)
def test_a_model_can_be_a_class_or_a_function(short, model):
    by_path = fedsim.run({**short, "model": "tests.config.test_objects:Perceptron"})
    assert same(fedsim.run({**short, "model": model()}), by_path)


def test_a_module_given_as_a_model_is_the_start_and_stays_as_it_is(short):
    module = Perceptron()
    before = fedsim.Layout.of(module).read(module)
    first, second = (fedsim.run({**short, "model": module, "local": {"lr": 1e-6}, "seed": 0}) for _ in range(2))
    assert same(first, second)
    assert torch.equal(fedsim.Layout.of(module).read(module), before)
    assert 0 < (first.global_row - before).abs().max() < 1e-3


def test_a_pair_of_datasets_is_a_data_set(short, pair):
    result = fedsim.run({**short, "data": pair})
    assert same(result, fedsim.run({**short, "data": {"name": pair}}))
    assert same(result, fedsim.run({**short, "data": lambda root: pair}))
    assert sum(result.history[0]["samples"]) == 60
    train, test = fedsim.load_dataset(pair)
    assert (len(train), len(test)) == (60, 30)


@pytest.mark.parametrize(
    "form",
    [
        lambda images, targets: (images, targets),
        lambda images, targets: [images, targets],
        lambda images, targets: (images.numpy(), targets.numpy()),
        lambda images, targets: list(zip(images, targets, strict=True)),
        lambda images, targets: [{"label": int(y), "image": x} for x, y in zip(images, targets, strict=True)],
    ],
    ids=["tensors", "list of tensors", "arrays", "samples", "dicts"],
)
def test_pairs_of_arrays_and_lists_of_samples_are_data_sets(short, pair, form):
    train, test = (form(*part.tensors) for part in pair)
    result = fedsim.run({**short, "data": (train, test)})
    assert same(result, fedsim.run({**short, "data": pair}))
    assert same(result, fedsim.run({**short, "data": lambda root: (train, test)}))


def test_a_data_set_may_have_parameters_train_and_test(short):
    def part(root, *, train: int, test: int):
        parts = zip(tiny(root), (train, test), strict=True)
        return tuple(fedsim.TensorData(data.inputs[:count], data.targets[:count]) for data, count in parts)

    result = fedsim.run({**short, "data": {"name": part, "train": 90, "test": 30}})
    assert result.experiment.data.params == {"train": 90, "test": 30}


def test_loaders_and_streams_are_refused_as_data_sets(pair):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from pair[0]

    for train in (Stream(), torch.utils.data.DataLoader(pair[0])):
        with pytest.raises(
            DataError,
            match=f"the {type(train).__name__} object is not a map-style data set; a data set must have a length",
        ):
            fedsim.load_dataset((train, pair[1]))


def test_a_tuple_of_functions_is_a_list(short):
    def first(updates):
        return updates

    def second(updates):
        return updates.mean(0)

    def same_images(images, generator):
        return images

    experiment = fedsim.Experiment(
        **{**short, "data": {"name": tiny, "augment": (same_images, same_images)}, "aggregate": (first, second)}
    )
    assert [stage["rule"] for stage in experiment.aggregate.rule] == [name_of(first), name_of(second)]
    assert [each.name for each in experiment.data.augment] == [name_of(same_images)] * 2
    mean = fedsim.run({**short, "aggregate": [first, "mean"]})
    assert torch.allclose(fedsim.run({**short, "aggregate": (first, second)}).global_row, mean.global_row, atol=1e-6)


def test_rules_attacks_partitions_and_augmentations_can_be_functions(short):
    calls = []

    def halves(labels, n_workers):
        return np.array_split(np.arange(len(labels)), n_workers)

    def noted(images, generator):
        calls.append(len(images))
        return images

    result = fedsim.run(
        {
            **short,
            "data": {"name": tiny, "augment": [noted]},
            "aggregate": {"rule": lambda updates: updates.median(0).values},
            "attack": {"name": lambda honest: -honest.mean(0), "workers": [0]},
            "partition": halves,
            "server": HalfStep(lr=0.25),
            "local": {"algorithm": SGD(lr=0.1), "batch_size": 16},
        }
    )
    assert calls
    assert result.experiment.resolved()["aggregate"]["rule"].startswith("<lambda")
    assert result.experiment.resolved()["partition"]["name"] == "<halves>"
    assert result.experiment.resolved()["data"]["name"] == "tests.components:tiny"


class Remembering:
    """A rule that keeps a momentum of means."""

    def __init__(self):
        self.last = None

    def __call__(self, updates):
        self.last = updates.mean(0) + (0 if self.last is None else 0.9 * self.last)
        return self.last


class Counting:
    calls = 0

    def __call__(self, outputs, targets):
        self.calls += 1
        return self.calls


def momentum(updates, state):
    result = updates.mean(0) + 0.9 * state.get("last", 0)
    return result, {"last": result}


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_what_an_object_keeps_belongs_to_one_run(short, engine):
    """No check calls the objects, and a run does not see what another run stored in them."""
    rule, metric, seen = Remembering(), Counting(), []

    def noted(updates):
        seen.append(updates.shape)
        return updates.mean(0)

    components = {"aggregate": rule, "metrics": [{"name": metric, "label": "calls"}]}
    tables = {**short, **components, "rounds": 2, "engine": engine}
    first, second = fedsim.run(tables), fedsim.run(tables)
    assert same(first, second)
    assert same(first, fedsim.run({**tables, "aggregate": momentum}))
    assert (rule.last, metric.calls) == (None, 0)
    assert [record.metrics["calls"] for record in (*first.history, *second.history)] == [1, 2, 1, 2]
    fedsim.run({**short, "aggregate": noted})
    assert seen == [(3, first.global_row.numel())], "the rule is only called with the rows of the run"


def test_an_object_that_cannot_be_copied_gives_a_one_line_error(short):
    rule = Remembering()
    rule.last = threading.Lock()
    with pytest.raises(
        ExperimentError, match="cannot be copied .*lock.*; pass a function that calls the object instead$"
    ):
        fedsim.run({**short, "aggregate": rule})


def test_functions_that_work_without_an_experiment_take_objects():
    updates = torch.randn(7, 5)
    assert torch.equal(fedsim.aggregate(updates, lambda updates: updates.median(0).values), updates.median(0)[0])
    rows = fedsim.attack(updates, lambda honest, *, by=2.0: by * honest[0], 2, by=3.0)
    assert torch.equal(rows, 3 * updates[:1].expand(2, 5))
    shards = fedsim.partition([0, 1, 0, 1], lambda labels, n_workers: [[0, 1], [2, 3]], 2)
    assert [shard.tolist() for shard in shards] == [[0, 1], [2, 3]]
    assert torch.equal(fedsim.ServerOptimizer(HalfStep).step(torch.zeros(5), torch.ones(5)), torch.full((5,), 0.5))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"aggregate": torch.median}, r'aggregate.rule = "<median>": .* write a function of \(updates, '),
        (
            {"model": {"name": Perceptron, "activation": nn.Tanh}},
            "model.activation = .*: a parameter cannot be a Python object",
        ),
        (
            {"model": {"name": layered, "layers": [nn.ReLU, nn.Tanh]}},
            "model.layers = .*: a parameter cannot be a Python object",
        ),
        (
            {"model": {"name": layered, "layers": {"first": nn.ReLU}}},
            "model.layers = .*: a parameter cannot be a Python object",
        ),
        ({"model": {"name": Perceptron, "hiden": 3}}, 'did you mean "hidden"'),
        ({"aggregate": lambda grads: grads[0]}, r"aggregate.rule = .*grads"),
        ({"rounds": len}, 'rounds = "builtins:len": must be a valid integer'),
        ({"server": SGD(lr=1.0)}, 'server.name = "<SGD.*>": cannot be used: the .* must be a dataclass'),
        (
            {"data": {"train": [1], "test": [2]}},
            r'data: must be .* \(inputs, targets\), .* such as data={"name": frame, "ids": "client"}',
        ),
        ({"data": {"x": torch.zeros(3, 1), "y": torch.zeros(3)}}, r"data: must be .* tuple \(train, test\) of "),
        ({"data": (torch.arange(4), torch.zeros(4, 2))}, "data: each input is a single integer"),
        ({"data": {"val_images": torch.zeros(3, 1)}}, r"data: must be .* tuple \(train, test\) of "),
        ({"data": {"A": {"x": torch.zeros(3, 1)}}}, r"data: must be .* tuple \(train, test\) of "),
        ({"data": [[0.0, 1.0], [0, 1]]}, r"data: must be .* tuple \(train, test\) of "),
        (
            {"local": {"algorithm": torch.optim.SGD}},
            r'local.algorithm = ".*:SGD": cannot be used: the class is a PyTorch opt.* did you mean "sgd"',
        ),
        (
            {"aggregate": NotCallable()},
            r'aggregate.rule = "<NotCallable.*>": .* must be a function or a class, not an object of type NotCallable',
        ),
        ({"aggregate": malformed}, r'aggregate.rule = "tests.*:malformed": cannot be used: .*nowhere'),
    ],
)
def test_an_object_that_does_not_fit_gives_a_one_line_error(short, change, line):
    with pytest.raises(ExperimentError, match=line) as caught:
        fedsim.Experiment(**{**short, **change})
    assert len(caught.value.lines) == 1


def test_defaults_that_no_file_can_hold_are_left_to_the_function(short):
    experiment = fedsim.Experiment(**{**short, "model": Perceptron})
    assert experiment.model.params == {"hidden": 8}
    assert "tests.config.test_objects:Perceptron" in to_toml(experiment)


def test_names_are_import_paths_or_numbered_notes():
    assert name_of(Perceptron) == "tests.config.test_objects:Perceptron"
    first_class, second_class = local_class(), local_class()
    first, second = name_of(first_class), name_of(second_class)
    assert (name_of(first_class), name_of(second_class)) == (first, second)
    assert first != second
    del first, first_class
    gc.collect()
    assert name_of(local_class()) not in {str(second)}


def test_numbers_of_numpy_and_torch_are_numbers_and_any_mapping_is_a_table(short):
    experiment = fedsim.Experiment(
        **{**short, "seed": np.int64(3), "rounds": torch.tensor(2), "cuda_graphs": np.bool_(False)},
        attack=types.MappingProxyType({"name": "sign_flipping", "workers": np.array([0])}),
        server={"lr": np.float32(0.5)},
        aggregate={"weights": torch.tensor([1.0, 2.0, 3.0], dtype=torch.double)},
    )
    assert (experiment.seed, experiment.rounds, experiment.server.params["lr"]) == (3, 2, 0.5)
    assert (experiment.attack.workers, experiment.aggregate.weights) == ([0], [1.0, 2.0, 3.0])
    tables = types.MappingProxyType({"local": types.MappingProxyType({"lr": 0.5}), "data": {"root": Path("x")}})
    loaded = load_experiment(tables)
    assert (loaded.local.params["lr"], loaded.data.root) == (0.5, "x")


def test_a_run_with_objects_resumes_from_python_and_not_from_a_file(short, tmp_path):
    folder = tmp_path / "run"
    fedsim.run({**short, "model": lambda: Perceptron(4)}, folder)
    done = CliRunner().invoke(app, ["run", "--resume", str(folder), "rounds=2", "--allow-imports"])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert 'model.name = "<lambda' in done.stderr
    assert "resume=True" in done.stderr
    again = {**short, "model": lambda: Perceptron(4), "rounds": 2}
    assert same(fedsim.run(again, folder, resume=True), fedsim.run(again))


def test_a_comparison_takes_objects_on_its_axes_and_keeps_them_apart(short, tmp_path):
    rules = [lambda updates: updates.mean(0), lambda updates: updates.median(0).values, "mean"]
    comparison = fedsim.compare(
        {**short, "engine": "serial"}, {"aggregate.rule": rules}, tmp_path / "comparison", jobs=1
    )
    loss_of_mean_function, loss_of_median, loss_of_mean = (run.history[-1]["test_loss"] for run in comparison.runs)
    assert loss_of_mean_function == pytest.approx(loss_of_mean, abs=1e-5)
    assert loss_of_mean_function != loss_of_median
    assert not comparison.failed


def test_a_comparison_goes_on_with_objects_that_are_defined_again(short, tmp_path):
    def arguments():
        base = {**short, "rounds": 2, "model": local_class(), "checkpoint": {"every": 1}}
        return base, {"aggregate.rule": [lambda updates: updates.mean(0), "mean"]}

    first = fedsim.compare(*arguments(), tmp_path / "comparison", jobs=1)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "comparison").glob("runs/*/metrics.jsonl")}
    again = fedsim.compare(*arguments(), tmp_path / "comparison", jobs=1)
    assert len(files) == 2
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert [run.history for run in again.runs] == [run.history for run in first.runs]

    plan = plan_comparison(*arguments())
    with ComparisonFolder(tmp_path / "comparison", plan) as folder:
        folder.make_ready(folder.plan.runs[0])
        assert folder.is_finished(folder.plan.runs[0])


def locked_model():
    """Return a model that cannot be pickled."""
    lock = threading.Lock()

    def model():
        with lock:
            return Perceptron()

    return model


def test_objects_that_cannot_be_pickled_stay_in_one_process(short):
    model = {"model": locked_model()}
    by_auto = {**short, **model, "engine": "auto", "processes": 2}
    with pytest.warns(FedsimWarning, match=r'^"<model.*>" cannot be sent .*cannot pickle.*; the run uses one process$'):
        fedsim.run(by_auto)
    with pytest.raises(
        ExperimentError, match=r'^engine = "processes": "<model.*>" cannot be sent .*; use engine=serial$'
    ):
        fedsim.run({**by_auto, "engine": "processes"})
    with pytest.raises(ExperimentError, match=r"^jobs = 2: "):
        fedsim.compare({**short, **model}, {"seed": [0, 1]}, jobs=2)


NOTEBOOK = """
import torch, fedsim
from torch import nn

class MyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))

    def forward(self, images):
        return self.layers(images)

def rule(updates):
    return updates.mean(0)

def train(model, batches, lr):
    for inputs, targets in batches:
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad

base = {"data": "tests.components:tiny", "rounds": 1, "workers": 3}
rows = [fedsim.run({**base, "model": MyNet, "aggregate": rule, "engine": "serial"}).global_row]
pooled = {**base, "aggregate": rule, "engine": "processes", "processes": 1}
with fedsim.Session() as session:  # one process for all
    for model in (MyNet, "__main__:MyNet", lambda: MyNet()):
        rows.append(fedsim.run({**pooled, "model": model}, session=session).global_row)
    own = {**base, "model": MyNet, "local": {"algorithm": train, "lr": 0.1}}
    trained = [fedsim.run({**own, "engine": "processes", "processes": 1}, session=session)]
trained.append(fedsim.run({**own, "engine": "serial"}))
assert all(torch.equal(row, rows[0]) for row in rows)
assert torch.equal(trained[0].global_row, trained[1].global_row)
assert trained[0].test_accuracy > 0.3
train, test = fedsim.load_dataset("tests.components:tiny")
base = {**base, "data": (train, test), "engine": "serial", "model": MyNet}
comparison = fedsim.compare(base, {"aggregate.rule": [rule, "mean"]}, jobs=2)
assert not comparison.failed, comparison.failed
print("done")
"""


def test_objects_of_a_program_without_a_file_go_to_processes(tmp_path):
    (code,), outs, errors = ended([start("-c", NOTEBOOK, cwd=tmp_path)])
    assert (code, outs) == (0, ["done\n"]), errors
