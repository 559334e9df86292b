"""The engine contract: global rows and histories equal those of `serial`, bit by bit or up to rounding."""

from __future__ import annotations

import pytest
import torch

import fedsim
from fedsim.clients import needs_local_steps
from tests.other_tasks import NEXT_TOKEN, REGRESSION
from tests.real_models import CHAR_LSTM, GPT, RESNET
from tests.training.sampled_cases import SAMPLED

ATTACKED = {"workers": 7}  # enough workers for two attackers
UNEVEN = {"partition": "tests.components:uneven"}
SOME = {**UNEVEN, "workers": 5, "cohort": 3}
GROUPED = {**UNEVEN, "workers": 7, "cohort": 5, "rounds": 4, "groups": [0, 1, 1, 2, 2, 2, 0], "group_rounds": 2}
NET = {"model": "net", "data": "tests.components:cropped"}  # small images, on which it is quick
NORMALISED = {"model": "tests.models:Normalised"}
SEVERAL = {"data": "tests.several_inputs:samples", "model": "tests.several_inputs:Joint"}
NAN_LEFT_OUT = {"attack": {"name": "nan", "fraction": 0.3}, "aggregate": {"nonfinite": "exclude"}}


def by(algorithm, batch_size=16, **settings):
    """Return the table `local` with a client algorithm, in an experiment."""
    return {"local": {"algorithm": algorithm, "batch_size": batch_size, **settings}}


def falling(worker, round):
    """Return a learning rate for each worker and round."""
    return 0.02 * (1 + worker) / round


CASES = {
    "one worker": {"workers": 1},  # first, because all other cases share their processes
    "plain averaging": {},
    "uneven shards": {"partition": "tests.components:uneven"},
    "partial cohorts": {"workers": 7, "cohort": 3, "rounds": 3},
    "partial cohorts of uneven shards": {"workers": 6, "cohort": 4, "partition": "tests.components:uneven"},
    "local steps": {"local": {"steps": 5, "batch_size": 16}},
    "several local epochs": {"local": {"epochs": 2, "batch_size": 50}},
    "momentum, weight decay": {"local": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}},
    "fedprox": {"local": {"algorithm": "fedprox", "mu": 1.0, "momentum": 0.5}, "partition": "tests.components:uneven"},
    "scaffold": {**SOME, **by("scaffold"), "rounds": 3, "aggregate": "mean"},
    "scaffold with full gradients": {
        **{**UNEVEN, "local": {"algorithm": "scaffold", "option": 1, "weight_decay": 0.01}},
        **{**NET, "workers": 4, "cohort": 3, "rounds": 3},
    },
    "fednova": {**SOME, **by("fednova", momentum=0.9)},
    "feddyn": {**SOME, **by("feddyn", alpha=0.1), "rounds": 3, "aggregate": "mean"},
    "feddyn of rows left out": {
        **{**ATTACKED, "local": {"algorithm": "feddyn"}, "rounds": 3},
        **{"attack": {"name": "nan", "fraction": 0.3}, "aggregate": {"rule": "median", "nonfinite": "exclude"}},
    },
    "adam": {**UNEVEN, "local": {"algorithm": "adam", "weight_decay": 0.1, "amsgrad": True}},
    "adamw": {**by("adamw", epochs=2)},
    "worker state and messages": {**SOME, **by("tests.components:Counting"), "rounds": 4},
    "worker state of rows left out": {
        **{**ATTACKED, **NAN_LEFT_OUT, "local": {"algorithm": "tests.components:Counting"}, "rounds": 3}
    },
    "adagrad": {"local": {"algorithm": "adagrad", "lr_decay": 0.1, "weight_decay": 0.1}},
    "dropout": {**NET, "partition": "tests.components:uneven"},
    "a large model": {"model": "cnn", "data": {"name": "tests.components:tiny", "train": 40}, "rounds": 1},
    "unweighted": {"aggregate": {"rule": "mean"}, "partition": "tests.components:uneven"},
    "given weights": {"aggregate": {"weights": [1.0, 0.0, 5.0]}},
    "a rule on whole rows": {"aggregate": {"rule": "tests.components:clipped_mean", "c": 0.5}},
    "server momentum": {"server": {"name": "momentum", "lr": 0.5}},
    "gradients first, then parameters": {
        **{"sync": "post_local", "switch_after_round": 1, "rounds": 3, "partition": "tests.components:uneven"},
        "server": {"name": "momentum", "lr": 0.5},
    },
    "augmentation": {"data": {"name": "tests.components:tiny", "augment": ["flip", {"name": "shift", "pixels": 1}]}},
    "crop and cutout": {"data": {"name": "tests.components:tiny", "augment": ["crop", {"name": "cutout", "size": 8}]}},
    "transforms of torchvision": {
        "data": {"name": "tests.components:tiny", "augment": ["torchvision:RandAugment", "torchvision:GaussianNoise"]}
    },
    "float64": {"precision": "float64"},
    "bfloat16": {"precision": "bf16", **NET},
    "buffers averaged": {"model": "tests.models:Normalised", "buffers": "average"},
    "buffers kept by workers": {"model": "tests.models:Normalised", "buffers": "local", "workers": 5, "cohort": 2},
    "buffers of the server": {"model": "tests.models:Normalised", "buffers": "frozen"},
    "state that no row holds": {"model": "tests.models:Stateful", "workers": 5, "cohort": 4},
    "shared and unused parameters": {"model": "tests.models:Tied", "local": {"weight_decay": 0.1, "momentum": 0.5}},
    "low-rank adapters": {"model": {"name": "tests.models:sized", "hidden": [12, 11], "lora": {"rank": 2}}},
    "token numbers": {"model": "tests.models:Embedded", "data": "tests.components:tokens"},
    "a rule on columns": {"aggregate": {"rule": "trimmed_mean", "f": 1}},
    "a rule by distances, under attack": {**ATTACKED, "attack": {"name": "alie", "fraction": 0.3}, "aggregate": "krum"},
    "pre-aggregators": {**ATTACKED, "aggregate": {"rule": ["bucketing", {"rule": "nnm", "f": 1}, "median"]}},
    "a rule with a state": {**ATTACKED, "cohort": 5, "rounds": 3, "aggregate": "foolsgold"},
    "a rule that starts where it ended": {"rounds": 3, "aggregate": {"rule": "centered_clipping", "tau": 0.1}},
    "a rule that draws": {**ATTACKED, "aggregate": {"rule": "dnc", "b": 50, "f": 2}},
    "a rule with data of the server's own": {"aggregate": {"rule": "fltrust", "root_samples": 20}},
    "a rule that asks for losses": {"aggregate": {"rule": "qfedavg", "lr": 0.05}},
    "an attack tuned to the rule": {
        **{**ATTACKED, "model": "logistic"},
        **{"attack": {"name": "opt_alie", "fraction": 0.3}, "aggregate": "median"},
    },
    "an attack tuned to a rule by distances of clipped rows": {
        **{**ATTACKED, "model": "logistic"},
        **{"attack": {"name": "opt_alie", "fraction": 0.3}, "aggregate": {"rule": ["arc", "krum"], "f": 2}},
    },
    "an attack that draws": {**ATTACKED, "attack": {"name": "gaussian", "workers": [1, 3]}, "aggregate": "median"},
    "an attack that remembers": {
        **{**ATTACKED, "rounds": 3, "attack": {"name": "free_rider", "what": "last", "fraction": 0.3}}
    },
    "groups": {**GROUPED, "top_aggregate": "mean", "server": {"name": "bmuf", "nesterov": True}},
    "groups with states, drawn rules, and attacks on both levels": {
        **{**GROUPED, "attack": {"name": "gaussian", "workers": [1, 3]}},
        **{"aggregate": "centered_clipping", "processors": "qsgd"},
        **{"top_aggregate": {"rule": "dnc", "b": 50, "f": 1}, "top_attack": {"name": "alie", "workers": [0]}},
    },
    "buffers and momentum in groups": {**GROUPED, **NORMALISED, **by("sgd", momentum=0.9, keep_optimizer_state=True)},
    "an attack on data": {**ATTACKED, "attack": {"name": "backdoor", "fraction": 0.3, "gamma": 3.0}},
    "rows left out": {**ATTACKED, **NAN_LEFT_OUT},
    "rows left out of a rule by distances": {
        **{**ATTACKED, "attack": {"name": "inf", "workers": [0]}},
        "aggregate": {"rule": "multi_krum", "nonfinite": "exclude"},
    },
    "buffers of rows left out": {**ATTACKED, **NORMALISED, **NAN_LEFT_OUT, "buffers": "local"},
    "a server that broadcasts something else": {"server": {"name": "bmuf", "nesterov": True}, "rounds": 3},
    "an adaptive server": {"server": {"name": "adam", "bias_correction": True}, "rounds": 3},
    "virtual shards": {
        **{"workers": 10**6, "cohort": 4, "rounds": 3},
        "partition": {"name": "virtual", "samples": 30, "alpha": 0.3},
    },
    "virtual shards of uneven sizes, under attack": {
        **{"workers": 10**5, "cohort": 7, "partition": "tests.components:some"},
        **{"attack": {"name": "label_flipping", "fraction": 0.3}, "aggregate": "weighted_mean"},
    },
    "virtual shards and data of the server's own": {
        **{"workers": 10**5, "cohort": 3, "partition": {"name": "virtual", "samples": 30}},
        "aggregate": {"rule": "fltrust", "root_samples": 20},
    },
    "workers that see their samples differently": {"partition": {"name": "feature_noise", "sigma": 1.0}},
    "fragments of workers that keep their models": {
        "model": {"name": "tests.models:sized", "hidden": [12]},
        **by("adamw", steps=3, keep_optimizer_state=True, fragments={"count": 3, "delay": 2, "mixing": 0.5}),
        **{**UNEVEN, "server": "diloco", "rounds": 5},
    },
}

CHAIN = [{"name": "clip", "max_norm": 0.2}, {"name": "gaussian_noise", "std": 0.01}, {"name": "top_k", "k": 500}]
PROCESSED = {
    "private updates, processed, under attack": {
        **{**ATTACKED, "cohort": 5, "attack": {"name": "sign_flipping", "fraction": 0.3, "scale": 3.0}},
        **{"processors": ["qsgd"], "privacy": {"mechanism": "central", "clip": 0.3, "noise": 0.1}},
    },
    "privacy whose norm adapts": {
        **{"workers": 7, "cohort": 2, "rounds": 4, "sampling": "poisson", "partition": "tests.components:uneven"},
        "privacy": {"mechanism": "adaptive", "clip": 0.3, "noise": 0.05, "lr": 1.0},
    },
    "privacy of the workers, with a rule on whole rows": {
        **{"workers": 5, "privacy": {"mechanism": "local", "clip": 0.3, "noise": 0.1}},
        "aggregate": {"rule": "krum", "f": 1},
    },
    "processed updates": {"processors": CHAIN, "workers": 5, "cohort": 3, "partition": "tests.components:uneven"},
    "processed gradients": {"processors": CHAIN, "partition": "tests.components:uneven"},
    "updates quantized after an attack": {
        **{**ATTACKED, "attack": {"name": "alie", "fraction": 0.3}, "aggregate": "krum"},
        "processors": ["qsgd"],
    },
    "fragments, processed, under attack": {
        "model": {"name": "tests.models:sized", "hidden": [12]},
        **by("muon", steps=3, keep_optimizer_state=True, fragments={"count": 2}),
        "processors": [{"name": "powersgd", "rank": 1, "error_feedback": True}, "natural"],
        "downlink": [{"name": "powersgd", "rank": 1}, {"name": "top_k", "ratio": 0.3}],
        **{**ATTACKED, "attack": {"name": "alie", "fraction": 0.3, "z": 1.5}, "aggregate": "median", "rounds": 5},
    },
    "updates and broadcasts compressed": {
        **{"workers": 5, "cohort": 3, "rounds": 3, "partition": "tests.components:uneven", "server": {"name": "bmuf"}},
        **{"processors": [{"name": "powersgd", "rank": 1, "error_feedback": True}, "natural"]},
        "downlink": [{"name": "powersgd", "rank": 1}, {"name": "top_k", "ratio": 0.3}],
    },
    "an attack that passes through the chain": {
        **{**ATTACKED, "attack": {"name": "alie", "fraction": 0.3, "before_processors": True}, "aggregate": "median"},
        "processors": ["clip", {"name": "rand_k", "ratio": 0.1}, "terngrad"],
    },
    "a rule with data of the server's own, and processed updates": {
        **{"aggregate": {"rule": "fltrust", "root_samples": 20}, "processors": ["sign"]}
    },
}

TASKS = {
    "another loss": {"task": "tests.components:Smoothed", "partition": "tests.components:uneven"},
    "a loss of whole batches": {"task": "tests.components:weighted_loss", "partition": "tests.components:uneven"},
    "regression": {**REGRESSION, "partition": "tests.components:uneven"},
    "a character LSTM": {**CHAR_LSTM, "partition": "tests.components:uneven"},
    "a transformer with dropout": {
        **{**GPT, "model": {**GPT["model"], "dropout": 0.3}, "partition": "tests.components:uneven"}
    },
    "a residual network": {**RESNET, "partition": "tests.components:uneven", "local": {"batch_size": 5}},
    "next token": {**NEXT_TOKEN, "partition": "tests.components:uneven", "metrics": ["perplexity"]},
    "weighted classes": {
        **{"task": {"name": "classification", "class_weights": "balanced"}, "partition": "tests.components:uneven"},
        "data": {"name": "tests.components:tiny", "validation_fraction": 0.2, "stratify": True},
    },
    "several inputs by name": {**SEVERAL, **UNEVEN, "metrics": ["macro_f1"]},
    "several inputs, and clipped gradients of samples": {**SOME, **SEVERAL, **by("dp_sgd", clip=0.1, noise=0.2)},
    "several inputs, and full gradients": {**SOME, **SEVERAL, **by("mimelite", drop_last=True)},
    "several inputs by position, augmented and poisoned": {
        "data": {"name": "tests.several_inputs:samples", "by_position": True, "augment": ["flip"]},
        **{"model": "tests.several_inputs:JointWithObject", **ATTACKED},
        "attack": {"name": "backdoor", "fraction": 0.3},
    },
    "clients with their own test samples": {
        **{"data": "tests.components:clients", "model": {"name": "mlp", "hidden": [7]}, "partition": "natural"},
        **{"workers": 7, "cohort": 3, "worker_evaluation": {"every": 1, "fine_tune": 1}},
    },
}
WORK = {
    "drawn local work": {**SOME, "local": {"steps": {"uniform": [1, 6]}, "batch_size": 16}, "rounds": 3},
    "numbers that differ between workers": {
        **{**SOME, **NET, "rounds": 3},
        "local": {
            **{"batch_size": {"uniform": [5, 30]}, "lr": "tests.engines.test_contract:falling"},
            **{"momentum": {"choice": [0.0, 0.9]}, "clip_norm": {"choice": [0.1, 0.3, 1.0]}, "epochs": 2},
        },
    },
    "clipped gradients": {**{**UNEVEN, **NORMALISED, "local": {"clip_norm": 0.5, "momentum": 0.5, "drop_last": True}}},
    "accumulated gradients": {
        **{**UNEVEN, **NORMALISED, "local": {"accumulation_steps": 3, "epochs": 2, "drop_last": True}}
    },
    "learning rates by round": {
        **{"local": {"algorithm": "adam", "schedule": "cosine"}, "rounds": 3},
        "server": {"name": "momentum", "schedule": {"name": "exponential", "gamma": 0.5}},
    },
    "learning rates by step": {
        **{**UNEVEN, "local": {"steps": 4, "momentum": 0.5, "schedule": {"name": "one_cycle", "per": "step"}}}
    },
    "rows left out in turn": {
        **{**ATTACKED, **NAN_LEFT_OUT, "attack": {"name": "nan", "fraction": 0.3, "resample": True}, "rounds": 3}
    },
}
ALGORITHMS = {  # with the data that their additional gradients and full gradients must see
    "muon": {**SOME, **NET, **by("muon", lr={"choice": [0.01, 0.05]}, momentum={"choice": [0.5, 0.95]})},
    "fedsam": {**NET, **by("fedsam", rho=0.5, momentum=0.5)},
    "clipped gradients of samples": {**SOME, **NET, **by("dp_sgd", clip=0.1, noise=0.2, momentum=0.5)},
    "mimelite, some samples left out": {**SOME, **NET, **by("mimelite", drop_last=True), "rounds": 3},
    "mimelite, samples seen differently": {
        **{**by("mimelite"), "partition": {"name": "feature_noise", "sigma": 1.0}},
        "data": {"name": "tests.components:tiny", "augment": ["flip"]},
    },
    "mime": {**SOME, **NET, **by("mime"), "rounds": 3},
    "mime with BatchNorm": {**NORMALISED, **by("mime")},
    "ditto with BatchNorm": {
        **{**SOME, **NORMALISED, **by("ditto", personal_steps=2), "cohort": 2, "rounds": 4, "buffers": "local"}
    },
    "pfedme": {**SOME, **NET, **by("pfedme", inner_steps=2), "cohort": 2, "rounds": 4},
    "apfl": {**UNEVEN, **NORMALISED, **by("apfl", batch_size=15, adaptive=True, momentum=0.5), "rounds": 3},
    "per_fedavg": {**UNEVEN, **NORMALISED, **by("per_fedavg", inner_lr=0.05), "workers": 4},
    "personal parameters": {
        **{**SOME, "local": {"algorithm": "fedper", "personal": ["*.bias"], "momentum": 0.5}, "rounds": 3}
    },
    "personal parameters first": {
        "local": {"algorithm": "fedrep", "personal": ["*.bias"], "momentum": 0.5, "weight_decay": 0.1, "epochs": 3},
        **{**SOME, "rounds": 3},
    },
    "personal normalisation layers": {
        **{**NORMALISED, **by("fedbn"), "buffers": "local", "workers": 5, "cohort": 3, "rounds": 4}
    },
    "several global models": {
        **{**SOME, **NORMALISED, **by("ifca", k=2, momentum=0.5), "rounds": 3, "data.local_test_fraction": 0.3},
        "worker_evaluation": {"fine_tune": 1},
    },
    "several global models under attack": {
        **{**ATTACKED, **NET, **by("ifca", k=2), "aggregate": "geometric_median"},
        **{"attack": {"name": "ipm", "fraction": 0.3}, "sampling.dropout_rate": 0.2, "rounds": 3},
    },
    "features of three models": {**SOME, **NET, **by("moon"), "rounds": 3},
    "features of normalised models": {
        **{**by("moon"), "model": "tests.models:NormalisedFeatures", "workers": 5, "cohort": 3, "rounds": 3}
    },
}
ALL_CASES = {**CASES, **PROCESSED, **TASKS, **WORK, **ALGORITHMS, **SAMPLED}
SPAWN = {"engine": "processes", "processes": 2}  # bit-identical to serial on a CPU
BATCHED = {"engine": "batched", "processes": 1, "batched": {"stack_size": 3}}  # several stacks; agrees up to rounding
REFUSED = {("batched", "state that no row holds"): "which are not stored for each worker; use engine=processes"}
ROUNDING = 1e-9  # tolerance in float64, after a few rounds


TOGETHER = (  # cases that share an experiment by default; each case alone is a slow test
    ("one worker",),  # first, because all other cases share their processes
    ("partial cohorts of uneven shards", "several local epochs", "momentum, weight decay"),
    ("local steps", "a rule on columns", "server momentum", "buffers averaged"),
    ("given weights", "buffers averaged"),
    ("scaffold with full gradients", "processed updates"),
    ("fednova", "clipped gradients"),
    ("feddyn of rows left out", "rows left out in turn"),
    ("adam", "learning rates by round", "a rule on whole rows", "augmentation"),
    ("worker state of rows left out", "rows left out in turn"),
    ("buffers of rows left out",),
    ("virtual shards of uneven sizes, under attack", "bfloat16"),
    ("virtual shards and data of the server's own", "a server that broadcasts something else"),
    ("dropout", "a rule by distances, under attack", "workers that see their samples differently"),
    ("accumulated gradients", "updates quantized after an attack", "transforms of torchvision"),
    ("updates and broadcasts compressed", "buffers averaged"),
    ("an attack that passes through the chain",),
    ("state that no row holds", "an attack that draws"),
    ("shared and unused parameters", "pre-aggregators"),
    ("token numbers", "gradients first, then parameters"),
    ("a rule that starts where it ended", "buffers of the server", "an attack that remembers"),
    ("a rule with a state", "an attack on data", "learning rates by step"),
    ("a rule that draws", "rows left out", "crop and cutout"),
    ("a rule that asks for losses", "another loss", "uneven shards"),
    ("an attack tuned to the rule",),
    ("processed gradients",),
    ("private updates, processed, under attack", "server momentum"),
    ("privacy whose norm adapts", "drawn local work"),
    ("privacy of the workers, with a rule on whole rows",),
    ("clipped gradients of samples",),
    ("workers with the highest losses", "fedsam"),
    ("clipped gradients", "muon"),
    ("fragments of workers that keep their models",),
    ("fragments, processed, under attack",),
    ("unbiased weights, and workers that do not report",),
    ("mimelite, some samples left out", "a rule with data of the server's own"),
    ("mimelite, samples seen differently",),
    ("mime",),
    ("ditto with BatchNorm",),
    ("apfl",),
    ("per_fedavg",),
    ("personal parameters first", "processed updates"),
    ("personal normalisation layers",),
    ("several global models", "processed updates"),
    ("several global models under attack",),
    ("features of normalised models",),
    ("a character LSTM",),
    ("a transformer with dropout",),
    ("a residual network",),
    ("low-rank adapters", "a loss of whole batches"),
    ("an adaptive server", "weighted classes"),
    ("clients with their own test samples",),
    ("several inputs by name",),
    ("several inputs, and clipped gradients of samples",),
    ("several inputs, and full gradients",),
    ("several inputs by position, augmented and poisoned", "drawn local work"),
    ("drawn local work", "buffers kept by workers"),
    ("numbers that differ between workers",),
    ("groups",),
    ("groups with states, drawn rules, and attacks on both levels",),
    ("buffers and momentum in groups",),
)


def merged(*names, cases=ALL_CASES):
    """Return the tables of several cases as one experiment. Of conflicting settings, the last one counts."""
    tables = {}
    for name in names:
        for key, value in cases[name].items():
            both = isinstance(value, dict) and isinstance(tables.get(key), dict)
            tables[key] = {**tables[key], **value} if both else value
    return tables


def run_both(tables, session=None):
    return fedsim.run({**tables, "engine": "serial"}), fedsim.run({**tables, **SPAWN}, session=session)


def without_times(history):
    return [{key: value for key, value in record.items() if key != "seconds"} for record in history]


def assert_close(serial, actual, tolerance):
    """Check that rows, buffers and histories agree to a tolerance, and that all counts are equal."""
    for name, value in serial.model.state_dict().items():
        assert torch.allclose(value, actual.model.state_dict()[name], rtol=0, atol=tolerance), name
    for record, another in zip(without_times(serial.history), without_times(actual.history), strict=True):
        assert another == {key: nearly(value, 2 * tolerance) for key, value in record.items()}


def nearly(value, tolerance):
    if isinstance(value, dict):
        return {key: nearly(of_key, tolerance) for key, of_key in value.items()}
    if isinstance(value, list):
        return [nearly(item, tolerance) for item in value]
    return value if value is None or isinstance(value, str) else pytest.approx(value, abs=tolerance, rel=0)


# Processes do these within one row, as the engine `serial` does. The engine `batched` does not.
IN_ONE_ROW = {"apfl", "per_fedavg", "features of normalised models", "mimelite, samples seen differently"}


def cases_and_syncs(shift, slow=()):
    """List pairs of cases and a sync: `TOGETHER` with alternating syncs, and with `-m slow` each case alone.

    `shift` (0 or 1) is the index of the first pair's sync. Cases whose first name is in `slow` are only tested alone.
    """
    pairs = [
        (names, (syncs_of(names)[(index + shift) % len(syncs_of(names))],), ())
        for index, names in enumerate(TOGETHER)
        if names[0] not in slow
    ]
    pairs += [((name,), syncs_of((name,)), pytest.mark.slow) for name in ALL_CASES]
    return [
        pytest.param(names, sync, marks=marks, id=f"{' and '.join(names)}-{sync}{'-alone' * bool(marks)}")
        for names, syncs, marks in pairs
        for sync in syncs
    ]


def syncs_of(names):
    """Return the values of `sync` with which these cases can run."""
    tables = merged(*names)
    algorithm = fedsim.Experiment(local=tables.get("local", {})).local.component
    if (
        needs_local_steps(algorithm)
        or {"server", "privacy", "groups"} & tables.keys()
        or "accumulation_steps" in tables.get("local", {})
        or isinstance(tables.get("local", {}).get("lr"), str)
    ):
        return (tables.get("sync", "parameters"),)
    return "parameters", "gradients"


@pytest.mark.parametrize(("cases", "sync"), cases_and_syncs(0, IN_ONE_ROW))
def test_spawn_is_bit_identical_to_serial(cases, sync, tiny_experiment, session):
    tables = {**tiny_experiment, **merged(*cases), "sync": sync}
    serial, spawned = run_both(tables, session)
    assert not torch.equal(serial.global_row, torch.zeros_like(serial.global_row))
    assert torch.equal(serial.global_row, spawned.global_row)
    assert without_times(serial.history) == without_times(spawned.history)
    for name, value in serial.model.state_dict().items():
        assert torch.equal(value, spawned.model.state_dict()[name]), name


def test_a_run_repeats_itself_and_follows_its_seed(tiny_experiment, session):
    """The engine's processes may have done anything before."""
    tables = {**tiny_experiment, **NET, "rounds": 1}
    changed = {**tables, **SPAWN}
    runs = [fedsim.run({**changed, "seed": seed}, session=session) for seed in (1, 2, 1)]
    runs += [fedsim.run({**tables, "seed": seed}) for seed in (1, 2, 1)]
    first, with_seed_2, again = (run.global_row for run in runs[:3])
    assert torch.equal(first, again)
    assert not torch.equal(first, with_seed_2)
    assert all(torch.equal(run.global_row, serial.global_row) for run, serial in zip(runs[:3], runs[3:], strict=True))


@pytest.mark.parametrize(("cases", "sync"), cases_and_syncs(1))
def test_batched_agrees_with_serial_up_to_rounding(cases, sync, tiny_experiment):
    tables = {**tiny_experiment, **merged(*cases), "sync": sync, "precision": "float64"}
    if refusal := REFUSED.get(("batched", cases[0])):
        with pytest.raises(fedsim.ExperimentError, match=refusal):
            fedsim.run({**tables, **BATCHED})
        return
    assert_close(fedsim.run({**tables, "engine": "serial"}), fedsim.run({**tables, **BATCHED}), ROUNDING)


@pytest.mark.parametrize("model", ["2nn", "cnn", "net"])
def test_stacked_rows_agree_with_serial_in_float32(model):
    """Partial cohorts, uneven shards, momentum and weight decay."""
    tables = {"rounds": 2, "workers": 12, "cohort": 4, "partition": "tests.components:uneven", "engine": "serial"}
    tables["data"] = {"name": "tests.components:tiny", "train": 80} if model == "cnn" else "tests.components:tiny"
    tables["model"] = {"name": "net", "dropout": 0.0} if model == "net" else model
    tables["local"] = {"steps": 2, "batch_size": 5, "momentum": 0.9, "weight_decay": 0.01}
    serial, stacked = fedsim.run(tables), fedsim.run({**tables, "engine": "batched", "processes": 1})
    assert torch.allclose(serial.global_row, stacked.global_row, rtol=0, atol=1e-4)


@pytest.mark.parametrize("sync", ["parameters", "gradients"])
@pytest.mark.parametrize("case", ["partial cohorts of uneven shards", "dropout", "buffers averaged"])
def test_processes_that_stack_rows_agree_with_serial(case, sync, tiny_experiment, session):
    tables = {**tiny_experiment, "sync": sync, **CASES[case], "precision": "float64"}
    serial = fedsim.run(tables)
    stacked = fedsim.run({**tables, "engine": "batched", "processes": 2}, session=session)
    assert_close(serial, stacked, ROUNDING)


@pytest.mark.parametrize("processes", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_the_number_of_processes_does_not_show_even_if_workers_are_fewer(processes, tiny_experiment):
    """At most as many processes start as a cohort has members. Both values of `sync` use the same processes."""
    with fedsim.Session() as session:
        for sync in ("parameters", "gradients"):
            tables, settings = {**tiny_experiment, **NET, "sync": sync}, []
            serial = fedsim.run({**tables, "engine": "serial"})
            wanted = {**tables, "engine": "processes", "processes": processes}
            spawned = fedsim.run(wanted, session=session, on_start=settings.append)
            assert torch.equal(serial.global_row, spawned.global_row)
            assert settings[0].how["processes"] == min(processes, 3)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["parameters", "gradients"])
def test_mnist5k_in_full_gives_the_same_bits(sync):
    tables = {"rounds": 3, "workers": 7, "cohort": 5, "sync": sync, "partition": "tests.components:uneven"}
    serial, pooled = run_both(tables)
    assert torch.equal(serial.global_row, pooled.global_row)
