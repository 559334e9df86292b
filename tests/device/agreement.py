"""Shared by the device tests: a GPU, small experiments, and the comparison of GPU and CPU results.

Tests marked `gpu` run on a real GPU if there is one, otherwise on the pretend GPU.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import fedsim
from tests.device.pretend import GPU, on_gpu, pretend_gpu

REAL = torch.cuda.is_available()  # whether there is a real GPU
PLACE = "cuda" if REAL else "cpu"  # for features that the pretend GPU lacks, such as processes
COLUMNS = 50_000 if REAL else 301  # columns of the test rows

SAMPLES = 56  # with 3, 5 or 7 workers, no last batch of 8 has a single sample
DATA = {"name": "tests.components:tiny", "train": SAMPLES}
TINY = {
    "rounds": 2,
    "workers": 3,
    "model": "2nn" if REAL else "logistic",
    "data": DATA,
    "precision": "float64",
    "local": {"batch_size": 8, "lr": 0.05, "momentum": 0.5},
    "records": {"curve": False},
}
FULL = {  # for all cases of the engine contract: no last batch of 16 has a single sample
    **TINY,
    "data": "tests.components:tiny",
    "local": {"batch_size": 16, "lr": 0.05, "momentum": 0.5},
}
ENGINES = {
    "serial": {"engine": "serial"},
    "batched": {"engine": "batched", "processes": 1},  # uses CUDA graphs wherever steps can be captured
    "batched, no graphs": {"engine": "batched", "processes": 1, "cuda_graphs": False},
}
ROUNDING = 1e-9  # tolerance in float64, after a few rounds
CLOSE = {"float64": ROUNDING, "float32": 1e-4, "tf32": 1e-2, "bf16": 5e-2}  # tolerance of parameters, by precision

VALUES = {
    "f": 2,
    "c": 1.0,
    "k": 2,
    "lam": 1.5,
    "b": 2,
    "personal": ["*.bias"],
}  # values for parameters without a default
FITTING = {  # for components whose defaults do not fit such small experiments
    "alie": {"z": 1.5},
    "fedrep": {"head_steps": 1},
    "feature_rotation": {"groups": 2, "angles": [0, 45]},
    "classes_per_worker": {"k": 4},
    "virtual": {"samples": 20},
    "resnet20": {"channels": 1},
    "cnn": {"widths": [4, 8], "hidden": 16},
    "given": {"shards": [[*range(20)], [*range(20, 35)], [*range(35, 56)]]},
}


def every(registry: Any) -> Any:
    """Parametrize a test by the components of a registry."""
    return pytest.mark.parametrize("registration", list(registry), ids=lambda registration: registration.name)


def settings_of(registration: Any, **more: Any) -> dict[str, Any]:
    """Return a table that names a registered component and sets its required parameters."""
    required = [name for name, field in registration.parameters.model_fields.items() if field.is_required()]
    unknown = [name for name in required if name not in VALUES | more]
    if unknown:
        pytest.fail(f"{registration.name} requires {', '.join(unknown)}: add values to {__name__}.VALUES")
    values = {name: VALUES[name] for name in required if name in VALUES}
    return {"name": registration.name, **values, **FITTING.get(registration.name, {}), **more}


def with_small_data(tables: dict[str, Any]) -> dict[str, Any]:
    """Return the tables with at most `SAMPLES` training samples."""
    data = tables.get("data")
    small = {**data, "train": min(SAMPLES, data.get("train", SAMPLES))} if isinstance(data, dict) else data
    return {**tables, "data": small}


@contextlib.contextmanager
def some_gpu():
    """Provide a GPU: yield None if there is a real one, otherwise the pretend GPU."""
    if REAL:
        yield None
    else:
        with pretend_gpu() as gpu:
            yield gpu


def to_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(GPU)


def run_on_gpu(tables: dict[str, Any], **where: Any) -> fedsim.Result:
    """Run an experiment on a GPU and return its result."""
    with some_gpu() as pretend:
        result = fedsim.run({**tables, "device": "cuda", **where})
    assert pretend is None or pretend.launches
    return result


_references: list[tuple[dict[str, Any], fedsim.Result]] = []  # at most one entry


def run_on_cpu(tables: dict[str, Any]) -> fedsim.Result:
    """Run an experiment on the CPU with engine=serial. The last result is cached, because several engines need it."""
    for known, result in _references:
        if known == tables:
            return result
    _references[:] = [(tables, fedsim.run({**tables, "device": "cpu", "engine": "serial"}))]
    return _references[0][1]


def assert_agrees_with_the_cpu(tables: dict[str, Any], engine: str) -> None:
    """Compare a run on the CPU (engine=serial) with the same experiment on a GPU with `engine`."""
    expected = run_on_cpu(tables)
    assert_same_results(expected, run_on_gpu(tables, **ENGINES[engine]))


def assert_same_results(expected: fedsim.Result, actual: fedsim.Result, tolerance: float = ROUNDING) -> None:
    """Check that models and histories agree to a tolerance, and that all other recorded values are equal."""
    assert_same_model(expected, actual, tolerance)
    assert len(actual.history) == len(expected.history)
    for ours, theirs in zip(actual.history, expected.history, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - {"seconds"}:
            assert close(ours[key], theirs[key], 2 * tolerance), key


def assert_same_model(expected: fedsim.Result, actual: fedsim.Result, tolerance: float) -> None:
    state = actual.model.state_dict()
    # results are on the host
    assert not any(tensor.is_cuda or on_gpu(tensor) for tensor in (actual.global_row, *state.values()))
    for name, value in expected.model.state_dict().items():
        difference = (value.double() - state[name].double()).abs().max() if value.numel() else 0.0
        assert difference <= tolerance, f"{name} differs by {difference:.1e}"


def close(actual: Any, expected: Any, tolerance: float) -> bool:
    """Whether two values of a record are equal, with a tolerance for floats, also in lists and dicts.

    The tolerance is relative for numbers above 1, such as a perplexity.
    """
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(close(actual[key], expected[key], tolerance) for key in actual)
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(
            close(a, b, tolerance) for a, b in zip(actual, expected, strict=True)
        )
    return actual == (
        pytest.approx(expected, abs=tolerance, rel=tolerance, nan_ok=True) if isinstance(expected, float) else expected
    )
