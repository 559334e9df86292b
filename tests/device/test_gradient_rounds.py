"""Rounds with sync = "gradients" on a GPU, where rows are checked at the end of the round."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedsim
from tests.device.agreement import ROUNDING, some_gpu
from tests.device.pretend.counting import LAUNCH, WAITS

BASE = {
    "rounds": 2,
    "workers": 3,
    "engine": "serial",
    "model": "logistic",
    "sync": "gradients",
    "precision": "float64",
    "partition": "tests.components:in_blocks",
    "local": {"batch_size": 16, "lr": 0.05, "momentum": 0.5},
}
SOUND, BROKEN = "tests.components:tiny", "tests.components:with_a_hole"


class Strict(nn.Linear):
    """A model that raises an error for non-finite parameters, as torch.distributions does."""

    def __init__(self) -> None:
        super().__init__(784, 10)

    def forward(self, images):
        if not self.weight.isfinite().all():
            raise ValueError("weight: must be finite")
        return super().forward(images.flatten(1))


def run(change, device):
    return fedsim.run({**BASE, **change, "device": device})


UNDER_ATTACK = {"workers": 7, "attack": {"name": "opt_ipm", "fraction": 0.2, "evaluations": 4}}
CASES = {
    "a mean": {},
    "a weighted mean": {"aggregate": {"weights": "samples"}},
    "a weight of zero": {"aggregate": {"weights": [0.0, 1.0, 1.0]}},
    "a median": {"aggregate": {"rule": "median"}},
    "krum": {"workers": 5, "aggregate": {"rule": "krum", "f": 1}},
    "monna": {"workers": 5, "aggregate": {"rule": "monna", "f": 1, "row": 4}},
    "a rule that reads nothing": {"workers": 5, "aggregate": {"rule": ["bucketing", "median"]}},
    "krum under attack": {**UNDER_ATTACK, "aggregate": {"rule": "krum", "f": 1}},
    "caf under attack": {**UNDER_ATTACK, "aggregate": {"rule": "caf"}},  # its eigenvalues of NaN would be an error
    "batched": {"engine": "batched", "processes": 1, "data": "tests.components:with_a_hole_at_the_end"},
    "buffers": {"model": "tests.models:Normalised"},
    "own buffers": {"model": "tests.models:Normalised", "buffers": "local"},
    "a model that refuses NaN": {"model": "tests.device.test_gradient_rounds:Strict"},
    "the last update": {"workers": 5, "attack": {"name": "free_rider", "fraction": 0.2, "what": "last"}},
    "updates after a round": {"sync": "post_local", "gradient_rounds": 1},
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_worker_whose_gradients_are_not_finite_is_excluded_as_on_a_cpu(case):
    change = {"data": BROKEN, **CASES[case]}
    change["aggregate"] = {"nonfinite": "exclude", **change.get("aggregate", {})}
    expected = run(change, "cpu")
    with some_gpu():
        actual = run(change, "cuda")
    assert torch.allclose(actual.global_row.cpu(), expected.global_row, rtol=0, atol=ROUNDING)
    assert [record["excluded"] for record in actual.history] == [record["excluded"] for record in expected.history]
    assert any(record["excluded"] for record in actual.history)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["uniform", [0.0, 1.0, 1.0]])
def test_a_gradient_that_is_not_finite_stops_the_run_if_it_counts(weights):
    change = {"data": BROKEN, "aggregate": {"weights": weights}}
    if weights != "uniform":
        expected = run(change, "cpu").global_row
        with some_gpu():
            assert torch.allclose(run(change, "cuda").global_row.cpu(), expected, rtol=0, atol=ROUNDING)
        return
    with pytest.raises(fedsim.ExperimentError) as expected:
        run(change, "cpu")
    with some_gpu(), pytest.raises(fedsim.ExperimentError) as gpu_error:
        run(change, "cuda")
    assert str(gpu_error.value) == str(expected.value)


STEPS = 5  # of a round of BASE


@pytest.mark.parametrize(
    ("rule", "waits", "launches"),
    [("mean", 1, 2), ("median", 1, 4), ({"rule": "krum", "f": 0}, STEPS, 8), ({"rule": "cge", "f": 0}, STEPS, 3)],
    ids=["mean", "median", "krum", "cge"],
)
def test_no_check_for_nan_waits_in_each_step(rule, waits, launches, gpu):
    """Updates are checked once at the end of a round, or by the distances that the rule reads in each step."""
    with gpu.counting() as counts:
        result = run({"data": SOUND, "rounds": 1, "aggregate": rule}, "cuda")
    assert result.test_accuracy > 0.1
    places = ("aggregation/", "rounds/aggregator.py", "rounds/updates.py")
    here = [(kind, count) for (kind, _, line), count in counts.events.items() if line.startswith(places)]
    assert sum(count for kind, count in here if kind in WAITS) == waits, counts.table(*WAITS)
    assert sum(count for kind, count in here if kind == LAUNCH) <= STEPS * launches + 8, counts.table(LAUNCH)
