"""A few draws of `python -m tests.fuzz`, and tests of the fuzzer itself."""

from __future__ import annotations

import random
import shlex

import pytest
import torch

from fedsim.aggregation.rule import rule
from tests.fuzz.__main__ import checked, command, in_turn, is_failure, settings_in
from tests.fuzz.draw import GROUPS, draw, is_runnable, is_valid
from tests.fuzz.properties import PROPERTIES, difference
from tests.fuzz.runs import Lab, Outcome
from tests.fuzz.shrink import shrunk

pytestmark = pytest.mark.filterwarnings("ignore::fedsim.errors.FedsimWarning")


@pytest.fixture(scope="module")
def session_lab():
    with Lab() as lab:
        yield lab


@pytest.mark.parametrize("number", [pytest.param(k, marks=() if k < 30 else pytest.mark.slow) for k in range(400)])
def test_a_drawn_experiment_has_the_property(number, session_lab):
    settings = draw(random.Random(f"test {number}"))
    ((name, answer),) = checked(session_lab, settings, in_turn(list(PROPERTIES), number))
    assert not is_failure(answer), f"{answer}\n{command(name, settings)}"


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
    settings = next(s for n in range(1000) if (s := draw(random.Random(f"shrink {n}"))).get("model.lora.rank"))
    small = shrunk(settings, lambda candidate: bool(candidate.get("model.lora.rank")), seconds=60)
    assert {key for key in small if not key.startswith(("data.", "model.", "task."))} == {"workers", "rounds", "seed"}
    assert (small["rounds"], small["workers"], small["seed"]) == (1, 2, 0)


def test_a_command_has_the_settings_of_the_draw():
    for number in range(8):
        settings = draw(random.Random(f"command {number}"))
        words = command("pool", settings).split("--check pool ")[1]
        assert settings_in(shlex.split(words)) == settings
        assert is_valid(settings)


def test_outcomes_differ_in_one_bit():
    row = torch.ones(3)
    ours, theirs = Outcome(row, {}, []), Outcome(row.clone(), {}, [])
    assert difference(ours, theirs, "two") is None
    theirs.row[1] += 2e-7
    assert "differ" in difference(ours, theirs, "two")
