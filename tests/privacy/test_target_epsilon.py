"""`privacy.target_epsilon` finds the smallest noise, which is that of an independent search with dp-accounting."""

from __future__ import annotations

import json
import math

import pytest

import fedsim
from fedsim.cli.privacy_plan import privacy_plan
from fedsim.privacy import accounting

dp_accounting = pytest.importorskip("dp_accounting")
rdp, pld = pytest.importorskip("dp_accounting.rdp"), pytest.importorskip("dp_accounting.pld")
pytestmark = pytest.mark.usefixtures("coarse")
RELATIONS = dp_accounting.NeighboringRelation
ADD, REPLACE = RELATIONS.ADD_OR_REMOVE_ONE, RELATIONS.REPLACE_ONE

SMALL = {"model": "logistic", "workers": 20, "cohort": 10, "rounds": 3}
CENTRAL = {"mechanism": "central", "clip": 0.5}
DP_SGD = {"algorithm": "dp_sgd", "batch_size": 16}


def gaussian(noise, sums):
    return dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(noise), sums)


def poisson(noise, sums):
    event = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(noise))
    return dp_accounting.SelfComposedDpEvent(event, sums)


def uniform(noise, sums):
    event = dp_accounting.SampledWithoutReplacementDpEvent(20, 10, dp_accounting.GaussianDpEvent(noise / 2))
    return dp_accounting.SelfComposedDpEvent(event, sums)


def epsilon_of(accountant, event, sums, relation=ADD, delta=1e-5):
    """Return a function from the noise to epsilon, computed by the library alone."""

    def epsilon(noise):
        if accountant == "pld":
            library = pld.PLDAccountant(relation, value_discretization_interval=accounting.FINEST)
        else:
            library = rdp.RdpAccountant(neighboring_relation=relation)
        return library.compose(event(noise, sums)).get_epsilon(delta)

    return epsilon


def assert_smallest(noise, target, *counted):
    """Check that the noise has three digits, and is enough, and that the next smaller number of three digits is not."""
    digits = 10.0 ** (math.floor(math.log10(noise)) - 2)
    assert round(noise / digits) * digits == pytest.approx(noise, rel=1e-12)
    epsilon = epsilon_of(*counted)
    smaller = noise - digits if round(noise / digits) > 100 else noise - digits / 10
    assert epsilon(noise) <= target < epsilon(smaller)


def by_bisection(target, *counted):
    """Return the smallest noise that is enough, rounded up to three digits."""
    low, high, epsilon = 1e-3, 1e4, epsilon_of(*counted)
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if epsilon(middle) <= target else (middle, high)
    unit = 10.0 ** (math.floor(math.log10(high)) - 2)
    return math.ceil(high / unit) * unit


CASES = {  # tables of the experiment, key of the noise, and what the library counts
    "central": ({"privacy": CENTRAL, "cohort": 20}, "privacy.noise", ("rdp", gaussian, 3)),
    "poisson": ({"privacy": CENTRAL, "sampling": "poisson"}, "privacy.noise", ("rdp", poisson, 3)),
    "uniform": ({"privacy": CENTRAL}, "privacy.noise", ("rdp", uniform, 3, REPLACE)),
    "everyone": ({"privacy": {**CENTRAL, "accountant": "pld"}, "cohort": 20}, "privacy.noise", ("pld", gaussian, 3)),
    "adaptive": (
        {"privacy": {"mechanism": "adaptive", "clip": 0.5, "count_noise": 9.0}, "cohort": 20},
        "privacy.noise",
        ("rdp", gaussian, 3),
    ),
    "local": (
        {"privacy": {"mechanism": "local", "clip": 0.5}},
        "privacy.noise",
        ("rdp", lambda noise, sums: gaussian(noise / 2, sums), 3),
    ),
    "dp_sgd": ({"local": {**DP_SGD, "epochs": 2}}, "local.noise", ("rdp", gaussian, 6)),
    "steps": ({"local": {**DP_SGD, "steps": 2}}, "local.noise", ("rdp", gaussian, 6)),
}


def tables_of(tiny_experiment, case, target=4.0):
    tables = {**tiny_experiment, **SMALL, **CASES[case][0]}
    return {**tables, "privacy": {**tables.get("privacy", {}), "target_epsilon": target}}


def with_noise(tables, key, noise):
    """Return the tables with a noise multiplier in place of the target."""
    table, _, name = key.partition(".")
    tables = {**tables, "privacy": {k: v for k, v in tables["privacy"].items() if k != "target_epsilon"}}
    return {**tables, table: {**tables[table], name: noise}}


def found_noise(folder, key):
    return json.loads((folder / "environment.json").read_text())[key]


SLOW = "poisson", "uniform"


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES])
def test_the_noise_is_the_smallest_of_three_digits_that_is_enough(case, tiny_experiment, tmp_path):
    _, key, counted = CASES[case]
    tables = tables_of(tiny_experiment, case)
    result = fedsim.run(tables, tmp_path / "run")
    noise = found_noise(tmp_path / "run", key)
    assert_smallest(noise, 4.0, *counted)
    same = fedsim.run(with_noise(tables, key, noise))
    assert (result.global_row == same.global_row).all()
    epsilons = [record.metrics["epsilon"] for record in result.history]
    assert epsilons == [record.metrics["epsilon"] for record in same.history]
    assert 0 < epsilons[0] < epsilons[1] < epsilons[2] <= 4.0
    assert (
        dict(privacy_plan(fedsim.Experiment(**tables)))[f"noise ({counted[0]})"] == f"{key}={noise:.4g} for epsilon = 4"
    )


@pytest.mark.parametrize("engine", ["serial", "processes", "batched"])
def test_overlapping_shards_are_counted_when_the_data_is_known(engine, tiny_experiment, tmp_path):
    tables = {**tables_of(tiny_experiment, "steps"), "partition": {"name": "virtual", "samples": 40}, "engine": engine}
    tables["processes"] = 1 if engine == "batched" else None
    result = fedsim.run(tables, tmp_path / "run")
    noise, shards = found_noise(tmp_path / "run", "local.noise"), fedsim.partition
    targets = fedsim.load_dataset("tests.components:tiny")[0].targets
    held = [sample for shard in shards(targets, "virtual", 20, samples=40) for sample in shard.tolist()]
    holders = min(max(held.count(sample) for sample in set(held)), 10)
    assert holders > 1
    assert noise == pytest.approx(by_bisection(4.0, "rdp", gaussian, 6 * holders), rel=1e-9)
    assert (result.global_row == fedsim.run(with_noise(tables, "local.noise", noise)).global_row).all()


@pytest.mark.parametrize("every", [1, 0])  # without checkpoints, the run starts again
@pytest.mark.parametrize("case", ["local", "dp_sgd"])
def test_a_resumed_run_keeps_its_noise_and_tells_that_more_rounds_cost_more(case, every, tiny_experiment, tmp_path):
    key = CASES[case][1]
    tables = {**tables_of(tiny_experiment, case), "checkpoint": {"every": every}}
    whole = fedsim.run(tables, tmp_path / "whole")
    noise = found_noise(tmp_path / "whole", key)

    def stop(record):
        if record.round == 2:
            raise fedsim.StopRun

    part = fedsim.run(tables, tmp_path / "run", on_round=stop)
    assert part.history[-1].metrics["epsilon"] == whole.history[1].metrics["epsilon"] < 4.0
    assert (fedsim.run(tables, tmp_path / "run", resume=True).global_row == whole.global_row).all()
    with pytest.warns(fedsim.errors.FedsimWarning, match="planned_rounds stays 3 .*; epsilon will exceed"):
        longer = fedsim.run(tables, tmp_path / "run", resume=True, rounds=4)
    assert found_noise(tmp_path / "run", key) == noise
    plain = fedsim.run(with_noise(tables, key, noise), rounds=4)
    assert (longer.global_row == plain.global_row).all()
    assert longer.history[-1].metrics["epsilon"] == plain.history[-1].metrics["epsilon"] > 4.0
    if every:
        with pytest.raises(fedsim.ExperimentError, match="another experiment: planned_rounds: 3 there, 4 here$"):
            fedsim.run(tables, tmp_path / "run", resume=True, rounds=4, planned_rounds=4)
    again = fedsim.run(tables, tmp_path / "run", resume=True, rounds=4)
    assert again.history[-1].metrics == longer.history[-1].metrics


def test_a_target_out_of_reach_is_one_line(tiny_experiment, monkeypatch):
    privacy = {"mechanism": "adaptive", "clip": 1.0, "count_noise": 0.1, "target_epsilon": 3.0}
    with pytest.raises(fedsim.ExperimentError, match=r"privacy.noise = .*: must be less than 0.2") as caught:
        fedsim.run({**tiny_experiment, **SMALL, "cohort": 20, "privacy": privacy})
    assert len(caught.value.lines) == 1
    monkeypatch.setattr("fedsim.privacy.accounting.MOST_NOISE", 2.0)
    with pytest.raises(
        fedsim.ExperimentError, match=r"^privacy.target_epsilon = 0.1: no noise is enough; use a larger"
    ):
        fedsim.run(tables_of(tiny_experiment, "local", 0.1))


def test_a_change_from_noise_to_a_target_and_back(tiny_experiment):
    private = fedsim.Experiment(**{**tiny_experiment, "local": DP_SGD})
    assert private.local.params["noise"] == 1.0
    target = fedsim.load_experiment(private, ["privacy.target_epsilon=3"])
    assert target.resolved()["local"].keys().isdisjoint({"noise"})
    assert fedsim.Experiment(**target.resolved()) == target
    central = {**CENTRAL, "noise": 1.0}
    target = fedsim.load_experiment({**tiny_experiment, "privacy": central}, ["privacy.target_epsilon=3"])
    assert "noise" not in target.resolved()["privacy"]
    assert fedsim.load_experiment(target, ["privacy.noise=2.0"]).privacy.target_epsilon is None


def test_a_comparison_varies_the_target(tiny_experiment, tmp_path, monkeypatch):
    monkeypatch.setattr("fedsim.cli.privacy_plan.ACCOUNTANTS", ["rdp"])
    tables, targets = tables_of(tiny_experiment, "local"), [2.0, 8.0]
    compared = fedsim.compare(tables, {"privacy.target_epsilon": targets}, out=tmp_path / "compared", progress=False)
    noises = [found_noise(run.folder, "privacy.noise") for run in compared.runs]
    plan = [dict(privacy_plan(fedsim.Experiment(**tables), target)) for target in targets]
    assert [f"privacy.noise={noise:.4g} for epsilon = {t:g}" for noise, t in zip(noises, targets, strict=True)] == [
        each["noise (rdp)"] for each in plan
    ]


def test_the_command_line_shows_the_noise(cli):
    words = ["model=logistic", "rounds=1", "privacy.mechanism=local", "privacy.clip=1.0", "privacy.target_epsilon=3"]
    dry = cli("run", *words, "--dry-run")
    assert dry.exit_code == 0
    key, noise = dry.stdout.splitlines()[-1].removeprefix("# ").removesuffix(" for privacy.target_epsilon").split(" = ")
    done = cli("run", *words, "--out", "run")
    assert f"{key} = {noise} for privacy.target_epsilon = 3" in done.output.splitlines()
    assert key == "privacy.noise"
