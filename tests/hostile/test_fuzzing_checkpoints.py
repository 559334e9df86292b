"""Whatever a checkpoint says whose checksums are right: a loop refuses it, or goes on and ends soon."""

from __future__ import annotations

import contextlib
import copy
import json
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedsim
from fedsim.errors import FedsimError
from fedsim.preparation import prepare
from fedsim.runs.resuming import UNFIT
from fedsim.simulation import loop_of
from fedsim.snapshot import Snapshot
from tests.hostile.mutations import EXTREMES, mutated, mutations

TIMED = {"mode": "clock", "clock": {"speed": "lognormal"}}
KINDS = {
    "rounds on the clock": {"clock": {"speed": "lognormal"}, "mode": "clock", "aggregate": {"rule": "foolsgold"}},
    "fedbuff": {**TIMED, "policy": "fedbuff", "workers": 6, "cohort": 3},
    "asgd": {**TIMED, "policy": "asgd"},
    "ssp": {**TIMED, "policy": "ssp"},
    "k_sync": {**TIMED, "policy": {"name": "k_sync", "k": 2}},
}
KEYS = ["now", "pending", "roster", "done", "busy", "drawn", "under_way", "idle", "taken", "begun", "clock", "has_last"]
NUMBERS = st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from([-(2**62), -1, 0, 1, 7, 2**62])), max_size=3)
LONGEST = 10.0  # seconds


@pytest.fixture(scope="module", params=KINDS)
def loop(request):
    """A loop after two rounds, and its state."""
    tables = {
        **{"rounds": 4, "workers": 4, "engine": "serial", "model": "logistic", "data": "tests.plugs:tiny"},
        **{"local": {"batch_size": 16, "steps": 2}, **KINDS[request.param]},
    }
    with fedsim.Workshop() as workshop, prepare(fedsim.Experiment(**tables), workshop) as (setting, engine):
        loop = loop_of(setting, engine)
        loop.play(1), loop.play(2)
        state = loop.state()
        state.facts = json.loads(json.dumps(state.facts))
        yield loop, state


@pytest.mark.parametrize("examples", [25, pytest.param(1_000, marks=pytest.mark.slow)])
def test_a_state_that_cannot_be_is_refused_or_gone_on_with(loop, examples):
    loop, good = loop

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(mutations([each for each in EXTREMES if not isinstance(each, str) or each.isprintable()], KEYS), NUMBERS)
    def tried(changes, numbers):
        state = Snapshot(dict(good.tensors), mutated(good.facts, changes))
        counts = good.tensors.get("server.counts", torch.zeros(1, dtype=torch.int64)).clone()
        for where, number in numbers:
            counts[where % len(counts)] = number
        if "server.counts" in good.tensors:
            state.tensors["server.counts"] = counts
        begun = time.perf_counter()
        try:
            loop.resume(copy.deepcopy(state))
        except UNFIT:
            pass
        else:
            with contextlib.suppress(FedsimError):
                loop.play(3)
        assert time.perf_counter() - begun < LONGEST
        loop.resume(good)

    tried()
    first = loop.play(3)
    loop.resume(good)
    again = loop.play(3)
    assert {**first, "seconds": None} == {**again, "seconds": None}
