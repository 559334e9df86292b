"""Captured steps and tests: equal results, few launches outside the graphs, and no Python code."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedsim
from fedsim.config.validation import warnings_about
from fedsim.core.training import test as test_model
from fedsim.errors import FedsimWarning
from fedsim.rounds import evaluation
from fedsim.training import cuda_graphs, shared_state
from fedsim.training.capture import WARM_UPS, GraphPool, kernels_of
from fedsim.training.cuda_graphs import MOST_LENGTHS, lengths_of
from fedsim.training.stack_step import StackStep
from tests.device.agreement import (
    ENGINES,
    REAL,
    TINY,
    assert_same_results,
    run_on_cpu,
    run_on_gpu,
    some_gpu,
    with_small_data,
)
from tests.device.pretend import download, upload
from tests.device.pretend.counting import LAUNCH
from tests.device.test_bounds import ORDERS
from tests.engines.test_contract import ALL_CASES
from tests.matrix import needs_bf16_lstm

UNEVEN = {"partition": "tests.components:uneven"}
CASES = {
    **{
        name: ALL_CASES[name]
        for name in (
            *("plain averaging", "uneven shards", "local steps", "momentum, weight decay", "worker state and messages"),
            *("gradients first, then parameters", "dropout", "a rule with data of the server's own"),
            *("a character LSTM", "a transformer with dropout", "several inputs by name"),
        )
    },
    "drop_last": {**UNEVEN, "local": {"batch_size": 16, "drop_last": True, "epochs": 2}},
    "numbers that differ between workers": {
        **UNEVEN,
        "local": {
            **{
                "lr": {"uniform": [0.01, 0.1]},
                "momentum": {"choice": [0.0, 0.9]},
                "clip_norm": {"uniform": [0.5, 5.0]},
            },
            **{"batch_size": 16, "epochs": 2},
        },
    },
    "more members than the width": {**UNEVEN, "workers": 5, "batched": {"stack_size": 3}},
    "a model with buffers": {"model": f"{__name__}:Counting", **UNEVEN},
    "dropout of many steps": {"model": f"{__name__}:Dropping", **UNEVEN, "local": {"steps": 19, "batch_size": 8}},
    "rounds on the clock": {"mode": "clock", "policy": "fedasync", "rounds": 2, **UNEVEN},
}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 6), nn.ReLU(), nn.Linear(6, 10))

    def forward(self, x):
        return self.layers(x)


class Dropping(Small):
    def forward(self, x):
        return self.layers[2:](
            F.dropout(self.layers[1](F.dropout(x.flatten(1), 0.2, self.training)), 0.5, self.training)
        )


class Counting(Small):
    """A model with buffers that every forward pass replaces or changes in place, independently of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.scale = self.scale * 0.99
            self.calls += 1
        return self.layers(x) * self.scale * (1 + 0.01 * self.calls)


class Clamping(Small):
    """A model whose forward pass changes parameters in place."""

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.layers[1].bias.abs_()
        return self.layers(x)


@pytest.fixture
def tables(tiny_experiment, monkeypatch):
    monkeypatch.setattr(shared_state, "TEST_BATCH_ON_GPU", 40)  # 90 test samples: two full batches and a short one
    small = {"model": "tests.device.test_captured_steps:Small", "local": {"batch_size": 16, "momentum": 0.5}}
    return {**tiny_experiment, "engine": "batched", "processes": 1, "precision": "float64", **small}


@pytest.fixture
def steps(monkeypatch):
    """Return a one-element list with the number of steps that Python has computed so far."""
    count, step = [0], StackStep.__call__

    def counted(self, *args, **kwargs):
        count[0] += 1
        return step(self, *args, **kwargs)

    monkeypatch.setattr(StackStep, "__call__", counted)
    return count


TOLERANCES = {"float64": 1e-9, "tf32": 2e-2, "bf16": 2e-2} if REAL else {"float64": 1e-12, "tf32": 1e-5, "bf16": 2e-2}
# On the pretend GPU, the operations of the other cases are the same in every precision.
DIFFERENT = [
    ("a character LSTM", "bf16"),
    ("a transformer with dropout", "tf32"),
    ("a transformer with dropout", "bf16"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "precision"),
    [
        pytest.param(case, name, marks=needs_bf16_lstm if not REAL and "LSTM" in case and name == "bf16" else ())
        for case in CASES
        for name in TOLERANCES
        if REAL or name == "float64" or (case, name) in DIFFERENT
    ],
)
def test_captured_steps_agree_with_the_ordinary_path(case, precision):
    """A failed capture would raise a warning, which is an error here."""
    tables = with_small_data({**TINY, **ENGINES["batched"], **CASES[case], "precision": precision})
    replayed, ordinary = (run_on_gpu({**tables, "cuda_graphs": graphs}) for graphs in (True, False))
    assert_same_results(ordinary, replayed, TOLERANCES[precision])


UNSAFE = {
    "batch sizes differ between workers": {"local": {"batch_size": {"choice": [8, 16]}}},
    "outputs or losses depend on the whole batch": {"model": "tests.models:Normalised"},
    "batches are altered": {"data": {"name": "tests.components:tiny", "augment": ["flip"]}},
    "the partition": {"partition": {"name": "feature_noise", "sigma": 1.0}},
    "the attack": {"workers": 7, "attack": {"name": "backdoor", "fraction": 0.3}},
    "the learning rate changes": {"local": {**TINY["local"], "schedule": "cosine"}},
    "gradients are aggregated after every step": {"sync": "gradients"},
    "gradient of a single step": {"mode": "clock", "policy": "asgd"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("reason", UNSAFE)
def test_steps_that_cannot_be_captured_take_the_ordinary_path(reason):
    tables, settings = with_small_data({**TINY, **UNSAFE[reason]}), []
    with some_gpu():
        actual = fedsim.run({**tables, **ENGINES["batched"], "device": "cuda"}, on_start=settings.append)
    assert reason in settings[0].how["cuda_graphs"]
    assert_same_results(run_on_cpu(tables), actual)
    with pytest.raises(
        fedsim.ExperimentError, match=f"cuda_graphs = true: training steps cannot be captured .*{reason}"
    ):
        run_on_gpu({**tables, **ENGINES["batched"], "cuda_graphs": True})


def test_captured_steps_need_a_gpu_and_an_engine_that_has_stacks(tiny_experiment):
    with pytest.raises(fedsim.ExperimentError, match="cuda_graphs = true: .* need a CUDA device, not cpu"):
        fedsim.run({**tiny_experiment, **ENGINES["batched"], "cuda_graphs": True, "device": "cpu"})
    for engine in ("serial", "processes", "auto"):
        unused = fedsim.Experiment(**{**tiny_experiment, "engine": engine, "cuda_graphs": True})
        assert any(line.startswith("cuda_graphs has no effect") for line in warnings_about(unused))


def test_a_resumed_run_is_bit_identical_to_the_whole_run(gpu, tables, tmp_path):
    tables |= {**UNEVEN, "cuda_graphs": True, "checkpoint": {"every": 1}}
    whole = fedsim.run({**tables, "rounds": 3})
    fedsim.run({**tables, "rounds": 1}, tmp_path / "run")
    resumed = fedsim.run({**tables, "rounds": 3}, tmp_path / "run", resume=True)
    assert torch.equal(download(resumed.global_row), download(whole.global_row))


def test_a_round_of_many_steps_has_few_launches_outside_of_graphs_and_runs_no_python(gpu, tables, steps):
    tables |= {"workers": 4, "local": {"steps": 40, "batch_size": 2}, "cuda_graphs": True}
    with gpu.counting() as first:
        fedsim.run({**tables, "rounds": 1})
    of_first, steps[0] = steps[0], 0
    with gpu.counting() as both:
        fedsim.run({**tables, "rounds": 2})
    assert steps[0] == of_first  # all of them during captures
    assert both.graph_launches - first.graph_launches > 40 * 20
    assert both.launches - first.launches <= ORDERS + 2 * 40  # of the whole round, including aggregation and test


def test_graphs_are_captured_once_and_for_what_is_needed(gpu, tables):
    fedsim.run({**tables, "rounds": 4, "cuda_graphs": True})  # 5 steps a round
    assert len(gpu.graphs) == 3  # one step, five steps, and the test of a batch
    fedsim.run({**tables, "rounds": 4, "cuda_graphs": True, "local": {"steps": 20}})
    assert len(gpu.graphs) == 3 + 3  # one step, ten steps, and the test of a batch


LENGTHS = {
    **{1: [1], 6: [6], 16: [16], 17: [16, 1], 20: [10, 10], 21: 3 * [7], 60: 4 * [15], 256: 16 * [16]},
    **{34: [16, 16, 2], 235: [*14 * [16], 11]},  # with equal lengths: 17 and 47 replays
}


@pytest.mark.parametrize("steps", LENGTHS)
def test_steps_are_divided_among_few_graphs(steps):
    assert lengths_of(steps, {1}) == LENGTHS[steps]
    assert lengths_of(steps, {1, *LENGTHS[steps]}) == LENGTHS[steps]
    limited = lengths_of(steps, {1, 3, 7, 12})  # no other length may be captured
    assert sum(limited) == steps
    assert set(limited) <= {1, 3, 7, 12}
    assert limited == sorted(limited, reverse=True)


@pytest.mark.parametrize(("workers", "batch", "steps"), [(2, 4, 256), (16, 1024, 256), (64, 1024, 64)])
def test_batches_of_at_most_256_steps_and_four_million_samples_are_on_the_gpu(
    workers, batch, steps, gpu, tables, monkeypatch
):
    """64 workers with batches of 1,024 samples have 65,536 samples per step."""
    shapes = set()

    def refuse(self, graph):
        shapes.update({tuple(self._positions.shape), tuple(self._weights.shape)})
        raise fedsim.ExperimentError("seen")

    monkeypatch.setattr(cuda_graphs.CapturedSteps, "_capture", refuse)
    with pytest.warns(FedsimWarning, match="without CUDA graphs, with the same results: seen"):
        fedsim.run({**tables, "workers": workers, "rounds": 1, "local": {"batch_size": batch, "steps": 1}})
    assert shapes == {(steps, workers, batch)}


@pytest.mark.parametrize(
    ("local", "replays"),
    [({"steps": 6}, 1), ({"epochs": 3, "batch_size": 8}, None)],
    ids=["6 steps", "shards of different sizes, so masks"],
)
def test_equal_steps_are_replayed_as_few_graphs_with_the_same_numbers(local, replays, gpu, tables, monkeypatch):
    tables |= {"rounds": 1, "local": {"batch_size": 4, "momentum": 0.5, **local}, "model": f"{__name__}:Dropping"}
    tables |= {"cuda_graphs": True, **({} if replays else UNEVEN)}

    def run():
        with gpu.counting() as counts:
            result = fedsim.run(tables)
        operations = Counter(operation for kind, operation, _ in counts.events.elements() if kind == LAUNCH)
        return operations["replay of a graph"] - 2, result  # without those of the test

    few, together = run()
    monkeypatch.setattr(cuda_graphs, "MOST_NODES", 1)
    many, alone = run()
    assert few == replays or (replays is None and few < many / 2)
    assert many == local.get("steps", many)
    assert torch.equal(download(together.global_row), download(alone.global_row))
    assert together.history[-1]["train_loss"] == alone.history[-1]["train_loss"]


@pytest.mark.parametrize(("steps", "computed"), [(6, 12), (235, 35)])
def test_captures_compute_few_steps_in_python(steps, computed, gpu, tables, monkeypatch):
    """A capture of many steps is warmed up by two of them."""
    taken, take_steps = [], cuda_graphs.CapturedSteps._take_steps

    def noted(self, graph):
        taken.append(graph.steps)
        take_steps(self, graph)

    monkeypatch.setattr(cuda_graphs.CapturedSteps, "_take_steps", noted)
    fedsim.run({**tables, "rounds": 1, "local": {"batch_size": 4, "steps": steps}, "cuda_graphs": True})
    assert sum(taken) == computed


def test_rounds_of_many_different_lengths_share_few_graphs(gpu, tables):
    tables |= {**UNEVEN, "workers": 9, "cohort": 1, "rounds": 9, "local": {"batch_size": 2}}
    actual = fedsim.run({**tables, "cuda_graphs": True})
    assert len({tuple(record["samples"]) for record in actual.history}) > MOST_LENGTHS
    assert len(gpu.graphs) == MOST_LENGTHS + 1  # and the test of a batch
    assert_same_results(fedsim.run({**tables, "cuda_graphs": False}), actual, 1e-12)


def test_stacks_of_many_sizes_share_few_graphs(gpu, tables):
    clock = {"mode": "clock", "policy": "fedbuff", "workers": 20, "rounds": 3}
    fedsim.run({**tables, **clock, "local": {"steps": 2}})
    assert 0 < len(gpu.graphs) <= 1 + 2 * 6  # stack sizes 1, 2, 4, 8, 16 and 20, with and without a mask


def test_the_captured_test_is_bit_identical_to_the_ordinary_one(gpu, tables, monkeypatch):
    calls = []
    monkeypatch.setattr(evaluation, "test", lambda *args: calls.append(1) or test_model(*args))
    captured = fedsim.run({**tables, "rounds": 4})
    assert len(calls) == 2 + WARM_UPS + 1 + 4  # trial runs, warm-ups, the capture, and one short batch per round
    ordinary = fedsim.run({**tables, "rounds": 4, "cuda_graphs": False})
    losses = [[record["test_loss"] for record in result.history] for result in (captured, ordinary)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("case", ["draws", "an attack with a goal"])
def test_a_test_that_cannot_be_captured_takes_the_ordinary_path(case, gpu, tables):
    cases = {
        "draws": {"model": "tests.models:AlwaysDropping"},
        "an attack with a goal": {"workers": 7, "attack": {"name": "backdoor", "fraction": 0.3}},
    }
    actual = fedsim.run({**tables, **cases[case]})
    expected = fedsim.run({**tables, **cases[case], "cuda_graphs": False})
    assert actual.history[-1]["test_loss"] == expected.history[-1]["test_loss"]


@dataclass(frozen=True)
class Reading:
    """A client algorithm whose steps do something that a CUDA graph cannot capture."""

    lr: float = 0.1
    does: str = "reads"

    def start(self, rows):
        return {}

    def step(self, rows, gradients, state):
        factor = {
            "reads": lambda: float(gradients.new_ones(()) * self.lr),
            "uses the CPU": lambda: torch.full((), self.lr, dtype=rows.dtype) + 0,
            "draws": lambda: self.lr * torch.ones_like(rows).bernoulli_(1.0),
            "waits": lambda: torch.cuda.synchronize() or self.lr,
        }[self.does]()
        rows.sub_(gradients * factor)


REASONS = {
    "reads": "the computation reads tensor values on the host",
    "uses the CPU": "the computation uses a tensor on cpu",
    "draws": "a training step draws random numbers",
    "waits": "operation not permitted when stream is capturing",
}


@pytest.mark.parametrize("does", REASONS)
def test_an_algorithm_that_cannot_be_captured_takes_the_ordinary_path(does, gpu, tables):
    tables["local"] = {"algorithm": "tests.device.test_captured_steps:Reading", "does": does, "batch_size": 16}
    with pytest.warns(FedsimWarning, match=f"cuda_graphs: steps run without CUDA graphs, .*{REASONS[does]}") as caught:
        actual = fedsim.run(tables)
    assert len(caught) == 1
    expected = fedsim.run({**tables, "cuda_graphs": False})
    assert torch.equal(download(actual.global_row), download(expected.global_row))


@dataclass(frozen=True)
class Replacing:
    """A momentum algorithm that replaces its state tensor at each step; `late`: creates it only in the first step."""

    lr: float = 0.1
    late: bool = False

    def start(self, rows):
        return {} if self.late else {"m": torch.zeros_like(rows)}

    def step(self, rows, gradients, state):
        state["m"] = 0.5 * state.get("m", 0) + gradients
        rows.sub_(state["m"], alpha=self.lr)


@pytest.mark.parametrize("late", [False, True])
def test_an_algorithm_that_replaces_its_state_is_captured_unless_it_creates_it_late(late, gpu, tables):
    tables["local"] = {"algorithm": "tests.device.test_captured_steps:Replacing", "late": late, "batch_size": 16}
    tables |= UNEVEN
    reason = "local.algorithm: a step adds or removes entries of the state; `start` must return all entries"
    with pytest.warns(FedsimWarning, match=reason) if late else contextlib.nullcontext():
        actual = fedsim.run(tables)
    assert_same_results(fedsim.run({**tables, "cuda_graphs": False}), actual, 1e-12)


def test_forward_passes_do_not_change_the_parameters_of_workers_that_have_finished(gpu, tables):
    tables |= {"model": "tests.device.test_captured_steps:Clamping"}
    fedsim.run({**tables, "cuda_graphs": True})  # no worker finishes before the others
    with pytest.warns(FedsimWarning, match="a forward pass changes parameters in place"):
        actual = fedsim.run({**tables, **UNEVEN})
    expected = fedsim.run({**tables, **UNEVEN, "engine": "serial"})
    assert_same_results(expected, actual, 1e-12)


def test_steps_are_captured_in_the_precision_of_training(gpu, tables, monkeypatch):
    """A graph keeps the settings under which it was captured, such as whether TF32 was allowed."""
    inside, seen = [], []

    @contextlib.contextmanager
    def training(self, device):
        inside.append(self.name)
        yield
        inside.pop()

    record = GraphPool.record
    monkeypatch.setattr("fedsim.system.precision.Precision.training", training)
    monkeypatch.setattr(GraphPool, "record", lambda *args: seen.append(list(inside)) or record(*args))
    fedsim.run({**tables, "cuda_graphs": True})
    assert seen[0][-1] == "float64"


def test_the_memory_of_graphs_is_released_with_the_trainer(gpu, tables, monkeypatch):
    made = weakref.WeakSet()
    graph = torch.cuda.CUDAGraph
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made.add(new := graph()) or new)
    gc.disable()
    try:
        fedsim.run({**tables, "cuda_graphs": True})
    finally:
        gc.enable()
    gpu.graphs.clear()
    assert not made
    assert upload(torch.ones(1)).is_cuda


@pytest.mark.gpu
def test_after_a_failed_capture_a_gpu_draws_and_allocates_as_before(tables):
    local = {"algorithm": "tests.device.test_captured_steps:Reading", "does": "waits", "batch_size": 16}
    with some_gpu() as pretend:
        with pytest.warns(FedsimWarning, match="operation not permitted when stream is capturing"):
            fedsim.run({**tables, "local": local, "device": "cuda"})
        assert pretend is None or not pretend.memory.underway
        assert torch.rand(2, device="cuda").is_cuda
        F.dropout(torch.ones(100, device="cuda"), 0.5)
    tables |= {"local": {"batch_size": 16}}
    captured, ordinary = (run_on_gpu({**tables, "cuda_graphs": graphs}) for graphs in (True, False))
    assert_same_results(ordinary, captured, TOLERANCES["float64"])


class Recurrent(nn.Module):
    """A recurrent network that reads an image in parts of `size` pixels."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.network, self.last = nn.GRU(size, 4, batch_first=True), nn.Linear(4, 10)

    def forward(self, x):
        return self.last(self.network(x.flatten(1).unflatten(1, (-1, self.network.input_size)))[0][:, -1])


@pytest.mark.parametrize(("size", "lengths"), [(56, {1, 2}), (14, {1})])
def test_a_graph_of_long_recurrent_networks_has_few_steps(size, lengths, gpu, tables, monkeypatch):
    model = {"name": f"{__name__}:Recurrent", "size": size}
    tables |= {"rounds": 1, "local": {"batch_size": 4, "steps": 8}, "model": model, "cuda_graphs": True}
    actual = fedsim.run(tables)
    launches = [graph.launches for graph in gpu.graphs]
    assert {round(count / launches[0]) for count in launches} == lengths
    assert launches[0] > 4_000 or max(launches) <= 4_000
    monkeypatch.setattr(cuda_graphs, "MOST_NODES", 10**9)
    assert_same_results(fedsim.run(tables), actual, 0)
    assert round(gpu.graphs[-1].launches / launches[0]) == 8


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_recurrent_operation_counts_as_its_kernels(batch_first):
    """On CUDA, cuDNN runs all layers and time steps in one operation: 2 layers in both directions for 7 steps."""
    network = nn.GRU(3, 5, 2, batch_first=batch_first, bidirectional=True, device="meta")
    inputs, state = torch.zeros(4, 7, 3, device="meta"), torch.zeros(4, 4, 5, device="meta")
    inputs = inputs if batch_first else inputs.transpose(0, 1)
    weights = [weight for layer in network.all_weights for weight in layer]
    run = torch.ops.aten._cudnn_rnn.default
    assert kernels_of(run, (inputs, weights, 4, None, state)) == 2 * 4 * 7
    assert kernels_of(torch.ops.aten._cudnn_rnn_flatten_weight.default, (weights,)) == 1
    assert kernels_of(torch.ops.aten.view.default, (inputs, [-1])) == 0


def place():
    return torch.device("cuda", 0)


def spoiling(x):
    """A computation that a CUDA graph does not support, which allocates memory first."""
    return (x + 1, torch.cuda.synchronize())


@pytest.mark.gpu
def test_a_failed_capture_restores_the_stream_and_releases_its_memory():
    with some_gpu():
        x, pool = torch.zeros(2**20, device="cuda"), GraphPool(place())
        x.add_(1)
        stream, reserved = torch.cuda.current_stream(), torch.cuda.memory_reserved()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                pool.record(lambda: spoiling(x), lambda: None)
            assert torch.cuda.current_stream() == stream
            gc.collect()  # the error has the frame of the computation
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() <= reserved
        replay = pool.record(lambda: x.add_(1), lambda: None)
        x.zero_()
        replay()
        assert x.sum().item() == x.numel()


@pytest.mark.gpu
def test_work_after_a_failed_warm_up_waits_for_the_stream_of_the_warm_up():
    def fails():
        x.add_(1)
        raise ValueError("failed")

    with some_gpu():
        x = torch.zeros(2**20, device="cuda")
        with pytest.raises(ValueError, match="failed"):
            GraphPool(place()).record(fails)
        assert x.sum().item() == x.numel()


@pytest.mark.gpu
def test_a_failed_capture_raises_the_error_of_the_computation():
    def fails():
        try:
            raise KeyError("handled")
        except KeyError:
            raise ValueError("not handled")  # noqa: B904

    with some_gpu(), pytest.raises(ValueError, match="not handled"):
        GraphPool(place()).record(fails, lambda: None)


@pytest.mark.gpu
def test_other_threads_may_read_from_the_gpu_during_a_capture():
    """Such as those of a notebook."""
    seen = []

    def run():
        thread = threading.Thread(target=lambda: seen.append(y.tolist()))
        thread.start()
        thread.join()
        x.add_(1)

    with some_gpu():
        x, y = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
        replay = GraphPool(place()).record(run, lambda: None)
        x.zero_()
        replay()
        assert seen == [[1.0]]
        assert x.item() == 1.0
