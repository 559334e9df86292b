from __future__ import annotations

import pickle

import pytest
import torch

import fedsim
from fedsim import Experiment, ExperimentError
from fedsim.config.engines import TRAITS
from fedsim.config.load import load_experiment
from fedsim.config.validation import warnings_about
from fedsim.engines import engine


def error_of(tables):
    """Return the ExperimentError for tables, or for a string of `key=value` words."""
    with pytest.raises(ExperimentError) as caught:
        load_experiment(None, tables.split()) if isinstance(tables, str) else load_experiment(tables)
    assert all("\n" not in line for line in caught.value.lines)
    return caught.value


# The beginning of each error line, for every check in `fedsim.config`.
WRONG = [
    ("workers=0", "workers = 0: must be greater than 0"),
    (f"seed={2**63}", f"seed = {2**63}: must be less than {2**63}"),
    ("cohort=9", "cohort = 9: must be at most 4, the number of workers"),
    ({"process_timeout": float("inf")}, "process_timeout = inf: must be a finite number"),
    ("precision=half", 'precision = "half": must be "float32", "float64", "tf32" or "bf16"'),
    ("sync=post_local", 'sync = "post_local": needs switch_after_round, the last round that aggregates gradients'),
    (
        "switch_after_round=11 sync=post_local rounds=10",
        "switch_after_round = 11: must be at most 10, the number of rounds",
    ),
    (
        "sync=gradients local=fedprox",
        'local.algorithm = "fedprox": needs local steps, so it does not work with sync=gra',
    ),
    ("name=../escape", 'name = "../escape": must be at most 100 characters (a-z, A-Z, 0-9, and . _ -), star'),
    ({"name": "a\nb"}, 'name = "a\\nb": contains unprintable characters'),
    ({"data": {"augment": ["flip", {"name": "shift", "pixels": -3}]}}, "data.augment[1].pixels = -3: must be greater"),
    ("local.nesterov=true", "local.nesterov = true: needs local.momentum > 0"),
    ("aggregate.weights=[1.0]", "aggregate.weights = [1.0]: must be 4 numbers, one per worker, not 1"),
    ("cohort=2 aggregate.weights=[0,0,1,1]", "aggregate.weights = [0.0, 0.0, 1.0, 1.0]: all weights of a cohort of"),
    (
        "engine=fedsim.errors:FedsimError",
        'engine = "fedsim.errors:FedsimError": cannot be used: an engine must be a class that derives',
    ),
    (
        "aggregate=fedsim.errors:FedsimError",
        'aggregate.rule = "fedsim.errors:FedsimError": cannot be used: the aggregation rule has no signature',
    ),
    ({"model": {"name": "tests.models:sized", "scale": None}}, "model.scale = None: TOML cannot express None; omit th"),
    ("aggregate.weights=smaples", 'aggregate.weights = "smaples": must be "uniform", "samples" or "inverse'),
    ("aggregate.weights=[1,1,1,-1]", "aggregate.weights[3] = -1: must be greater than or equal to 0"),
    ("records.model=no", 'records.model = "no": must be true or false'),
    ("policy=asgd", 'policy.name = "asgd": needs mode=clock or mode=race'),
    ("mode=race policy=hogwild aggregate.nonfinite=stop", 'aggregate.nonfinite = "stop": returns the model'),
    ("mode=race", 'policy.name = "sync": mode=race needs an asynchronous policy, such as policy=hogwild'),
    ("clock.noise.name=pareto clock.noise.alpha=1.0 mode=clock", "clock.noise.alpha = 1.0: must be greater than 1"),
    (
        "policy=asgd attack.name=alie attack.fraction=0.3 mode=clock",
        'attack.name = "alie": needs the updates of a cohor',
    ),
    ("policy=fedbuff attack.name=backdoor attack.gamma=2.0 attack.fraction=0.3 mode=clock", 'attack.name = "backdoor'),
    (
        "policy=asgd cohort=2 mode=clock",
        'cohort = 2: with mode=clock and policy.name = "asgd" all workers take part; omit',
    ),
    (
        "policy=asgd local=fedprox mode=clock",
        'local.algorithm = "fedprox": needs local steps, so it does not work with ',
    ),
    *(
        (f"policy=fedbuff local={name} mode=clock", f'local.algorithm = "{name}": needs rounds that aggregate a cohort')
        for name in ("feddyn", "mime", "pfedme")
    ),
    *(
        (
            f"privacy=central privacy.clip=1.0 privacy.noise=1.0 local={name}",
            f'local.algorithm = "{name}": workers send more than their updates, which ',
        )
        for name in ("mime", "scaffold")
    ),
    ("policy=eamsgd mode=clock", 'policy.name = "eamsgd": needs momentum; set local.momentum'),
    ("policy.name=k_sync policy.k=5 mode=clock", "policy.k = 5: must be at most"),
    ("policy.name=backup_workers policy.backups=4 mode=clock", "policy.backups = 4: must be less than"),
    ("policy.name=async_local_sgd policy.c=0.3 mode=clock", "policy.c = 0.3: must be at most 1/policy.n = 1/4"),
    ("clock.departures.1=2.0 mode=clock", "clock.departures: only works with an asynchronous policy"),
    ("policy=asgd clock.departures.4=2.0 mode=clock", "clock.departures.4: the key must be a worker ID from 0 to 3"),
]


@pytest.mark.parametrize(("tables", "line"), WRONG, ids=lambda value: str(value)[:50])
def test_a_wrong_experiment_gives_one_line_with_key_value_and_remedy(tables, line):
    error = error_of(tables)
    assert len(error.lines) == 1
    assert error.lines[0].startswith(line)
    assert line.startswith(error.key)


# Words of an experiment, and the keys and settings of its warnings: the key has no effect with this setting.
PRIVATE = "privacy.mechanism=central privacy.clip=1.0 privacy.noise=1.0"
WITHOUT_EFFECT = [
    ("switch_after_round=2", "switch_after_round: sync=parameters"),
    ("engine=serial processes=2 process_timeout=5.0", "process_timeout: engine=serial, processes: engine=serial"),
    ("engine=processes batched.stack_size=3", "batched: engine=processes"),
    ("engine=distributed batched.stack_size=3", "batched: engine=distributed"),
    ("engine=distributed distributed.trainer=batched batched.stack_size=3", ""),
    ("engine=batched processes=1 max_restarts=0", "max_restarts: engine=batched"),
    ("engine=serial processes=1 cuda_graphs=false", ""),
    ('aggregate.root_samples=50 aggregate=["nnm","mean"]', "aggregate.root_samples: aggregate.rule=nnm + mean"),
    (
        "aggregate=tests.components:clipped_mean aggregate.weights=samples",
        "aggregate.weights: aggregate.rule=tests.components:c",
    ),
    ("checkpoint.every=0 checkpoint.keep=5", "checkpoint.keep: checkpoint.every=0"),
    ("worker_state_memory=5", "worker_state_memory: workers without state"),
    ("buffers=local mode=race policy=hogwild worker_state_memory=5", "worker_state_memory: mode=race"),
    ("engine=distributed distributed.hook=fp16", "distributed.hook: sync=parameters, because ran"),
    (
        "engine=distributed distributed.hook=fp16 sync=gradients aggregate=mean records.updates=[1]",
        "distributed.hook: records.updates, because ranks",
    ),
    ("sync=gradients server=momentum", "server: sync=gradients"),
    ("clock.step_seconds=2.0 race.runs=3", "clock: mode=rounds, race: mode=rounds"),
    ("mode=clock policy=asgd clock.replay_log=x clock.latency=1.0", "clock.latency: clock.replay_log"),
    ("mode=race policy=hogwild batched.stack_size=3", "batched: mode=race"),
    ("mode=clock policy=asgd sync=gradients aggregate=median", "aggregate.rule: policy=asgd, sync: policy=asgd"),
    (
        "mode=clock policy=asgd sampling=by_size sampling.dropout_rate=0.1",
        "sampling: policy=asgd, sampling.dropout_rate: policy=as",
    ),
    ("mode=clock policy=asgd server=momentum records.updates=[1]", "records.updates: policy=asgd, server: policy=asg"),
    ("mode=clock policy=fedbuff server=momentum", ""),
    ("attack=alie", "attack.name: no Byzantine workers (set attack.f)"),
    (
        "attack=alie attack.fraction=0.1",
        "attack.name: no Byzantine workers (0.1 of 4 workers is less than one; set attack.f=1)",
    ),
    ("aggregate.f=1", "aggregate.f: aggregate.rule=weighted_mean"),
    ("aggregate=trimmed_mean aggregate.f=1", ""),
    ("attack.resample=true", "attack.resample: attack.f and attack.fraction unset"),
    (
        "attack=sign_flipping attack.fraction=0.25 attack.before_processors=true",
        "attack.before_processors: processors unset",
    ),
    ("privacy.delta=0.001", "privacy.delta: privacy.mechanism=none"),
    (f"{PRIVATE} workers=40 privacy.delta=0.2", "privacy.delta = 0.2: is larger than 1 / workers = 0.025, so the guar"),
    (f"{PRIVATE} workers=40 privacy.delta=0.024", ""),
    ("worker_evaluation.every=3", "worker_evaluation: data.local_test_fraction unset"),
    ("model.lora.alpha=3.0", "model.lora.alpha: model.lora.rank=0"),
    ("stop.metric=test_loss", "stop.metric: stop.patience and stop.target unset"),
    ("stop.metric=test_loss stop.target=0.1 stop.min_delta=0.1", "stop.min_delta: stop.patience unset"),
]


@pytest.mark.parametrize(("words", "expected"), WITHOUT_EFFECT)
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
                **{"sync": "gradients", "aggregate": "krum", "processors": ["sign"], "sampling": "by_size"},
                **{"sampling.dropout_rate": 0.5, "server": "momentum", "records": {"updates": [1]}, "workers": 3},
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
