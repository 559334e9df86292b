"""Post-local SGD: rounds of synchronous SGD, then rounds of local SGD."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

import fedsim
from fedsim.runs.loops.synchronous import SynchronousLoop
from fedsim.runs.setup import begun
from fedsim.server import ServerStep
from tests.matrix import in_turn

SWITCH, ROUNDS = 2, 4
ENGINES = {"serial": {}, "processes": {"processes": 2}, "batched": {"processes": 1, "batched": {"stack_size": 2}}}
BUFFERED = {"model": "tests.models:Normalised", "workers": 5, "cohort": 3}


@dataclass(frozen=True)
class Returning(ServerStep):
    """A server optimizer that remembers its initial row and its number of steps."""

    def start(self, rows):
        return {"start": rows.clone(), "steps": torch.zeros_like(rows)}

    def step(self, rows, update, state):
        rows.add_(update).lerp_(state["start"], 0.1)
        state["steps"] += 1


CASES = {
    "momentum of both": {"server": {"name": "momentum", "beta": 0.5}, "partition": "tests.components:uneven"},
    "adaptive steps of both": {
        **{"local": {"algorithm": "adamw", "batch_size": 16}, "workers": 7, "cohort": 3},
        "server": {"name": "adam", "bias_correction": True},
    },
    "a server that broadcasts something else": {"server": {"name": "bmuf", "nesterov": True}},
    "a server that knows its start": {"server": {"name": "tests.runs.test_post_local:Returning"}},
    "buffers averaged": {**BUFFERED, "buffers": "average"},
    "buffers kept by workers": {**BUFFERED, "buffers": "local"},
    "a rule that starts where it ended": {"aggregate": {"rule": "centered_clipping", "tau": 0.1}},
    "a rule with a state": {"workers": 6, "partition": {"name": "shards", "s": 2}, "aggregate": "foolsgold"},
    "a rule with data of the server's own": {"aggregate": {"rule": "fltrust", "root_samples": 20}},
    "an attack that remembers": {"workers": 5, "attack": {"name": "free_rider", "what": "last", "workers": [1]}},
}


def world(engine):
    """Return the state that a round passes on to the next one."""
    shared = engine.shared
    return [tensor.clone() for tensor in (shared.server.row, shared.server.buffers)], engine.states.tensors()


def worlds(tables, session):
    """Return the state after each round of a run."""
    with begun(fedsim.Experiment(**tables), session) as (task, engine):
        loop, after = SynchronousLoop(task, engine), []
        for round in range(1, task.experiment.rounds + 1):
            loop.run_round(round)
            after.append(world(engine))
        return after


def continued(tables, start, session):
    """Return the states after each round since the switch, for a sync = "parameters" run that starts from `start`."""
    experiment, after = fedsim.Experiment(**tables), []
    with begun(experiment, session) as (task, engine):
        shared = engine.shared
        rows, worker_states = start
        for tensor, value in zip((shared.server.row, shared.server.buffers), rows, strict=True):
            tensor.copy_(value)
        engine.states.resume(worker_states)
        for name, value in task.experiment.server.component.start(shared.server.row).items():
            shared.server.states["parameters"][name].copy_(value)
        loop = SynchronousLoop(task, engine)
        loop.resume(loop.state())  # tells all processes which workers have state
        for round in range(SWITCH + 1, ROUNDS + 1):
            loop.run_round(round)
            after.append(world(engine))
    return after


def same(ours, theirs):
    tensors = ([*rows, *kept.values()] for rows, kept in (ours, theirs))
    return all(torch.equal(one, other) for one, other in zip(*tensors, strict=True))


@in_turn(("case", "engine"), CASES, ENGINES)
def test_it_is_gradient_averaging_before_and_parameter_averaging_after_the_switch(
    engine, case, tiny_experiment, session
):
    tables = {**tiny_experiment, "rounds": ROUNDS, "engine": engine, **ENGINES[engine], **CASES[case]}
    actual = worlds({**tables, "sync": "post_local", "switch_after_round": SWITCH}, session)
    without_server = {key: value for key, value in tables.items() if key != "server"}
    before = worlds({**without_server, "sync": "gradients", "rounds": SWITCH}, session)
    assert all(map(same, actual[:SWITCH], before))
    assert all(map(same, actual[SWITCH:], continued(tables, actual[SWITCH - 1], session)))
    assert not any(same(one, other) for one, other in pairwise(actual))


def test_bytes_follow_the_phase(tiny_experiment):
    tables = {**tiny_experiment, "rounds": ROUNDS, "local": {"steps": 5}}
    history = fedsim.run({**tables, "sync": "post_local", "switch_after_round": SWITCH}).history
    row = 4 * 16_330
    sent = [3 * 5 * row] * SWITCH + [3 * row] * (ROUNDS - SWITCH)
    assert [record["bytes_up"] for record in history] == [record["bytes_down"] for record in history] == sent


def test_on_the_virtual_clock_steps_wait_for_everybody_before_the_switch_and_rounds_after_it(tiny_experiment):
    tables = {**tiny_experiment, "rounds": ROUNDS, "local": {"steps": 5}, "mode": "clock"}
    tables["clock"] = {"latency": 1.0}

    def seconds(**tables):
        now = [0.0, *(record["virtual_seconds"] for record in fedsim.run(tables).history)]
        return [after - before for before, after in pairwise(now)]

    in_step, in_rounds = (seconds(**tables, sync=sync)[0] for sync in ("gradients", "parameters"))
    assert in_step > in_rounds
    measured = seconds(**tables, sync="post_local", switch_after_round=SWITCH)
    assert measured == pytest.approx([in_step] * SWITCH + [in_rounds] * (ROUNDS - SWITCH))
