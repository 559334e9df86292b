from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

import fedsim
from fedsim import Experiment, ExperimentError
from fedsim.config.engines import TRAITS
from fedsim.config.load import load_experiment
from fedsim.config.validation import warnings_about
from fedsim.engines import engine
from fedsim.errors import FedsimError
from fedsim.runs.setup import check_run
from fedsim.toml import tomllib


def error_of(tables):
    """Return the ExperimentError for tables, or for a string of `key=value` words."""
    with pytest.raises(ExperimentError) as caught:
        load_experiment(None, tables.split()) if isinstance(tables, str) else load_experiment(tables)
    assert all("\n" not in line for line in caught.value.lines)
    return caught.value


ANSWERS = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text())
IN_PYTHON = [  # what words of a command line cannot say
    ({"process_timeout": float("inf")}, "process_timeout = inf: must be a finite number"),
    ({"name": "a\nb"}, 'name = "a\\nb": contains unprintable characters'),
    ({"model": {"name": "tests.models:sized", "scale": None}}, "model.scale = None: TOML cannot express None; omit th"),
    ({"local": {"batch_size": lambda client: 1}}, "fedsim does not pass the argument client, only worker, round"),
    (
        {"local": {"algorithm": "dp_sgd", "epochs": lambda worker, round: 1}},
        "but privacy depends on the largest number; use one number for all",
    ),
]


@pytest.mark.parametrize(
    ("tables", "line"), [*ANSWERS["refused"].items(), *IN_PYTHON], ids=lambda value: str(value)[:50]
)
def test_a_wrong_experiment_gives_one_line_with_key_value_and_remedy(tables, line):
    error = error_of(tables)
    assert len(error.lines) == 1
    assert line in error.lines[0]
    assert error.lines[0].startswith(error.key)


@pytest.mark.parametrize(("words", "line"), ANSWERS["unfit"].items())
def test_an_experiment_that_does_not_fit_its_data_or_model_gives_one_line(words, line, session):
    experiment = load_experiment(None, words.split())
    with pytest.raises(FedsimError) as caught:
        check_run(experiment, session, to_run=False)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("words", "expected"), ANSWERS["without_effect"].items())
def test_a_key_without_effect_is_a_warning(words, expected):
    warned = warnings_about(load_experiment(None, words.split()))
    lines = [line.replace(" has no effect with ", ": ").removesuffix("; omit it") for line in warned]
    assert ", ".join(lines).startswith(expected)
    assert bool(lines) == bool(expected)


@pytest.mark.filterwarnings("ignore:.*has no effect")
@pytest.mark.parametrize(
    ("tables", "more"),
    [
        (
            {},
            {
                "processes": 2,
                "process_timeout": 9.0,
                "batched": {"stack_size": 2},
                "cuda_graphs": True,
                "switch_after_round": 1,
            },
        ),
        ({}, {"distributed": {"trainer": "batched", "timeout": 9.0}, "race": {"runs": 3}, "clock": {"latency": 1.0}}),
        ({}, {"attack": "alie", "worker_evaluation": {"every": 1}, "stop": {"metric": "test_loss"}}),
        ({"sync": "gradients"}, {"server": {"name": "momentum", "lr": 0.5}}),
        ({"aggregate": "median"}, {"aggregate": {"rule": "median", "weights": "samples", "root_samples": 9}}),
        (
            {"mode": "clock", "policy": "asgd"},
            {
                **{
                    "sync": "gradients",
                    "aggregate": {"weights": "samples"},
                    "processors": ["sign"],
                    "sampling": "by_size",
                },
                **{"sampling": "by_size", "sampling.dropout_rate": 0.5, "server": "momentum", "workers": 3},
            },
        ),
    ],
)
def test_such_a_key_changes_no_bit_of_a_run(tables, more, tiny_experiment):
    tables = {**tiny_experiment, "engine": "serial", "model": "logistic", "rounds": 2, **tables}
    usual, changed = (fedsim.run(each).global_row for each in (tables, {**tables, **more}))
    assert torch.equal(usual, changed)


def test_an_error_has_the_key_of_each_problem():
    error = error_of("workers=0 rounds=0 local.lrr=1 foo=1")
    assert sorted(error.keys) == ["foo", "local.lrr", "rounds", "workers"]


def test_an_error_survives_pickling():
    error = pickle.loads(pickle.dumps(ExperimentError("rounds = 0: must be greater than 0", "foo: bar", source="x")))
    assert (error.key, error.keys, len(error.lines)) == ("rounds", ("rounds", "foo"), 2)


@pytest.mark.parametrize(
    "tables",
    [
        # defaults, as a run folder holds them
        {"checkpoint": {"every": 0, "keep": 2}, "aggregate": {"root_samples": 100}},
        {"max_restarts": 2, "engine": "serial"},
        {"max_restarts": 0, "processes": 1},  # `auto` may choose a single process
        {"aggregate": {"rule": "mean", "f": 1}, "records": {"updates": [1]}},  # f is used by `fedsim replay`
        {"rounds": 3, "records": {"updates": [7]}},  # the run may be continued to more rounds
        {"mode": "clock", "policy": "asgd", "clock": {"departures": {"0": 5, "3": 0}}},
        {"mode": "clock", "policy": {"name": "ssp", "s": "inf"}},
        {"model": {"name": "tests.models:sized", "hidden": (8, 4)}},
    ],
    ids=lambda value: str(value)[:50],
)
def test_settings_that_look_wrong_are_valid_and_have_an_effect(tables):
    experiment = Experiment(**tables)
    assert warnings_about(experiment) == []
    assert Experiment(**experiment.resolved()) == experiment


@pytest.mark.parametrize(
    ("tables", "name"),
    [
        ({}, "net-mnist5k-weighted_mean"),
        ({"model": "2nn", "data": "mnist", "aggregate": ["nnm", "median"]}, "2nn-mnist-nnm_median"),
        ({"model": "tests.models:sized", "data": "tests.components:tiny"}, "sized-tiny-weighted_mean"),
        ({"mode": "clock", "policy": "asgd"}, "net-mnist5k-asgd"),
        ({"mode": "race", "policy": "hogwild"}, "net-mnist5k-hogwild-race"),
        ({"privacy": {"mechanism": "central", "clip": 1.0, "noise": 1.0}}, "net-mnist5k-mean"),
        ({"name": "mine"}, "mine"),
    ],
)
def test_the_default_name_consists_of_model_data_and_rule_or_policy(tables, name):
    assert Experiment(**tables).name == name


@pytest.mark.parametrize(
    ("tables", "rounds"),
    [
        ({}, 0),
        ({"sync": "gradients"}, 10),
        ({"sync": "post_local", "switch_after_round": 3, "server": "momentum"}, 3),
        ({"sync": "post_local", "switch_after_round": 10}, 10),
        ({"sync": "post_local", "switch_after_round": 0, "local": "fedprox"}, 0),
    ],
)
def test_the_number_of_rounds_that_aggregate_gradients(tables, rounds):
    assert Experiment(**tables).rounds_of_gradients == rounds


def test_an_experiment_is_frozen_and_can_be_pickled():
    experiment = Experiment(model="cnn")
    with pytest.raises(Exception, match="frozen"):
        experiment.rounds = 5
    assert pickle.loads(pickle.dumps(experiment)) == experiment


def test_the_named_engines_have_the_traits_that_experiments_are_checked_with():
    assert {registration.name: registration.target.traits for registration in engine} == TRAITS


def test_checking_a_correct_experiment_looks_for_no_suggestion(monkeypatch):
    """Suggestions read the parameters of all components, which takes as long as all checks together."""

    def suggest(*_):
        raise AssertionError("an attribute that does not exist was read")

    monkeypatch.setattr("fedsim.core.base_table.attribute_error", suggest)
    for schedule in ({}, {"server": {"schedule": "cosine"}}):
        experiment = fedsim.Experiment(**schedule)
        assert warnings_about(experiment) == []
        assert experiment.planned_settings == ["server.schedule"] * bool(schedule)
