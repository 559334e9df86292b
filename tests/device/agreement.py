"""What the device tests share: small experiments, and the comparison of the pretend GPU with the CPU."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import fedsim
from tests.device.pretend import Counts, on_gpu, pretend_gpu

SAMPLES = 56  # for 3, 5 and 7 workers no last batch of 8 has a single sample
DATA = {"dataset": "tests.plugs:tiny", "train": SAMPLES}
TINY = {
    "rounds": 2,
    "workers": 3,
    "model": "logistic",
    "data": DATA,
    "precision": "float64",
    "local": {"batch_size": 8, "lr": 0.05, "momentum": 0.5},
}
ENGINES = {
    "serial": {"engine": "serial"},
    "batched": {"engine": "batched", "processes": 1},  # with captured graphs wherever steps can be captured
}
ROUNDING = 1e-9  # in float64, after a few rounds

VALUES = {"f": 2, "c": 1.0, "k": 2, "personal": ["*.bias"]}  # of the parameters that have no default
FITTING = {  # plugs whose defaults do not fit such small experiments
    "alie": {"z": 1.5},
    "fedrep": {"head_steps": 1},
    "feature_rotation": {"groups": 2, "angles": [0, 45]},
    "label_k": {"k": 4},
    "virtual": {"samples": 20},
}


def settings_of(plug: Any, **more: Any) -> dict[str, Any]:
    """A table that names a registered plug, with the parameters that it requires."""
    required = [name for name, field in plug.parameters.model_fields.items() if field.is_required()]
    unknown = [name for name in required if name not in VALUES | more]
    if unknown:
        pytest.fail(f"{plug.name} requires {', '.join(unknown)}: give a value in {__name__}.VALUES")
    values = {name: VALUES[name] for name in required if name in VALUES}
    return {"name": plug.name, **values, **FITTING.get(plug.name, {}), **more}


def with_small_data(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables of a small experiment, with as few samples as the others."""
    data = tables.get("data")
    return (
        {**tables, "data": {**data, "train": min(SAMPLES, data.get("train", SAMPLES))}}
        if isinstance(data, dict)
        else tables
    )


def run_on_gpu(tables: dict[str, Any], **where: Any) -> tuple[fedsim.Result, Counts]:
    """Run an experiment on the pretend GPU."""
    with pretend_gpu() as gpu, gpu.counting() as counts:
        return fedsim.run({**tables, "device": "cuda", **where}), counts


_references: list[tuple[dict[str, Any], fedsim.Result]] = []  # the last one


def run_on_cpu(tables: dict[str, Any]) -> fedsim.Result:
    """Run an experiment on the CPU by engine=serial; not again for the same tables, as the next engine may ask for."""
    for known, result in _references:
        if known == tables:
            return result
    _references[:] = [(tables, fedsim.run({**tables, "device": "cpu", "engine": "serial"}))]
    return _references[0][1]


def assert_agrees_with_the_cpu(tables: dict[str, Any], engine: str, tolerance: float = ROUNDING) -> Counts:
    """Run an experiment on the CPU by engine=serial and on the pretend GPU by `engine`; the counts of the latter."""
    expected = run_on_cpu(tables)
    found, counts = run_on_gpu(tables, **ENGINES[engine])
    assert_same_results(expected, found, tolerance)
    assert counts.launches + counts.graph_launches > 0
    return counts


def assert_same_results(expected: fedsim.Result, found: fedsim.Result, tolerance: float = ROUNDING) -> None:
    """Models and the numbers of histories agree to a tolerance; all else that was recorded is equal."""
    state = found.model.state_dict()
    assert not any(map(on_gpu, [found.global_row, *state.values()]))  # results lie on the host
    for name, value in expected.model.state_dict().items():
        assert torch.allclose(value, state[name], rtol=0, atol=tolerance), name
    assert len(found.history) == len(expected.history)
    for ours, theirs in zip(found.history, expected.history, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - {"seconds"}:
            assert _close(ours[key], theirs[key], 2 * tolerance), key


def _close(one: Any, other: Any, tolerance: float) -> bool:
    """Whether two values of a record are equal, apart from the rounding of numbers in them."""
    if isinstance(other, list):
        return len(one) == len(other) and all(_close(a, b, tolerance) for a, b in zip(one, other, strict=True))
    return one == (pytest.approx(other, abs=tolerance, rel=0, nan_ok=True) if isinstance(other, float) else other)


@contextlib.contextmanager
def refused(reason: str | None):
    """A block that must be refused for a reason, if there is one."""
    if reason is None:
        yield
    else:
        with pytest.raises(fedsim.ExperimentError, match=reason):
            yield
