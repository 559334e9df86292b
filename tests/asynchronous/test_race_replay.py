from __future__ import annotations

import re

import pytest
import torch

import fedsim
from fedsim.callbacks.display import announcement
from fedsim.errors import show
from fedsim.records.history import RACE_LOG
from fedsim.records.round_table import columns_of

POLICIES = {
    "fedasync": {},
    "asgd with n_fetch and n_push": {"name": "asgd", "n_fetch": 2, "n_push": 3},
    "ssp": {"s": 1},
    "k_sync": {"k": 2},
    "easgd": {"synchronous": True, "period": 2},
    "d_psgd": {},
    "async_local_sgd": {"dylu": True},
}
TABLES = {
    "workers": 3,
    "rounds": 2,
    "model": "tests.models:Normalised",
    "data": "tests.components:tiny",
    "partition": "tests.components:uneven",
    "local": {"batch_size": 6, "lr": 0.05, "momentum": 0.5},
    "records": {"figures": []},
}


def race(session, out, policy):
    return fedsim.run({**TABLES, "mode": "race", "policy": policy, "race": {"runs": 2}}, out, session=session)


def again(log, on_start=None, **changes):
    """Replay a logged race on the virtual clock in one process."""
    tables = {**TABLES, "mode": "clock", "policy": "asgd", "engine": "serial", "clock": {"replay_log": str(log)}}
    return fedsim.run({**tables, **changes}, on_start=on_start)


@pytest.mark.parametrize("name", POLICIES)
def test_the_clock_repeats_a_race_bit_for_bit(session, tmp_path, name):
    policy = {"name": name, **POLICIES[name]}
    raced = race(session, tmp_path / "run", policy)
    replayed = again(tmp_path / "run", policy=policy)
    assert torch.equal(raced.global_row, replayed.global_row)
    for there, here in zip(raced.history, replayed.history, strict=True):
        assert here["asynchronous"] == there["asynchronous"]
        assert here["test_accuracy"] == there["race"]["test_accuracies"][0]
        assert (here["samples"], here["bytes_up"]) == (there["samples"], there["bytes_up"])
        assert here["virtual_seconds"] is None


@pytest.mark.parametrize("attack", [{"workers": [1], "start_round": 2}, {"f": 1, "resample": True}])
def test_attackers_that_change_are_left_out_of_the_tested_mean_in_a_race(session, tmp_path, attack):
    attack = {"name": "sign_flipping", **attack}
    tables = {**TABLES, "attack": attack, "aggregate": "median", "policy": "d_psgd", "rounds": 3}
    raced = fedsim.run({**tables, "mode": "race"}, tmp_path / "run", session=session)
    clock = {"mode": "clock", "engine": "serial", "clock": {"replay_log": str(tmp_path / "run")}}
    assert torch.equal(raced.global_row, fedsim.run({**tables, **clock}).global_row)


@pytest.fixture(scope="module")
def logged(session, tmp_path_factory):
    """Return the run folder of an `asgd` race."""
    folder = tmp_path_factory.mktemp("races") / "run"
    race(session, folder, "asgd")
    return folder


def test_the_headline_of_a_replay_names_the_log_and_its_table_has_no_virtual_time(logged):
    result = again(logged, rounds=1)
    line = announcement(result.experiment)
    assert f"on the virtual clock (order from clock.replay_log = {show(str(logged))})" in line
    assert "speeds" not in line
    heads = [column.column for column in columns_of(result.history[0])]
    assert heads[-2:] == ["updates", "staleness"]
    assert "virtual s" not in heads


RACED, EQUAL = "the race was run with ", "use the setting of the race"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"rounds": 3}, "round 3 is not in the log, which has 2 rounds; lower `rounds`"),
        (
            {"policy": "dc_asgd"},
            RACED + "policy.adaptive not set, but this experiment has policy.adaptive = false; " + EQUAL,
        ),
        ({"workers": 8}, RACED + "workers = 3, but this experiment has workers = 8; " + EQUAL),
        (
            {"data": "tests.components:with_a_hole"},
            f'{RACED}data.name = "tests.components:tiny", but this experiment has data.name = '
            f'"tests.components:with_a_hole"; {EQUAL}',
        ),
    ],
)
def test_a_log_of_another_experiment_is_refused(session, logged, changes, line):
    with pytest.raises(fedsim.ExperimentError) as caught:
        again(logged, **changes)
    assert caught.value.lines == (f"clock.replay_log = {show(str(logged))}: {line}",)


def altered(logged, tmp_path, change):
    path = tmp_path / "altered.csv"
    path.write_text(change((logged / RACE_LOG).read_text()))
    return path


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda text: text + "1,2,0,7,0,9999,10000,0,0\n", "at event 9999, there is no worker 7"),
        (
            lambda text: re.sub(r"(\n1,1,0,\d,0,\d+,\d+),(\d+),", r"\1,33,", text, count=1),
            r"at event \d+, worker \d reads version 33 in the log, but version \d+ now",
        ),
    ],
)
def test_a_changed_log_is_refused(session, logged, tmp_path, change, line):
    path = altered(logged, tmp_path, change)
    with pytest.raises(fedsim.ExperimentError) as caught:
        again(path)
    (error_line,) = caught.value.lines
    place = f"clock.replay_log = {re.escape(show(str(path)))}: the log does not match this experiment"
    assert re.fullmatch(f"{place}: {line}", error_line), error_line
