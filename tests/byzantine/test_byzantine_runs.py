"""Attacks, robust rules and the exclusion of non-finite updates in whole experiments."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

import fedsim
from fedsim.byzantine.base import draw_attackers
from fedsim.core.randomness import Draws, numpy_generator, sample_cohort
from fedsim.errors import ExperimentError, FedsimWarning, SettingWarning, show
from fedsim.models import logistic
from tests import components
from tests.textbook import Federation, finished


@pytest.fixture
def tables(tiny_experiment):
    return {**tiny_experiment, "workers": 7, "model": "logistic", "rounds": 1}


def updates_of(tables):
    """Return the initial global row, and each worker's first update without an attack [workers, d]."""
    run = finished({**tables, "rounds": 1})
    return run.start, run.updates


def test_an_attack_without_effect_warns_once(tables):
    tables = {**tables, "workers": 5, "rounds": 2, "attack": {"name": "alie", "workers": [1]}}
    with pytest.warns(SettingWarning) as caught:
        fedsim.run(tables)
    lines = [str(warning.message) for warning in caught]
    assert lines == ["alie: z = 0 for n = 5, f = 1: this attack does nothing; set attack.z=1.5"]
    fedsim.run({**tables, "attack": {"name": "alie", "workers": [1], "z": 1.5}})


def test_workers_follow_the_protocol_before_they_attack(tables):
    def losses(**attack):
        result = fedsim.run({**tables, "rounds": 4, "attack": {"workers": [1, 4], **attack}})
        return [record["test_loss"] for record in result.history]

    honest, sleeping = losses(name="none"), losses(name="sign_flipping", start_round=3)
    assert honest[:2] == sleeping[:2]
    assert honest[2] != sleeping[2]
    poisoned = losses(name="label_flipping", start_round=4)
    assert honest[:3] == poisoned[:3]
    assert honest[3] != poisoned[3]


@pytest.mark.parametrize("more", [{}, {"resample": True}, {"by_class": 1}, {"name": "label_flipping"}])
def test_a_number_of_attackers_draws_the_same_workers_as_the_fraction(more, tables):
    def run(**count):
        return fedsim.run({**tables, "rounds": 2, "attack": {"name": "sign_flipping", **count, **more}})

    number, fraction = run(f=2), run(fraction=0.3)
    assert torch.equal(number.global_row, fraction.global_row)
    assert (
        number.experiment.byzantine
        == fraction.experiment.byzantine
        == ([] if len(more) and "name" not in more else draw_attackers(0, 7, 2))
    )
    assert number.experiment.f == 2


@pytest.mark.parametrize("engine", ["serial", "batched", "processes"])
def test_attackers_are_drawn_anew_in_each_round(engine, tables):
    changes = {"attack": {"name": "inf", "fraction": 0.3, "resample": True}, "rounds": 4, "engine": engine}
    changes |= {"aggregate": {"rule": "mean", "nonfinite": "exclude"}, "processes": 1 if engine == "batched" else None}
    result = fedsim.run({**tables, **changes})
    excluded = [record["excluded"] for record in result.history]
    assert excluded == [draw_attackers(0, 7, 2, round) for round in (1, 2, 3, 4)]
    assert len(set(map(tuple, excluded))) > 1


def test_attackers_are_those_who_hold_a_class(tables):
    start_metadata = []
    changes = {"partition": {"name": "dirichlet", "alpha": 0.3}, "aggregate": "median"}
    attack = {"name": "sign_flipping", "fraction": 0.3, "by_class": 3}
    fedsim.run({**tables, **changes, "attack": attack}, on_start=lambda metadata: start_metadata.append(metadata))
    held = start_metadata[0].label_counts[:, 3]
    assert sorted(held[start_metadata[0].byzantine]) == sorted(held)[-2:]
    with pytest.raises(ExperimentError, match=r"attack.by_class = 10: must be the label of a training sample"):
        fedsim.run({**tables, **changes, "attack": {**attack, "by_class": 10}})


DRAWN = {
    "tests.components:drawn_mean": lambda *moment: numpy_generator(0, "aggregate", *moment).dirichlet(np.ones(3)),
    "tests.components:drawn_on_device": lambda *moment: Draws.of("aggregate", *moment, seed=0).uniform(
        3, dtype=torch.double
    ),
}


@pytest.mark.parametrize(
    ("rule", "sync", "engine"),
    [
        ("tests.components:drawn_mean", "gradients", "processes"),
        ("tests.components:drawn_on_device", "parameters", "serial"),
    ],
)
def test_a_linear_rule_draws_its_coefficients_again_in_each_aggregation(rule, sync, engine, tables):
    """The model's columns form several blocks that are divided among the processes."""
    tables = {**tables, "workers": 3, "model": "2nn", "local": {"steps": 1, "batch_size": 16, "lr": 0.1}}
    start, updates = updates_of({**tables, "precision": "float64", "sync": sync})
    updates = updates if sync == "parameters" else -0.1 * updates
    change = {"aggregate": rule, "precision": "float64", "sync": sync, "engine": engine}
    moment = {"parameters": lambda round: (round,), "gradients": lambda round: (round, 0)}[sync]
    drawn = [np.asarray(DRAWN[rule](*moment(round))) for round in (1, 2)]
    first = fedsim.run({**tables, **change})
    assert torch.allclose(first.global_row, start + torch.from_numpy(drawn[0]) @ updates, rtol=0, atol=1e-12)
    history = fedsim.run({**tables, **change, "rounds": 2}).history
    for record, expected in zip(history, drawn, strict=True):
        assert record["weights"] == pytest.approx(expected.tolist(), abs=1e-12)


def test_rows_of_noise_are_a_function_of_seed_and_round(tables):
    """Worker 1 has weight 0, so in each round the global row moves by the mean of two rows of noise."""
    tables = {**tables, "workers": 3, "precision": "float64", "seed": 5}
    start = fedsim.run({**tables, "local": {"lr": 0.0}}).global_row
    noise = {"attack": {"name": "gaussian", "workers": [0, 2], "std": 0.5}}
    noise["aggregate"] = {"rule": "mean", "weights": [1.0, 0.0, 1.0]}
    global_row = fedsim.run({**tables, **noise, "rounds": 2}).global_row
    rows = [Draws.of("attack", round, seed=5).normal(2, len(start), dtype=torch.double) for round in (1, 2)]
    assert torch.allclose(global_row, start + 0.5 * sum(rows).mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        ({"name": "sign_flipping"}, lambda updates: -updates.mean(0)),
        ({"name": "backdoor", "gamma": 3.0, "poisoned": 0.0001, "size": 1}, lambda updates: 3 * updates.mean(0)),
        ({"name": "free_rider"}, lambda updates: 0 * updates[0]),
        ({"name": "alie"}, lambda updates: updates.mean(0)),
        ({"name": "opt_ipm"}, lambda updates: updates.mean(0)),
        ({"name": "sign_flipping", "of": "mean"}, lambda updates: updates.mean(0)),
    ],
)
def test_attacks_of_a_cohort_without_honest_workers(attack, expected, tables):
    """Attacks on the attackers' own rows have an effect; attacks that need honest rows have none."""
    tables = {**tables, "precision": "float64"}
    start, updates = updates_of(tables)
    cohort = sample_cohort(0, 1, 7, 2).tolist()
    change = {"cohort": 2, "attack": {**attack, "workers": cohort}, "aggregate": "mean"}
    needs_honest = attack["name"] in ("alie", "opt_ipm") or attack.get("of") == "mean"
    with pytest.warns(FedsimWarning, match="round 1: no honest") if needs_honest else contextlib.nullcontext():
        global_row = fedsim.run({**tables, **change}).global_row
    assert torch.allclose(global_row, start + expected(updates[cohort]), rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:round 1. no honest")
@pytest.mark.parametrize("engine", ["serial", "processes", "batched"])
def test_an_attacker_with_more_steps_than_honest_workers_sends_its_own_gradient(engine, tables):
    """No honest worker takes part in the last steps."""
    tables = {
        **tables,
        "workers": 3,
        "partition": "tests.components:uneven",
        "precision": "float64",
        "sync": "gradients",
    }
    tables |= {"local": {"batch_size": 16, "lr": 0.05}, "aggregate": "mean", "engine": engine}
    tables |= {"processes": 1 if engine == "batched" else None}
    result = fedsim.run({**tables, "attack": {"name": "ipm", "eps": 0.5, "workers": [2]}})
    federation = Federation(logistic, components.tiny, 3, 16, "tests.components:uneven")
    epochs = [federation.epoch(1, worker) for worker in range(3)]
    assert len(epochs[2]) > max(map(len, epochs[:2]))
    for step in range(len(epochs[2])):
        taking_part = [worker for worker in range(3) if step < len(epochs[worker])]
        gradients = {worker: federation.gradient(federation.row, epochs[worker][step]) for worker in taking_part}
        honest = [gradients[worker] for worker in gradients if worker != 2]
        if honest:
            gradients[2] = -0.5 * torch.stack(honest).mean(0)
        federation.row = federation.row - 0.05 * torch.stack(list(gradients.values())).mean(0)
    assert torch.allclose(result.global_row, federation.row, rtol=0, atol=1e-12)


def test_a_rule_with_too_few_workers_with_data_is_an_error_before_the_start(tables):
    tables = {**tables, "partition": "tests.components:uneven", "aggregate": {"rule": "krum"}}
    started = []
    with pytest.raises(ExperimentError, match=r"^in round 1 only 1 .* krum: needs n >= 2f \+ 3.* local.steps"):
        fedsim.run({**tables, "sync": "gradients"}, on_start=started.append)
    assert not started
    fedsim.run({**tables, "sync": "gradients", "local": {"steps": 3}})
    fedsim.run(tables)
    # depends on the drawn cohort, so raised in its round
    with pytest.raises(ExperimentError, match=r"krum: needs n >= 2f \+ 3"):
        fedsim.run({**tables, "cohort": 4, "sync": "gradients"})


def test_a_backdoor_is_learnt_and_its_success_is_measured(tables):
    attack = {"name": "backdoor", "workers": [0, 1, 2], "size": 6, "value": 3.0, "gamma": 3.0}
    backdoored = fedsim.run({**tables, "rounds": 8, "attack": attack})
    clean = fedsim.run({**tables, "rounds": 8, "attack": {**attack, "workers": [0], "poisoned": 0.01, "gamma": 0.01}})
    assert backdoored.history[-1]["attack_success"] > 0.8
    assert clean.history[-1]["attack_success"] < 0.4
    inputs, targets = components.tiny(None)[1].gather(torch.arange(90))
    others = targets != 0
    inputs[:, :, -6:, -6:] = 3.0
    answers = backdoored.model(inputs[others]).argmax(1)
    assert float((answers == 0).double().mean()) == pytest.approx(backdoored.history[-1]["attack_success"])


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        (["nnm", {"rule": "krum", "fe": 2}], r"rule\[1\].fe = 2: unknown key \(.* krum\); allowed: rule, f"),
        (["nnm", {"rul": "krum"}], r'rule\[1\] = \{rul = "krum"\}: must be a name, or a table with the key `rule`'),
        (["nnm", "krumm"], r'rule\[1\] = "krumm": no such aggregation rule; did you mean "krum"\?'),
    ],
)
def test_an_error_in_a_list_of_stages_names_the_stage(rule, line, tables, tmp_path):
    changed = {**tables, "aggregate": {"rule": rule}}
    with pytest.raises(ExperimentError, match=f"^aggregate.{line}"):
        fedsim.Experiment(**changed)
    with pytest.raises(ExperimentError, match=f"^aggregate.{line}"):
        fedsim.load_experiment(tables, [f"aggregate.rule={show(rule)}"])
    path = tmp_path / "wrong.toml"
    path.write_text(f"[aggregate]\nrule = {show(rule)}\n")
    with pytest.raises(ExperimentError, match=f"wrong.toml: aggregate.{line}"):
        fedsim.load_experiment(path)
    with pytest.raises(ExperimentError, match=f"^{line.replace('rule', 'name', 1)}"):
        fedsim.aggregate(torch.zeros(7, 3), rule, f=1)


@pytest.mark.filterwarnings("ignore:aggregate.m = 3. does not apply to")
def test_a_list_of_stages_replaces_the_whole_table(tables):
    wanted = fedsim.Experiment(**{**tables, "aggregate": {"rule": ["bucketing", "mean"]}})
    assert fedsim.Experiment(**{**tables, "aggregate": ["bucketing", "mean"]}) == wanted
    assert fedsim.load_experiment(tables, ['aggregate=["bucketing", "mean"]']) == wanted
    krum = {**tables, "aggregate": {"rule": "multi_krum", "m": 3}}
    assert fedsim.load_experiment(krum, ['aggregate=["bucketing", "mean"]']).aggregate.rule == wanted.aggregate.rule
    with_s = fedsim.load_experiment({**tables, "aggregate": ["bucketing", "mean"]}, ["aggregate.s=3"])
    assert with_s.aggregate.rule == [{"rule": "bucketing", "s": 3}, {"rule": "mean"}]
    assert with_s == fedsim.load_experiment(tables, ["aggregate.s=3", 'aggregate=["bucketing", "mean"]'])
