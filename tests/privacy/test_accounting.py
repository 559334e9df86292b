"""Epsilon: published examples, the library used directly, what runs record, and the command `fedsim privacy`."""

from __future__ import annotations

import math
import sys

import pytest

import fedsim
from fedsim.cli.privacy_plan import privacy_plan
from fedsim.privacy import ACCOUNTANTS, Releases, UnsupportedSamplingError

dp_accounting = pytest.importorskip("dp_accounting")
rdp, pld = pytest.importorskip("dp_accounting.rdp"), pytest.importorskip("dp_accounting.pld")
ADD, REPLACE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, dp_accounting.NeighboringRelation.REPLACE_ONE

LOCAL = {"mechanism": "local", "clip": 1.0, "noise": 1.0}
SMALL = {"model": "logistic", "local": {"steps": 1, "batch_size": 16}, "workers": 20, "cohort": 5, "rounds": 2}


def gaussian_delta(epsilon, noise):
    """Return the delta of the Gaussian mechanism with sensitivity 1 (Balle and Wang 2018, theorem 8)."""
    return (
        math.erfc((epsilon * noise - 1 / (2 * noise)) / math.sqrt(2)) / 2
        - math.exp(epsilon) * math.erfc((epsilon * noise + 1 / (2 * noise)) / math.sqrt(2)) / 2
    )


@pytest.mark.parametrize(
    ("n", "batch", "noise", "epochs", "delta", "published"),
    [  # of test_compute_dp_sgd_privacy in TensorFlow Privacy 0.9, compute_dp_sgd_privacy_test.py
        (60_000, 150, 1.3, 15, 1e-5, 0.7242234026109595),
        (100_000, 100, 1.0, 30, 1e-7, 1.4154988495444845),
    ],
)
def test_published_examples_of_dp_sgd(n, batch, noise, epochs, delta, published):
    releases = Releases(noise=noise, workers=n, cohort=batch, sampling="poisson")
    epsilon = releases.epsilon(epochs * n // batch, delta)
    assert epsilon == pytest.approx(published, rel=1e-3)  # the library now tries more orders
    assert epsilon <= published * (1 + 1e-9)
    assert releases.epsilon(epochs * n // batch, delta, "pld") < epsilon


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("sampling", [None, "poisson"])
def test_epsilon_is_that_of_the_library(accountant, sampling):
    event = dp_accounting.GaussianDpEvent(2.0)
    event = dp_accounting.PoissonSampledDpEvent(0.05, event) if sampling else event
    library = {"rdp": rdp.RdpAccountant, "pld": pld.PLDAccountant}[accountant](neighboring_relation=ADD)
    expected = library.compose(event, 30).get_epsilon(1e-6)
    releases = Releases(noise=2.0, workers=1000, cohort=50, sampling=sampling)
    assert releases.epsilon(30, 1e-6, accountant) == pytest.approx(expected, rel=1e-9)


def test_a_fixed_cohort_is_counted_with_the_sensitivity_of_a_replaced_worker():
    sampled = dp_accounting.SampledWithoutReplacementDpEvent
    event = sampled(1000, 50, dp_accounting.GaussianDpEvent(2.0 / 2))  # the sum changes by up to 2 C
    expected = rdp.RdpAccountant(neighboring_relation=REPLACE).compose(event, 30).get_epsilon(1e-6)
    releases = Releases(noise=2.0, workers=1000, cohort=50, sampling="without_replacement")
    assert releases.epsilon(30, 1e-6) == pytest.approx(expected, rel=1e-9)
    with pytest.raises(UnsupportedSamplingError, match=r"privacy.accountant=rdp, or sampling.name=poisson"):
        releases.epsilon(30, 1e-6, "pld")
    # The library takes the noise as a ratio to the sensitivity: all workers cost what a sum without sampling costs.
    everyone = rdp.RdpAccountant(neighboring_relation=REPLACE).compose(
        sampled(50, 50, dp_accounting.GaussianDpEvent(1.0))
    )
    assert everyone.get_epsilon(1e-6) == pytest.approx(Releases(1.0, 50, 50).epsilon(1, 1e-6), rel=1e-6)


@pytest.mark.parametrize("noise", [0.8, 2.0, 10.0])
def test_pld_of_one_sum_is_the_gaussian_mechanism(noise):
    epsilon = Releases(noise, 10, 10).epsilon(1, 1e-5, "pld")
    assert gaussian_delta(epsilon, noise) == pytest.approx(1e-5, rel=1e-2)
    replaced = Releases(2 * noise, 10, 10, by_replacement=True).epsilon(1, 1e-5, "pld")
    assert replaced == pytest.approx(epsilon, rel=1e-6)
    assert Releases(noise, 10, 10).epsilon(4, 1e-5, "pld") == pytest.approx(
        Releases(noise / 2, 1, 1).epsilon(1, 1e-5, "pld"), rel=1e-3
    )


def test_limits():
    releases = Releases(noise=1.0, workers=100, cohort=10, sampling="poisson")
    assert Releases(noise=0.0, workers=100, cohort=10).epsilon(1, 1e-5) == math.inf
    assert releases.epsilon(0, 1e-5) == 0
    assert releases.epsilon(2, 1e-5) > releases.epsilon(1, 1e-5) > 0
    assert Releases(0.05, 100, 10).epsilon(100, 1e-5, "pld") > 1000  # coarser steps of the privacy loss, so not slow


@pytest.mark.parametrize(("accountant", "sampling"), [("rdp", "poisson"), ("pld", None)])
def test_the_noise_for_an_epsilon_has_this_epsilon(accountant, sampling, coarse):
    releases = Releases(noise=1.0, workers=1000, cohort=50, sampling=sampling)
    noise = releases.noise_for(2.0, 30, 1e-5, accountant)
    spent = Releases(noise, 1000, 50, sampling).epsilon(30, 1e-5, accountant)
    assert spent <= 2.0
    assert spent == pytest.approx(2.0, rel=2e-2)  # of the noise that is rounded up to three digits


@pytest.mark.parametrize(
    ("tables", "releases", "relation"),
    [
        ({"sampling": "poisson"}, Releases(1.0, 20, 5, "poisson"), "ADD_OR_REMOVE_ONE"),
        ({}, Releases(1.0, 20, 5, "without_replacement"), "REPLACE_ONE"),
        ({"cohort": 20}, Releases(1.0, 20, 20), "REPLACE_SPECIAL"),
        ({"sampling": "round_robin"}, Releases(1.0, 20, 5), "REPLACE_SPECIAL"),  # others come if a worker leaves
        ({"privacy": LOCAL}, Releases(1.0, 20, 5, by_replacement=True), "REPLACE_ONE"),
    ],
)
def test_records_count_the_sampling_of_the_run(tables, releases, relation, tiny_experiment):
    assert releases.relation == relation
    privacy = {"mechanism": "central", "clip": 1.0, "noise": 1.0, "delta": 1e-3}
    privacy = {**tables.get("privacy", privacy), "delta": 1e-3}
    history = fedsim.run({**tiny_experiment, **SMALL, **tables, "privacy": privacy}).history
    assert [record.metrics["epsilon"] for record in history] == [releases.epsilon(n, 1e-3) for n in (1, 2)]


def test_without_noise_no_epsilon_is_recorded(tiny_experiment):
    privacy = {"mechanism": "central", "clip": 1.0, "noise": 0.0}
    assert "epsilon" not in fedsim.run({**tiny_experiment, **SMALL, "privacy": privacy}).history[-1].metrics


def test_an_unsupported_accountant_is_refused_before_the_first_round(tiny_experiment):
    privacy = {"mechanism": "central", "clip": 1.0, "noise": 1.0, "accountant": "pld"}
    with pytest.raises(fedsim.ExperimentError, match=r"^privacy.accountant"):
        fedsim.run({**tiny_experiment, **SMALL, "privacy": privacy})


def test_a_missing_library_is_named(tiny_experiment, monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    privacy = {"mechanism": "central", "clip": 1.0, "noise": 0.123}
    with pytest.raises(ImportError, match="pip install dp-accounting$"):
        fedsim.run({**tiny_experiment, **SMALL, "privacy": privacy})


def test_the_plan_is_what_the_run_records(tiny_experiment, coarse):
    tables = {**tiny_experiment, **SMALL, "sampling": "poisson"}
    tables["privacy"] = {"mechanism": "adaptive", "clip": 1.0, "noise": 0.4}
    experiment = fedsim.Experiment(**tables)
    plan = dict(privacy_plan(experiment))
    assert plan["epsilon (rdp)"] == f"{fedsim.run(experiment).history[-1].metrics['epsilon']:.3g}"
    plan = dict(privacy_plan(fedsim.Experiment(**{**tables, "cohort": 20}), target=5.0))
    assert plan["noise (rdp)"].startswith("privacy.noise=")


def test_the_command_prints_the_plan(cli, coarse):
    done = cli("privacy", "local.algorithm=dp_sgd", "local.noise=3.0", "rounds=3", "--target-epsilon", "4")
    assert done.exit_code == 0
    assert "epsilon (rdp)" in done.output
    assert "local.noise=" in done.output
    assert cli("privacy").exit_code == 2
    assert cli("privacy", "privacy.mechanism=central", "--target-epsilon", "0").exit_code == 2


@pytest.mark.parametrize(
    "tables",
    [
        {"aggregate": {"rule": "median"}},
        {"aggregate": {"rule": "qfedavg"}},
        {"aggregate": {"nonfinite": "exclude"}},
        {"attack": {"name": "alie", "fraction": 0.3}},
        {"attack": {"name": "sign_flipping", "of": "mean", "fraction": 0.3}},
        {"processors": [{"name": "top_k", "k": 10}]},
        {
            "processors": [{"name": "clip", "max_norm": 1.0}],
            "privacy": {"mechanism": "central", "clip": 1.0, "noise": 1.0},
        },
        {"sampling": {"name": "power_of_choice", "candidates": 10}, "cohort": 5},
        {"records": {"updates": [1]}},
        {"mode": "clock", "policy": "fedbuff"},
    ],
)
def test_secure_aggregation_refuses_what_needs_single_updates(tables):
    aggregate = {**tables.get("aggregate", {}), "secure": True}
    with pytest.raises(fedsim.ExperimentError, match=r"^aggregate.secure = true: ") as caught:
        fedsim.Experiment(**{"workers": 10, **tables, "aggregate": aggregate})
    assert len(caught.value.lines) == 1
    fedsim.Experiment(**{"workers": 10, **tables})


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"aggregate": "mean", "attack": {"name": "sign_flipping", "fraction": 0.3}},
        {"privacy": {"mechanism": "central", "clip": 0.1, "noise": 1.0}},
        {"processors": [{"name": "clip", "max_norm": 1.0}], "local": {"algorithm": "scaffold"}},
        {"sync": "gradients"},
    ],
)
def test_secure_aggregation_allows_sums_and_changes_no_result(tables, tiny_experiment):
    tables = {**tiny_experiment, **SMALL, "cohort": 20, **tables}
    aggregate = {"rule": tables["aggregate"]} if "aggregate" in tables else {}
    secure, plain = (fedsim.run({**tables, "aggregate": {**aggregate, "secure": secure}}) for secure in (True, False))
    assert (secure.global_row == plain.global_row).all()


def test_under_secure_aggregation_the_server_does_not_clip_what_attackers_send(tiny_experiment):
    attack = {"name": "sign_flipping", "fraction": 0.3, "scale": 100.0}
    tables = {
        **tiny_experiment,
        **SMALL,
        "attack": attack,
        "privacy": {"mechanism": "central", "clip": 0.01, "noise": 0.0},
    }
    secure, plain = (fedsim.run({**tables, "aggregate": {"rule": "mean", "secure": key}}) for key in (True, False))
    assert secure.global_row.norm() > 2 * plain.global_row.norm()
