"""Rounds with sync = "gradients" on a GPU, where rows are checked at the end of the round."""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn

import fedsim
from fedsim.rounds.gradient_round import GradientRound
from tests.device.agreement import ENGINES, assert_agrees_with_the_cpu, run_on_cpu, run_on_gpu
from tests.device.pretend.counting import LAUNCH, WAITS

BASE = {
    "rounds": 2,
    "workers": 3,
    "model": "logistic",
    "sync": "gradients",
    "precision": "float64",
    "partition": "tests.components:in_blocks",
    "local": {"batch_size": 16, "lr": 0.05, "momentum": 0.5},
}
BROKEN = "tests.components:with_a_hole"


class Strict(nn.Linear):
    """A model that raises an error for non-finite parameters, as torch.distributions does."""

    def __init__(self) -> None:
        super().__init__(784, 10)

    def forward(self, images):
        if not self.weight.isfinite().all():
            raise ValueError("weight: must be finite")
        return super().forward(images.flatten(1))


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
    "batched": {"data": "tests.components:with_a_hole_at_the_end"},
    "buffers": {"model": "tests.models:Normalised"},
    "own buffers": {"model": "tests.models:Normalised", "buffers": "local"},
    "a model that refuses NaN": {"model": "tests.device.test_gradient_rounds:Strict"},
    "the last update": {"workers": 5, "attack": {"name": "free_rider", "fraction": 0.2, "what": "last"}},
    "updates after a round": {"sync": "post_local", "switch_after_round": 1},
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_worker_whose_gradients_are_not_finite_is_excluded_as_on_a_cpu(case):
    tables = {**BASE, "data": BROKEN, **CASES[case]}
    tables["aggregate"] = {"nonfinite": "exclude", **tables.get("aggregate", {})}
    assert_agrees_with_the_cpu(tables, "batched" if case == "batched" else "serial")
    assert any(record["excluded"] for record in run_on_cpu(tables).history)


def test_only_the_first_round_with_nan_is_repeated(monkeypatch, gpu):
    rounds, steps = [], GradientRound.steps
    monkeypatch.setattr(GradientRound, "steps", lambda kind, plan: rounds.append(plan.round) or steps(kind, plan))
    tables = {**BASE, **ENGINES["serial"], "device": "cuda", "data": BROKEN, "aggregate": {"nonfinite": "exclude"}}
    fedsim.run(tables)
    assert rounds == [1, 1, 2]


@pytest.mark.gpu
def test_a_gradient_that_is_not_finite_stops_the_run_if_it_counts():
    tables = {**BASE, "data": BROKEN}
    assert_agrees_with_the_cpu({**tables, "aggregate": {"weights": [0.0, 1.0, 1.0]}}, "serial")
    errors = []
    for run in (run_on_cpu, partial(run_on_gpu, **ENGINES["serial"])):
        with pytest.raises(fedsim.ExperimentError) as caught:
            run(tables)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


STEPS = 5  # of a round of BASE


@pytest.mark.parametrize(
    ("rule", "waits", "launches"),
    [("mean", 1, 2), ("median", 1, 4), ({"rule": "krum", "f": 0}, STEPS, 8), ({"rule": "cge", "f": 0}, STEPS, 3)],
    ids=["mean", "median", "krum", "cge"],
)
def test_no_check_for_nan_waits_in_each_step(rule, waits, launches, gpu):
    """Updates are checked once at the end of a round, or by the distances that the rule reads in each step."""
    with gpu.counting() as counts:
        tables = {**BASE, "data": "tests.components:tiny", "rounds": 1, "aggregate": rule, "device": "cuda"}
        result = fedsim.run({**tables, **ENGINES["serial"]})
    assert result.test_accuracy > 0.1
    modules = "aggregator", "updates", "update_steps", "parameter_server"
    places = ("aggregation/", *(f"rounds/{name}.py" for name in modules))
    here = [(kind, count) for (kind, _, line), count in counts.events.items() if line.startswith(places)]
    assert sum(count for kind, count in here if kind in WAITS) == waits, counts.table(*WAITS)
    assert sum(count for kind, count in here if kind == LAUNCH) <= STEPS * launches + 8, counts.table(LAUNCH)
