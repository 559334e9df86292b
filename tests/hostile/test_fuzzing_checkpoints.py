"""A loop refuses or accepts a changed state, then continues from the true state as if nothing had happened."""

from __future__ import annotations

import contextlib
import copy
import json

import pytest

import fedsim
from fedsim.core.snapshot import Snapshot
from fedsim.runs.live_run import loop_of
from fedsim.runs.resume import UNFIT
from fedsim.runs.setup import begun
from tests.hostile.mutations import EXTREMES, fuzz, mutated, mutations

TIMED = {"mode": "clock", "clock": {"slowdown": "lognormal"}}
KINDS = {
    "a norm that adapts": {"privacy": {"mechanism": "adaptive", "clip": 0.1, "noise": 0.01}},
    "rounds on the clock": {"clock": {"slowdown": "lognormal"}, "mode": "clock", "aggregate": {"rule": "foolsgold"}},
    "fedbuff": {**TIMED, "policy": "fedbuff", "workers": 6, "cohort": 3},
    "asgd": {**TIMED, "policy": "asgd"},
    "ssp": {**TIMED, "policy": "ssp"},
    "k_sync": {**TIMED, "policy": {"name": "k_sync", "k": 2}},
}


@pytest.fixture(scope="module", params=KINDS)
def loop(request):
    """Return a loop after two rounds, and its state."""
    tables = {
        **{"rounds": 4, "workers": 4, "engine": "serial", "model": "logistic", "data": "tests.components:tiny"},
        **{"local": {"batch_size": 16, "steps": 2}, **KINDS[request.param]},
    }
    experiment = fedsim.Experiment(**tables)
    with fedsim.Session() as session, begun(experiment, session) as (task, engine):
        loop = loop_of(experiment, task, engine)
        loop.run_round(1), loop.run_round(2)
        state = loop.state()
        state.metadata = json.loads(json.dumps(state.metadata))
        yield loop, state


def test_a_changed_state_does_no_harm(loop, examples):
    loop, good = loop

    def check(changes):
        state = Snapshot(dict(good.tensors), mutated(good.metadata, changes))
        with contextlib.suppress(*UNFIT):
            loop.resume(copy.deepcopy(state))
        loop.resume(good)

    printable = [each for each in EXTREMES if not isinstance(each, str) or each.isprintable()]
    fuzz(mutations(printable, [*good.metadata, "started"]), check, examples)
    first = loop.run_round(3)
    loop.resume(good)
    again = loop.run_round(3)
    assert {**first, "seconds": None} == {**again, "seconds": None}
