from __future__ import annotations

import pickle

import pytest

from fedsim import Experiment, ExperimentError
from fedsim.loading import load_experiment


def lines_of(tables):
    with pytest.raises(ExperimentError) as caught:
        load_experiment(tables)
    assert all("\n" not in line for line in caught.value.lines)
    return caught.value.lines


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"workers": 0}, "workers = 0: must be greater than 0"),
        ({"rounds": -3}, "rounds = -3: must be greater than 0"),
        ({"rounds": 1.5}, "rounds = 1.5: must be a valid integer"),
        ({"rounds": "many"}, 'rounds = "many": must be a valid integer'),
        ({"rounds": True}, "rounds = true: must be a valid integer"),
        ({"seed": -1}, "seed = -1: must be greater than or equal to 0"),
        ({"seed": 2**63}, f"seed = {2**63}: must be less than {2**63}"),
        ({"cohort": 9}, "cohort = 9: must be at most workers, 4"),
        ({"cohort": 0}, "cohort = 0: must be greater than 0"),
        ({"timeout": 0.0}, "timeout = 0.0: must be greater than 0"),
        ({"timeout": float("inf")}, "timeout = inf: must be a finite number"),
        ({"precision": "half"}, 'precision = "half": must be "float32", "float64", "tf32", "bf16" or "float16"'),
        ({"sync": "weights"}, 'sync = "weights": must be "parameters", "gradients" or "post_local"'),
        ({"sync": "post_local"}, 'sync = "post_local": needs gradient_rounds, the number of rounds after which'),
        ({"gradient_rounds": 2}, 'gradient_rounds = 2: needs sync = "post_local", not "parameters"; omit it'),
        (
            {"gradient_rounds": 2, "sync": "gradients"},
            'gradient_rounds = 2: needs sync = "post_local", not "gradients"; omit it',
        ),
        (
            {"gradient_rounds": 11, "sync": "post_local", "rounds": 10},
            "gradient_rounds = 11: must be at most rounds, 10",
        ),
        ({"gradient_rounds": -1, "sync": "post_local"}, "gradient_rounds = -1: must be greater than or equal to 0"),
        (
            {"sync": "gradients", "local": "fedprox"},
            'local.solver = "fedprox": needs local steps, so it does not work with sync = "gradients"; use another',
        ),
        (
            {"sync": "post_local", "gradient_rounds": 1, "local": "fedprox"},
            'local.solver = "fedprox": needs local steps',
        ),
        (
            {"mode": "clock", "policy": "asgd", "local": "fedprox"},
            'local.solver = "fedprox": needs local steps, so it does not work with policy.name = ',
        ),
        ({"engine": "spwan"}, 'engine = "spwan": no such engine; did you mean "spawn"?'),
        ({"engine": "serial", "processes": 2}, 'processes = 2: the engine "serial" uses one process'),
        ({"wrokers": 4}, 'wrokers = 4: unknown key; did you mean "workers"?'),
        (
            {"name": "../escape"},
            'name = "../escape": must be one or more of a-z, A-Z, 0-9 and . _ -, the first of them',
        ),
        ({"name": ""}, 'name = "": must be one or more of a-z'),
        ({"name": "a\nb"}, 'name = "a\\nb": must be one or more of a-z'),
        ({"epochs": 2}, 'epochs = 2: unknown key; did you mean "local.epochs"?'),
        ({"batch-size": 2}, 'batch-size = 2: unknown key; did you mean "local.batch_size"?'),
        ({"rule": "krum"}, 'rule = "krum": unknown key; did you mean "aggregate.rule"?'),
        ({"curve": False}, 'curve = false: unknown key; did you mean "records.curve"?'),
        ({"alpha": 1.0}, 'alpha = 1.0: unknown key; did you mean "partition.alpha" or "server.alpha" or "policy.'),
        (
            {"alpha": 1.0, "partition": "dirichlet"},
            'alpha = 1.0: unknown key; did you mean "partition.alpha"?',
        ),
        ({"xyzzy": {"a": [True]}}, "xyzzy = {a = [true]}: unknown key; allowed: name"),
        (
            {"local": {"learning_rate": 0.1}},
            'local.learning_rate = 0.1: unknown key (the local solver is sgd); did you mean "lr"?',
        ),
        ({"local": {"wd": 0.1}}, 'local.wd = 0.1: unknown key (the local solver is sgd); did you mean "weight_decay"?'),
        ({"model": "nets"}, 'model.name = "nets": no such model; did you mean "net"?'),
        (
            {"model": {"name": "net", "drop": 0.1}},
            'model.drop = 0.1: unknown key (the model is net); did you mean "dropout"?',
        ),
        ({"model": {"name": "net", "dropout": 1.0}}, "model.dropout = 1.0: must be less than 1"),
        ({"model": 3}, "model = 3: must be a table"),
        ({"data": {"datasett": "mnist"}}, 'data.datasett = "mnist": unknown key'),
        ({"data": {"augment": ["flop"]}}, 'data.augment[0].name = "flop": no such augmentation; did you mean "flip"?'),
        (
            {"data": {"augment": ["flip", {"name": "shift", "pixels": -3}]}},
            "data.augment[1].pixels = -3: must be greater",
        ),
        (
            {"partition": {"strategy": "iid", "alpha": 1}},
            "partition.alpha = 1: unknown key (the partition strategy is iid); alpha goes with dirichlet, ",
        ),
        ({"local": {"lr": "fast"}}, 'local.lr = "fast": must be a valid number'),
        ({"local": {"lr": -1.0}}, "local.lr = -1.0: must be greater than or equal to 0"),
        ({"local": {"lr": float("nan")}}, "local.lr = nan: must be a finite number"),
        (
            {"local": {"momentun": 0.5}},
            'local.momentun = 0.5: unknown key (the local solver is sgd); did you mean "momentum"?',
        ),
        ({"local": {"epochs": 1, "steps": 2}}, "local: give epochs or steps, not both"),
        ({"local": {"batch_size": 0}}, "local.batch_size = 0: must be greater than 0"),
        ({"local": {"nesterov": True}}, "local.nesterov = true: needs local.momentum > 0"),
        ({"aggregate": {"weights": [1.0]}}, "aggregate.weights = [1.0]: must be 4 numbers"),
        (
            {"aggregate": {"weights": [0.0] * 4}},
            "aggregate.weights = [0.0, 0.0, 0.0, 0.0]: too many zeros: all weights",
        ),
        (
            {"cohort": 2, "aggregate": {"weights": [0, 0, 1, 1]}},
            "aggregate.weights = [0.0, 0.0, 1.0, 1.0]: too many zeros: all weights",
        ),
        (
            {"engine": "serial", "timeout": 5.0},
            'timeout = 5.0: the engine "serial" waits for no other process; omit it',
        ),
        (
            {"engine": "batched", "processes": 1, "timeout": 5.0},
            'timeout = 5.0: the engine "batched" waits for no other process; omit it',
        ),
        (
            {"aggregate": {"rule": ["nnm", "mean"], "f": 1, "root_samples": 50}},
            "aggregate.root_samples = 50: the rule nnm + mean uses no samples of the server; omit it",
        ),
        (
            {"checkpoint": {"every": 0, "keep": 5}},
            "checkpoint.keep = 5: with checkpoint.every = 0 there are no checkpoints; omit it",
        ),
        (
            {"engine": "distributed", "distributed": {"hook": "tests.plugs:plain_mean"}},
            'distributed.hook = "tests.plugs:plain_mean": applies to gradients, and sync = "parameters" averages none',
        ),
        (
            {
                **{"engine": "distributed", "sync": "gradients", "aggregate": "median"},
                "distributed": {"hook": "tests.plugs:plain_mean"},
            },
            'distributed.hook = "tests.plugs:plain_mean": ranks exchange rows of single workers here',
        ),
        (
            {"engine": "spawn", "batched": {"width": 3}},
            'batched.width = 3: the engine "spawn" does not stack rows; omit batched.width, or use engine=batched',
        ),
        ({"engine": "tests.plugs:tiny"}, 'engine = "tests.plugs:tiny": cannot be used: the argument root is not one'),
        ({"engine": "fedsim.errors:FedsimError"}, 'engine = "fedsim.errors:FedsimError": '),
        (
            {"model": {"name": "tests.plugs:sized", "scale": None}},
            "model.scale = None: TOML cannot express None",
        ),
        (
            {"aggregate": {"weights": "smaples"}},
            'aggregate.weights = "smaples": must be "uniform" or "samples" or a list',
        ),
        ({"aggregate": {"weights": [1, 1, 1, -1]}}, "aggregate.weights[3] = -1: must be greater than or equal to 0"),
        (
            {"aggregate": {"rule": "tests.plugs:clipped_mean", "weights": "samples"}},
            'aggregate.weights = "samples": the rule tests.plugs:clipped_mean takes no weights; omit them',
        ),
        ({"server": {"optimizer": "sdg"}}, 'server.optimizer = "sdg": no such server optimizer; did you mean "sgd"?'),
        ({"sync": "gradients", "server": "momentum"}, 'server.optimizer = "momentum": with sync = "gradients"'),
        ({"records": {"model": "no"}}, 'records.model = "no": must be true or false'),
        ({"records": {"curves": True}}, 'records.curves = true: unknown key; did you mean "curve"?'),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_wrong_experiment_is_one_line_with_place_value_and_what_is_allowed(tables, line):
    lines = lines_of(tables)
    assert any(each.startswith(line) for each in lines), lines
    assert len(lines) == 1


@pytest.mark.parametrize(
    "tables",
    [
        {"data": {"root": "/x"}},  # where downloads lie, whichever data set is taken
        {"aggregate": {"rule": "fltrust", "root_samples": 50}},
        {"checkpoint": {"every": 0}},
        {
            "checkpoint": {"every": 0, "keep": 2},
            "aggregate": {"root_samples": 100},
        },  # written out, as in a run's folder
        {"checkpoint": {"keep": 5}},
        {"engine": "distributed", "sync": "gradients", "distributed": {"hook": "tests.plugs:plain_mean"}},
        {
            "workers": 8,
            "attack": {"fraction": 0.25},
            "aggregate": "krum",
        },  # how many krum is to withstand, and nobody attacks
        {"aggregate": {"rule": "mean", "f": 1}},  # which goes by what a rule, and `fedsim replay`, has of it
        {"rounds": 3, "records": {"updates": [7]}},  # for when there are more rounds
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_has_an_effect_or_may_come_to_have_one_is_allowed(tables):
    assert Experiment(**Experiment(**tables).resolved()) == Experiment(**tables)


def test_several_problems_are_told_at_once():
    assert len(lines_of({"workers": 0, "rounds": 0, "local": {"lrr": 1}, "foo": 1})) == 4


def test_the_constructor_raises_the_same_error():
    with pytest.raises(ExperimentError, match="workers = 0"):
        Experiment(workers=0)


def test_defaults_are_the_default_experiment():
    experiment = Experiment()
    assert experiment == load_experiment()
    assert experiment.data.dataset == "mnist5k"
    assert experiment.local.epochs == 1
    assert experiment.cohort_size == experiment.workers == 4


@pytest.mark.parametrize(
    ("tables", "name"),
    [
        ({}, "net-mnist5k-weighted_mean"),
        ({"model": "2nn", "data": "mnist", "aggregate": ["nnm", "median"]}, "2nn-mnist-nnm_median"),
        ({"model": "tests.plugs:sized", "data": "tests.plugs:tiny"}, "sized-tiny-weighted_mean"),
        ({"mode": "clock", "policy": "asgd"}, "net-mnist5k-asgd"),
        ({"mode": "race", "policy": "hogwild"}, "net-mnist5k-hogwild-race"),
        ({"name": "mine"}, "mine"),
    ],
)
def test_a_run_without_a_name_is_called_by_model_data_and_rule_or_policy(tables, name):
    assert Experiment(**tables).name == name


def test_an_override_changes_the_default_name_and_not_a_given_one():
    assert load_experiment(Experiment(), ["model=2nn"]).name == "2nn-mnist5k-weighted_mean"
    assert load_experiment(Experiment(name="mine"), ["model=2nn"]).name == "mine"


def test_a_bare_string_names_a_plug():
    assert Experiment(partition="contiguous") == Experiment(partition={"strategy": "contiguous"})
    assert Experiment(model="cnn").model.params == {"channels": 1, "classes": 10}


def test_parameters_of_a_plug_are_filled_in_with_its_defaults():
    assert Experiment(server="momentum").server.params == {"lr": 1.0, "beta": 0.9, "nesterov": False}


@pytest.mark.parametrize(
    ("tables", "rounds"),
    [
        ({}, 0),
        ({"sync": "gradients"}, 10),
        ({"sync": "post_local", "gradient_rounds": 3, "server": "momentum"}, 3),
        ({"sync": "post_local", "gradient_rounds": 10}, 10),
        ({"sync": "post_local", "gradient_rounds": 0, "local": "fedprox"}, 0),
    ],
)
def test_how_many_rounds_aggregate_gradients(tables, rounds):
    assert Experiment(**tables).rounds_of_gradients == rounds


def test_steps_stand_in_for_epochs():
    local = Experiment(local={"steps": 5}).local
    assert (local.epochs, local.steps) == (None, 5)


def test_whole_numbers_do_for_numbers():
    assert Experiment(local={"lr": 1}).local.params["lr"] == 1.0


def test_an_experiment_is_frozen_and_can_be_pickled():
    experiment = Experiment(model="cnn")
    with pytest.raises(Exception, match="frozen"):
        experiment.rounds = 5
    assert pickle.loads(pickle.dumps(experiment)) == experiment


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"local": {"steps": 3}, "cohort": 2, "processes": 2, "server": "momentum"},
        {"model": {"name": "tests.plugs:sized", "hidden": (8, 4)}},
        {"local": "sgd"},
        {"data": {"augment": ["flip", {"name": "shift", "pixels": 3}]}, "aggregate": {"weights": [1, 2, 3, 4]}},
    ],
)
def test_the_resolved_experiment_describes_itself(tables):
    experiment = Experiment(**tables)
    assert Experiment(**experiment.resolved()) == experiment


CLOCK = {"mode": "clock"}


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"mode": "cloak"}, 'mode = "cloak": must be "rounds", "clock" or "race"'),
        ({"policy": "asgd"}, 'policy.name = "asgd": needs mode=clock or mode=race'),
        ({"mode": "race"}, 'policy.name = "sync": mode="race" needs an asynchronous policy, such as policy=hogwild'),
        ({"policy": "asdg", **CLOCK}, 'policy.name = "asdg": no such policy; did you mean "asgd"'),
        (
            {"policy": {"name": "asgd", "k": 2}, **CLOCK},
            "policy.k = 2: unknown key (the policy is asgd); k goes with k_sync, k_async, fedbuff",
        ),
        ({"clock": {"base": 2.0}}, "clock: needs mode=clock; omit [clock]"),
        ({"clock": {"noise": "lognormal"}}, "clock: needs mode=clock; omit [clock]"),
        ({"race": {"runs": 3}}, "race: needs mode=race; omit [race]"),
        ({"race": {"runs": 3}, **CLOCK}, "race: needs mode=race; omit [race]"),
        ({"race": {"runs": 0}}, "race.runs = 0: must be greater than 0"),
        (
            {"mode": "race", "policy": "hogwild", "batched": {"width": 3}},
            "batched.width = 3: a race does not stack rows; omit it",
        ),
        (
            {"mode": "race", "policy": "hogwild", "clock": {"base": 2.0}},
            "clock: needs mode=clock; omit [clock]",
        ),
        ({"clock": {"base": 0.0}, **CLOCK}, "clock.base = 0.0: must be greater than 0"),
        ({"clock": {"latency": -1.0}, **CLOCK}, "clock.latency = -1.0: must be greater than or equal to 0"),
        ({"clock": {"latency": float("inf")}, **CLOCK}, "clock.latency = inf: must be a finite number"),
        ({"clock": {"bandwidth": 0.0}, **CLOCK}, "clock.bandwidth = 0.0: must be greater than 0"),
        ({"clock": {"speed": "fast"}, **CLOCK}, 'clock.speed.name = "fast": no such speed'),
        ({"clock": {"noise": {"name": "pareto", "alpha": 1.0}}, **CLOCK}, "clock.noise.alpha = 1.0: must be greater"),
        ({"clock": {"departures": {"0": -1.0}}, **CLOCK}, "clock.departures.0 = -1.0: must be greater"),
        (
            {"policy": "asgd", "sync": "gradients", **CLOCK},
            'policy.name = "asgd": workers are not synchronised; omit sync',
        ),
        (
            {"policy": "asgd", "aggregate": "median", **CLOCK},
            'policy.name = "asgd": it applies updates itself; omit aggregate',
        ),
        (
            {"policy": "asgd", "server": "momentum", **CLOCK},
            'policy.name = "asgd": it updates the global row itself; omit server',
        ),
        (
            {"policy": "fedbuff", "records": {"updates": [1]}, **CLOCK},
            'policy.name = "fedbuff": has no synchronous rounds, so no updates to record; omit',
        ),
        (
            {"policy": "asgd", "attack": {"name": "alie", "fraction": 0.3}, **CLOCK},
            'attack.name = "alie": needs the rows of a cohort, and policy.name = "asgd" has no cohort; use',
        ),
        (
            {"policy": "fedbuff", "attack": {"name": "backdoor", "gamma": 2.0, "fraction": 0.3}, **CLOCK},
            'attack.name = "backdoor": also alters rows with these parameters, which policy.name = "fedbuff" does',
        ),
        (
            {"policy": "asgd", "cohort": 2, **CLOCK},
            'cohort = 2: with mode=clock and policy.name = "asgd" all workers work; omit it',
        ),
        (
            {"policy": "fedbuff", "cohort": 2, "mode": "race"},
            'cohort = 2: with mode=race and policy.name = "fedbuff" all workers work; omit it',
        ),
        (
            {"policy": "asgd", "precision": "float16", **CLOCK},
            'precision = "float16": policy.name = "asgd" uses gradients without loss scaling',
        ),
        (
            {"policy": "asgd", "local": "fedprox", **CLOCK},
            'local.solver = "fedprox": needs local steps, so it does not work with policy.name = ',
        ),
        ({"policy": "eamsgd", **CLOCK}, 'policy.name = "eamsgd": needs momentum; set local.momentum'),
        ({"policy": {"name": "k_sync", "k": 5}, **CLOCK}, "policy.k = 5: must be at most the 4 workers at work"),
        ({"policy": {"name": "backup", "backups": 4}, **CLOCK}, "policy.backups = 4: must be fewer than the 4 workers"),
        ({"policy": {"name": "async_local_sgd", "c": 0.3}, **CLOCK}, "policy.c = 0.3: must be at most 1/n, 1/4"),
        (
            {"clock": {"departures": {"1": 2.0}}, **CLOCK},
            "clock.departures: need an asynchronous policy and no cohort",
        ),
        (
            {"policy": "fedasync", "cohort": 2, "clock": {"departures": {"1": 2.0}}, **CLOCK},
            "clock.departures: need an asynchronous policy and no cohort",
        ),
        (
            {"policy": "asgd", "clock": {"departures": {"4": 2.0}}, **CLOCK},
            "clock.departures.4: must be a worker, from 0 to 3",
        ),
        (
            {"policy": "asgd", "clock": {"departures": {"01": 2.0}}, **CLOCK},  # beside "1" it would be there twice
            "clock.departures.01: must be a worker, from 0 to 3",
        ),
        (
            {"policy": "asgd", "clock": {"departures": {"first": 2.0}}, **CLOCK},
            "clock.departures.first: must be a worker, from 0 to 3",
        ),
        (
            {"policy": "asgd", "clock": {"departures": {"-1": 2.0}}, **CLOCK},
            "clock.departures.-1: must be a worker, from 0 to 3",
        ),
    ],
)
def test_what_does_not_go_with_a_mode_or_a_policy_is_one_line(tables, line):
    lines = lines_of(tables)
    assert any(each.startswith(line) for each in lines), lines
    assert len(lines) == 1


@pytest.mark.parametrize(
    "tables",
    [
        {"clock": {"speed": "lognormal", "noise": {"name": "pareto", "alpha": 1.5}, "latency": 1}},
        {"policy": "fedbuff", "cohort": 2, "server": "adam"},
        {"policy": "asgd", "clock": {"departures": {"0": 5, "3": 0}}},
        {"policy": "fedasync", "precision": "float16", "local": {"solver": "sgd"}},
        {"policy": "asgd", "attack": {"name": "label_flipping", "fraction": 0.3}},
        {"policy": "asgd", "attack": {"name": "backdoor", "fraction": 0.3}},
        {"policy": "eamsgd", "local": {"momentum": 0.9, "nesterov": True}},
        {"policy": {"name": "ssp", "s": "inf"}},
        {"sync": "gradients", "aggregate": "median"},
    ],
)
def test_what_goes_with_a_clock_describes_itself(tables):
    experiment = Experiment(mode="clock", **tables)
    assert Experiment(**experiment.resolved()) == experiment
