"""Kernel launches and host waits of small versions of the workloads in benchmarks/workloads.py.

The bounds may only decrease. Counted is a round after the first one, in which graphs are captured. The cost of a step
is the difference between rounds of few and of many steps; the rest is the cost of the round. Both numbers of steps are
one graph. For single aggregation rules see test_aggregation_counts.py.
"""

from __future__ import annotations

from functools import partial, partialmethod
from typing import NamedTuple

import pytest

import fedsim
from fedsim.rounds.cohort_training import CohortTraining
from fedsim.rounds.executor import Executor
from fedsim.rounds.gradient_round import GradientRound
from fedsim.rounds.parameter_round import ParameterRound
from fedsim.training.stacked_module import StackedModule
from tests.device.agreement import ENGINES
from tests.device.pretend import Counts, pretend_gpu

FEW, MANY = 2, 4  # steps per round; the difference is the cost of MANY - FEW steps


class Workload(NamedTuple):
    """A workload with fewer samples. The launches depend only on the model and the number of workers."""

    model: str
    workers: int
    batch_size: int

    def tables(self, steps: int) -> dict:
        samples = self.workers * self.batch_size
        return {
            "rounds": 2,
            "workers": self.workers,
            "model": {"name": self.model, "classes": 10},  # more than the few training samples have
            "data": {"name": "tests.components:tiny", "train": samples},
            "partition": "contiguous",
            "local": {"batch_size": self.batch_size, "steps": steps, "momentum": 0.5},
            "device": "cuda",
            **ENGINES["batched"],
        }


WORKLOADS = {"w1": Workload("net", 4, 8), "w2": Workload("cnn", 2, 1), "w3": Workload("2nn", 20, 2)}


class Bound(NamedTuple):
    """Upper bounds on launches and waits."""

    launches: float  # by the host; a graph replay counts once
    waits: float
    in_graphs: float = 0


NO_STEP = Bound(0, 0)
METHODS = {
    **dict.fromkeys(("pull_down", "begin_updates", "aggregate"), ParameterRound),
    "train": CohortTraining,
    "steps": GradientRound,
    "test": Executor,
}
ORDERS = 165  # launches at the start of a round that draw the orders of all batches
BOUNDS: dict[str, dict[str, tuple[Bound, Bound]]] = {  # by workload and method: (round, step)
    "w1": {
        "pull_down": (Bound(1, 1), NO_STEP),
        "train": (Bound(15 + ORDERS, 6, 155), Bound(0, 0, 57)),  # 155 launches draw the dropout of all steps
        "aggregate": (Bound(2, 1), NO_STEP),
        "test": (Bound(31, 3), NO_STEP),
    },
    "w2": {
        "pull_down": (Bound(1, 1), NO_STEP),
        "train": (Bound(15 + ORDERS, 5, 6), Bound(0, 0, 47)),
        "aggregate": (Bound(2, 1), NO_STEP),
        "test": (Bound(30, 3), NO_STEP),
    },
    "w3": {
        "pull_down": (Bound(1, 1), NO_STEP),
        "train": (Bound(15 + ORDERS, 5, 6), Bound(0, 0, 32)),
        "aggregate": (Bound(2, 1), NO_STEP),
        "test": (Bound(26, 3), NO_STEP),
    },
}
NOT_CAPTURED = {  # (round, step)
    "w1": (Bound(156 + ORDERS, 6), Bound(57, 0)),
    "w2": (Bound(8 + ORDERS, 6), Bound(47, 0)),
    "w3": (Bound(8 + ORDERS, 6), Bound(32, 0)),
}
OF_GRADIENTS = Bound(11, 0)  # of a step, in addition to the model's own launches
ON_THE_CLOCK = {  # a round of w3 with 3 workers and one step, row by row
    "k_sync": Bound(300, 13),
    "fedbuff": Bound(322, 13),
}


@pytest.fixture(scope="module")
def phases():
    """Return a cached function that returns the counts of a workload's last round by method."""
    done: dict = {}

    def of(workload: str, steps: int, **changes) -> dict[str, Counts]:
        key = workload, steps, *sorted(changes.items())
        if key not in done:
            done[key] = counted(WORKLOADS[workload].tables(steps) | changes)
        return done[key]

    return of


def counted(tables: dict) -> dict[str, Counts]:
    """Return the counts of the last call of each method in METHODS; "model": those of all stacked gradients."""
    last_counts: dict[str, Counts] = {"model": Counts()}
    gradients = StackedModule.gradients
    with pretend_gpu() as gpu, pytest.MonkeyPatch.context() as patch:

        def counting(method, owner, *arguments):
            if method.__name__ in ("train", "steps"):
                last_counts["model"] = Counts()
            with gpu.counting() as last_counts[method.__name__]:
                return method(owner, *arguments)

        def counting_model(*arguments, **more):
            with gpu.counting() as counts:
                result = gradients(*arguments, **more)
            last_counts["model"].events += counts.events
            return result

        for name, owner in METHODS.items():
            patch.setattr(owner, name, partialmethod(partial(counting, getattr(owner, name))))
        patch.setattr(StackedModule, "gradients", counting_model)
        fedsim.run(tables)
    return last_counts


def a_round_and_a_step(few: Counts, many: Counts) -> tuple[Bound, Bound]:
    """Return the cost of a round without its steps, and the cost of one step."""
    pairs = [(getattr(few, name), getattr(many, name)) for name in ("launches", "waits", "graph_launches")]
    steps = [(b - a) / (MANY - FEW) for a, b in pairs]
    return Bound(*(a - FEW * step for (a, _), step in zip(pairs, steps, strict=True))), Bound(*steps)


def assert_within(bounds: tuple[Bound, Bound], few: Counts, many: Counts) -> None:
    for measured, bound in zip(a_round_and_a_step(few, many), bounds, strict=True):
        assert all(a <= b for a, b in zip(measured, bound, strict=True)), f"{measured}, at most {bound}\n{many.table()}"


def marks_of(workload):
    """Mark w2 as slow: it has the layers of w1."""
    return pytest.mark.slow if workload == "w2" else ()


each_workload = pytest.mark.parametrize("workload", [pytest.param(name, marks=marks_of(name)) for name in WORKLOADS])


@pytest.mark.parametrize(
    ("workload", "method"),
    [pytest.param(name, method, marks=marks_of(name)) for name in BOUNDS for method in BOUNDS[name]],
)
def test_a_round(workload, method, phases):
    few, many = (phases(workload, steps)[method] for steps in (FEW, MANY))
    assert_within(BOUNDS[workload][method], few, many)


@each_workload
def test_a_step_that_is_not_captured(workload, phases):
    few, many = (phases(workload, steps, cuda_graphs=False)["train"] for steps in (FEW, MANY))
    assert_within(NOT_CAPTURED[workload], few, many)


@each_workload
def test_a_step_of_gradients(workload, phases):
    few, many = (phases(workload, steps, sync="gradients") for steps in (FEW, MANY))
    _, whole_step = a_round_and_a_step(*(phase["steps"] for phase in (few, many)))
    _, model = a_round_and_a_step(*(phase["model"] for phase in (few, many)))
    assert whole_step.launches - model.launches <= OF_GRADIENTS.launches, many["steps"].table()
    assert whole_step.waits <= OF_GRADIENTS.waits, many["steps"].table()


@pytest.mark.parametrize("policy", ON_THE_CLOCK)
def test_a_round_on_the_clock(policy):
    tables = {**WORKLOADS["w3"].tables(steps=1), "engine": "serial", "processes": None, "workers": 3, "mode": "clock"}
    tables["policy"] = {"name": policy, "k": 3}
    with pretend_gpu() as gpu:
        launches, waits = zip(*(totals(gpu, {**tables, "rounds": rounds}) for rounds in (2, 4)), strict=True)
    measured = Bound((launches[1] - launches[0]) / 2, (waits[1] - waits[0]) / 2)
    assert all(a <= b for a, b in zip(measured, ON_THE_CLOCK[policy], strict=True)), measured


def totals(gpu, tables):
    with gpu.counting() as counts:
        fedsim.run(tables)
    return counts.launches, counts.waits
