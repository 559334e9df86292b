"""Chains in both directions: what the server broadcasts, and which updates of attackers are processed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fedsim
from fedsim.config.validation import settings_without_effect
from fedsim.core.randomness import sample_cohort
from fedsim.models import logistic
from fedsim.processing import apply_chain, processor
from tests import components
from tests.textbook import Federation

D = 7850  # number of parameters of the model "logistic"
TABLES = {
    **{"rounds": 5, "workers": 6, "cohort": 3, "model": "logistic", "data": "tests.components:tiny"},
    **{"local": {"batch_size": 16, "lr": 0.1, "steps": 1}, "engine": "serial", "precision": "float64"},
    "aggregate": "mean",
}
TOP = {"name": "top_k", "k": 200}
TOP_BYTES = 200 * 8 + 325  # with 13 bits for an index
SEEN: dict[str, Tensor] = {}


def seen_by_rule(updates: Tensor) -> Tensor:
    """A rule that keeps what it sees."""
    SEEN["rule"] = updates.clone()
    return updates.mean(0)


def seen_by_attack(honest: Tensor, own_updates: Tensor) -> Tensor:
    """An attack that keeps what it sees."""
    SEEN["attack"] = honest.clone()
    return 5 - own_updates


def test_workers_start_from_a_copy_to_which_the_server_sends_compressed_differences():
    """Compare with a plain PyTorch loop (EF21-P)."""
    result = fedsim.run({**TABLES, "downlink": [TOP]})
    federation = Federation(logistic, components.tiny, 6, 16)
    copy = federation.row.clone()
    for round in range(1, 6):
        copy = copy + fedsim.compress(federation.row - copy, "top_k", k=200)[0]
        cohort = sample_cohort(0, round, 6, 3).tolist()
        gradients = [federation.gradient(copy, federation.epoch(round, worker)[0]) for worker in cohort]
        federation.row = federation.row - 0.1 * torch.stack(gradients).mean(0)
    assert torch.allclose(result.global_row, federation.row, rtol=0, atol=1e-12)
    assert {record.bytes_down for record in result.history} == {6 * TOP_BYTES}  # all workers keep their copies
    assert {record.bytes_up for record in result.history} == {3 * D * 8}


@pytest.mark.parametrize("name", ["top_k", "sign", "natural", "qsgd"])
def test_the_copy_converges_to_a_model_that_stays(name):
    params = {"levels": 64} if name == "qsgd" else {}
    chain = [processor.bind(processor.get(name), params)]
    model, copy = torch.randn(300, generator=torch.Generator().manual_seed(0)), torch.zeros(300)
    for round in range(700):
        difference = model - copy
        apply_chain(chain, difference, (round,), {}, seed=0, purpose="broadcast")
        copy += difference
    assert (model - copy).norm() < 1e-3 * model.norm()


def test_a_broadcast_leaves_out_personal_parameters():
    local = {**TABLES["local"], "algorithm": "fedper", "personal": ["*bias"]}
    chain = ["natural"]
    result = fedsim.run({**TABLES, "local": local, "processors": chain, "downlink": chain})
    nbytes = -(-(D - 10) * 12 // 8)
    assert {(record.bytes_up, record.bytes_down) for record in result.history} == {(3 * nbytes, 6 * nbytes)}


def test_a_compressed_broadcast_takes_less_virtual_time():
    timed = {**TABLES, "mode": "clock", "clock": {"bandwidth": 1000.0}}
    plain, small = (fedsim.run({**timed, **changes}).history[0] for changes in ({}, {"downlink": [TOP]}))
    assert plain.virtual_seconds - small.virtual_seconds == pytest.approx((8 * D - TOP_BYTES) / 1000)


ATTACKED = {"cohort": 6, "attack": {"name": f"{__name__}:seen_by_attack", "workers": [1, 4]}}


@pytest.mark.parametrize("sync", ["parameters", "gradients"])
def test_attackers_see_processed_updates_and_send_theirs_unprocessed(sync):
    tables = {**TABLES, **ATTACKED, "sync": sync, "processors": [TOP], "rounds": 1}
    result = fedsim.run({**tables, "aggregate": f"{__name__}:seen_by_rule"})
    counts = SEEN["rule"].count_nonzero(1).tolist()
    assert [counts[worker] for worker in (0, 2, 3, 5)] == [200] * 4
    assert min(counts[1], counts[4]) > 200
    assert torch.equal(SEEN["attack"], SEEN["rule"][[0, 2, 3, 5]])
    assert result.history[0].bytes_up == 4 * TOP_BYTES + 2 * 8 * D


def test_attackers_send_no_personal_parameters():
    local = {**TABLES["local"], "algorithm": "fedper", "personal": ["*bias"]}
    tables = {**TABLES, **ATTACKED, "local": local, "processors": [TOP], "rounds": 1}
    result = fedsim.run({**tables, "aggregate": f"{__name__}:seen_by_rule"})
    assert SEEN["rule"][1].count_nonzero() == D - 10
    assert not SEEN["rule"][:, D - 10 :].any()
    assert result.history[0].bytes_up == 4 * TOP_BYTES + 2 * 8 * (D - 10)


@pytest.mark.parametrize("sync", ["parameters", "gradients"])
def test_compressed_attacks_pass_through_the_chain(sync):
    tables = {**TABLES, **ATTACKED, "sync": sync, "processors": [TOP], "rounds": 1}
    tables["attack"] = {**tables["attack"], "before_processors": True}
    result = fedsim.run({**tables, "aggregate": f"{__name__}:seen_by_rule"})
    assert SEEN["rule"].count_nonzero(1).tolist() == [200] * 6
    assert SEEN["attack"].count_nonzero(1).min() > 200
    assert result.history[0].bytes_up == 6 * TOP_BYTES


@pytest.mark.parametrize("name", ["none", "label_flipping"])
def test_attackers_that_only_change_data_follow_the_chain(name):
    tables = {**TABLES, "cohort": 6, "attack": {"name": name, "workers": [1, 4]}, "processors": [TOP], "rounds": 1}
    assert fedsim.run(tables).history[0].bytes_up == 6 * TOP_BYTES


def test_without_processors_the_setting_has_no_effect():
    experiment = fedsim.Experiment(**{**TABLES, "attack": {"name": "ipm", "workers": [1], "before_processors": True}})
    assert list(settings_without_effect(experiment)) == [
        "attack.before_processors has no effect with processors unset; omit it"
    ]
