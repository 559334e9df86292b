"""A few draws of `python -m tests.fuzz`, and tests of the fuzzer itself."""

from __future__ import annotations

import random
import shlex
import time

import pytest
import torch

from fedsim.aggregation.rule import rule
from tests.fuzz.__main__ import OK, TOO_LONG, checked, command, drawn_for, in_turn, is_failure, settings_in, verdict
from tests.fuzz.draw import GROUPS, changed_keys, draw, is_runnable, is_valid
from tests.fuzz.pairs import Pairs
from tests.fuzz.properties import PROPERTIES, Property, difference
from tests.fuzz.runs import Lab, Outcome
from tests.fuzz.shrink import shrunk

pytestmark = pytest.mark.filterwarnings("ignore::fedsim.errors.FedsimWarning")


@pytest.fixture(scope="module")
def session_lab():
    with Lab() as lab:
        yield lab


@pytest.mark.parametrize("number", [pytest.param(k, marks=() if k < 24 else pytest.mark.slow) for k in range(400)])
def test_a_drawn_experiment_has_the_property(number, session_lab):
    names = in_turn(list(PROPERTIES), number)
    settings = drawn_for(f"test {number}", names[0])[0]
    ((name, answer),) = checked(session_lab, settings, names)
    assert not is_failure(answer), f"{answer}\n{command(name, settings)}"


SMALL = settings_in(["data.name=tests.components:few", "model.name=logistic", "workers=4", "rounds=3", "seed=0"])
FRAGMENTS = "local.algorithm=muon local.steps=2 local.keep_optimizer_state=true local.fragments={count=2,delay=1}"
CROSSINGS = [
    ("lengthened", "local.schedule.name=cosine"),
    ("lengthened", "server.schedule.name=one_cycle"),
    ("lengthened", "data.local_test_fraction=0.3 worker_evaluation.every=3"),
    ("names", "data.name=tests.fuzz.tables:owners data.form=csv"),
    *((name, f"{FRAGMENTS} server.name=diloco") for name in ("resumed", "stopped", "stacks", "processes")),
    *((name, f"{FRAGMENTS} processors=qsgd downlink=cast") for name in ("resumed", "lengthened", "waves")),
    ("resumed", "local.algorithm=muon local.keep_optimizer_state=true groups=2 processors.name=sign"),
    *(("stopped", f"groups=2 group_rounds=3 seed={seed}") for seed in (0, 1, 2)),
]


@pytest.mark.parametrize(("name", "words"), CROSSINGS)
def test_features_that_meet_have_the_property(name, words, session_lab):
    session_lab.forget()
    assert verdict(session_lab, name, {**SMALL, **settings_in(words.split())}) == OK


def test_a_draw_has_a_pair_of_keys_if_they_are_allowed_together():
    assert {"stop", "groups"} <= changed_keys(draw(random.Random(0), ["stop", "groups"])[0])
    refusals = [draw(random.Random(seed), ["groups", "downlink"])[1] for seed in range(5)]
    assert any("does not work with groups" in refusal for refusal in refusals)


def test_pairs_are_tried_evenly_and_counted_if_both_keys_were_changed():
    pairs = Pairs(0)
    tried = [pairs.rarest() for _ in range(2 * len(pairs.all))]
    assert len(set(tried[: len(pairs.all)])) == len(pairs.all)
    pairs.count([{**SMALL, "cohort": 2, "buffers": "average"}, {**SMALL, "cohort": 3}])  # the default of buffers
    assert pairs.run["workers", "cohort"] == 0  # workers = 4 is the default too
    assert pairs.run["rounds", "cohort"] == 1
    assert not any("buffers" in pair for pair in pairs.run)
    pairs.refused["groups", "downlink"] = "groups: no"
    lines = pairs.lines()
    assert "1 refused in one line" in lines[0]
    assert lines[-1] == "  refused groups + downlink: groups: no"


def test_a_check_that_takes_too_long_ends(session_lab, monkeypatch):
    monkeypatch.setattr("tests.fuzz.__main__.LONGEST", 1)
    monkeypatch.setitem(PROPERTIES, "slow", Property(lambda lab, settings: time.sleep(60)))
    assert verdict(session_lab, "slow", SMALL) == TOO_LONG


def test_a_draw_depends_on_its_number_alone():
    assert draw(random.Random("0 5")) == draw(random.Random("0 5")) != draw(random.Random("0 6"))


def test_a_draw_must_pass_the_checks_with_its_data():
    settings = {
        "data.name": "tests.other_tasks:planes",
        "task.name": "regression",
        "model.name": "tests.other_tasks:plane",
    }
    assert is_runnable(settings)
    by_class = {**settings, "partition.name": "dirichlet"}  # numbers have no classes
    assert is_valid(by_class)
    assert not is_runnable(by_class)


def test_a_new_component_is_drawn():
    @rule("rule_of_the_fuzzer")
    def rule_of_the_fuzzer(updates: torch.Tensor) -> torch.Tensor:
        return updates.mean(0)

    try:
        drawn = (GROUPS["aggregate"](random.Random(number), {"workers": 3})["aggregate.rule"] for number in range(1000))
        assert "rule_of_the_fuzzer" in drawn
    finally:
        del rule._components["rule_of_the_fuzzer"]


def test_a_failure_is_reduced_to_the_settings_that_cause_it():
    settings = next(s for n in range(1000) if (s := draw(random.Random(f"shrink {n}"))[0]).get("model.lora.rank"))
    small = shrunk(settings, lambda candidate: bool(candidate.get("model.lora.rank")), seconds=60)
    assert {key for key in small if not key.startswith(("data.", "model.", "task."))} == {"workers", "rounds", "seed"}
    assert (small["rounds"], small["workers"], small["seed"]) == (1, 2, 0)


def test_a_command_has_the_settings_of_the_draw():
    for number in range(8):
        settings, _ = draw(random.Random(f"command {number}"))
        words = command("pool", settings).split("--check pool ")[1]
        assert settings_in(shlex.split(words)) == settings
        assert is_valid(settings)


def test_outcomes_differ_in_one_bit():
    row = torch.ones(3)
    ours, theirs = Outcome(row, {}, []), Outcome(row.clone(), {}, [])
    assert difference(ours, theirs, "two") is None
    theirs.row[1] += 2e-7
    assert "differ" in difference(ours, theirs, "two")
