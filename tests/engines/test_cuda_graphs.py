"""Without a GPU: all but the capture itself, by a capture that runs its warm-ups and then calls the step again."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest
import torch

import fedsim
from fedsim.config.validation import warnings_about
from fedsim.engines.trainers import cuda_graphs as graphs
from fedsim.engines.trainers.capture import WARM_UPS, GraphPool
from fedsim.errors import FedsimWarning
from tests.engines.test_contract import assert_close

BATCHED = {"engine": "batched", "processes": 1, "precision": "float64"}
CASES = {
    "even shards": {},
    "uneven shards, short batches": {"partition": "tests.plugs:uneven"},
    "partial cohorts": {"workers": 7, "cohort": 5, "rounds": 3, "partition": "tests.plugs:uneven"},
    "local steps": {"local": {"steps": 5, "batch_size": 16, "momentum": 0.9}},
    "weight decay": {
        "partition": "tests.plugs:uneven",
        "local": {"epochs": 2, "batch_size": 16, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    },
    "fedprox": {"local": {"solver": "fedprox", "mu": 1.0, "momentum": 0.9}, "partition": "tests.plugs:uneven"},
    "adam": {"local": {"solver": "adam", "weight_decay": 0.1, "amsgrad": True}, "partition": "tests.plugs:uneven"},
    "adamw": {"local": {"solver": "adamw", "batch_size": 16, "epochs": 2}},
    "adagrad": {"local": {"solver": "adagrad", "lr_decay": 0.1}, "partition": "tests.plugs:uneven"},
    "worker state and messages": {
        **{"local": {"solver": "tests.plugs:Counting", "batch_size": 16}, "partition": "tests.plugs:uneven"},
        **{"workers": 5, "cohort": 3, "rounds": 3},
    },
    "rounds after rounds of gradients": {"sync": "post_local", "gradient_rounds": 1, "rounds": 3},
    "a convolutional network with dropout": {"model": "net", "partition": "tests.plugs:uneven"},
    "a server that trains along": {"aggregate": {"rule": "fltrust", "root_samples": 20}},
    "an attack on updates": {"workers": 7, "attack": {"name": "alie", "fraction": 0.3}, "aggregate": "median"},
    "shared and unused parameters": {"model": "tests.models:Tied", "local": {"weight_decay": 0.1, "momentum": 0.5}},
    "token numbers": {"model": "tests.models:Embedded", "data": "tests.plugs:tokens"},
}


@pytest.fixture
def replaying(monkeypatch):
    """Replays on a CPU; the list of the steps that were captured, each with how often it was replayed."""
    captured = []

    def record(self, run):
        for _ in range(WARM_UPS):
            run()
        replays = [0]
        captured.append(replays)

        def replay():
            replays[0] += 1
            run()

        return replay

    monkeypatch.setattr(graphs, "can_capture", lambda device: True)
    monkeypatch.setattr(GraphPool, "record", record)
    return captured


@pytest.mark.parametrize("width", [3, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_replayed_steps_agree_with_ordinary_steps(case, width, tiny_experiment, replaying):
    tables = {**tiny_experiment, **BATCHED, "batched": {"width": width}, **CASES[case]}
    replayed = fedsim.run({**tables, "cuda_graphs": True})
    assert sum(times for (times,) in replaying) > 0
    assert len(replaying) <= 8  # for two sizes of stacks, of 16 steps and of one, with a mask and without
    assert_close(fedsim.run({**tables, "cuda_graphs": False}), replayed, 1e-12)


UNSAFE = {
    "samples of a batch see each other": {"model": "tests.models:Normalised"},
    "batches are altered": {"data": {"dataset": "tests.plugs:tiny", "augment": ["flip"]}},
    "the partition": {"partition": {"strategy": "feature_noise", "sigma": 1.0}},
    "the attack": {"workers": 7, "attack": {"name": "backdoor", "fraction": 0.3}},
    "every step is a synchronisation": {"sync": "gradients"},
}


@pytest.mark.parametrize("reason", UNSAFE)
def test_where_it_is_not_safe_it_is_off_and_refused_with_the_reason_if_asked_for(reason, tiny_experiment, replaying):
    tables = {**tiny_experiment, **BATCHED, **UNSAFE[reason]}
    fedsim.run(tables)
    assert replaying == []
    with pytest.raises(fedsim.ExperimentError, match=f"cuda_graphs = true: steps cannot be captured here: .*{reason}"):
        fedsim.run({**tables, "cuda_graphs": True})


def test_on_a_cpu_it_is_refused(tiny_experiment):
    with pytest.raises(fedsim.ExperimentError, match="cuda_graphs = true: .* need a CUDA device, not cpu"):
        fedsim.run({**tiny_experiment, **BATCHED, "cuda_graphs": True, "device": "cpu"})


@pytest.mark.parametrize("engine", ["serial", "spawn", "auto"])
def test_it_goes_with_the_engine_that_has_stacks(engine, tiny_experiment):
    tables = {**tiny_experiment, "engine": engine}
    line = f"cuda_graphs has no effect with engine={engine}; omit it"
    assert line in warnings_about(fedsim.Experiment(**tables, cuda_graphs=True))
    assert line not in warnings_about(fedsim.Experiment(**tables, cuda_graphs=False))


@dataclass(frozen=True)
class Replacing:
    """A solver with momentum that makes its state new at each step, or only begins it with its first step."""

    lr: float = 0.1
    late: bool = False

    def start(self, rows):
        return {} if self.late else {"m": torch.zeros_like(rows)}

    def step(self, rows, gradients, state):
        state["m"] = 0.5 * state.get("m", 0) + gradients
        rows.sub_(state["m"], alpha=self.lr)


@pytest.mark.parametrize("late", [False, True])
def test_a_solver_that_makes_new_state_is_captured_unless_it_begins_it_late(late, tiny_experiment, replaying):
    local = {"solver": "tests.engines.test_cuda_graphs:Replacing", "late": late, "batch_size": 16}
    tables = {**tiny_experiment, **BATCHED, "local": local, "partition": "tests.plugs:uneven"}
    expected = fedsim.run({**tables, "cuda_graphs": False})
    if late:
        with pytest.warns(FedsimWarning, match="local.solver adds state in its steps that its `start` does not return"):
            found = fedsim.run(tables)
    else:
        found = fedsim.run(tables)
    assert_close(expected, found, 1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float64", "tf32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_captured_steps_agree_with_ordinary_steps(case, precision, tiny_experiment, tmp_path):
    tables = {**tiny_experiment, **BATCHED, "device": "cuda", **CASES[case], "precision": precision}
    replayed = fedsim.run({**tables, "cuda_graphs": True})  # a warning, that a capture failed, is an error here
    ordinary = fedsim.run({**tables, "cuda_graphs": False})
    assert_close(ordinary, replayed, {"float64": 1e-9}.get(precision, 2e-2))


def test_steps_are_captured_in_the_precision_of_training(tiny_experiment, replaying, monkeypatch):
    """A graph keeps what was in force when it was captured, as whether TF32 was allowed."""
    inside, seen = [], []

    @contextlib.contextmanager
    def training(self, device):
        inside.append(self.name)
        yield
        inside.pop()

    record = GraphPool.record
    monkeypatch.setattr("fedsim.system.precision.Precision.training", training)
    monkeypatch.setattr(GraphPool, "record", lambda *args: seen.append(list(inside)) or record(*args))
    fedsim.run({**tiny_experiment, **BATCHED, "cuda_graphs": True})
    assert seen
    assert all(names[-1:] == ["float64"] for names in seen)
