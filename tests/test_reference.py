"""The engines compute what `fedsim/reference.py` computes, in experiments that are drawn at random."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import vector_to_parameters

import fedsim
from fedsim import reference
from tests import components

DRAWS, TOLERANCE = 200, 1e-12
DATA = {"name": "tests.components:tiny", "train": 80}
CHOICES = {
    "model": [{"name": "logistic"}, {"name": "2nn", "hidden": 6}],
    "partition": ["iid", "contiguous", "tests.components:uneven", {"name": "dirichlet", "alpha": 1.0}],
    "rule": [
        *["weighted_mean"] * 8,
        *("mean", "median", "trimmed_mean", "krum", "multi_krum", "bulyan", "mda"),
        *("geometric_median", "centered_clipping", "foolsgold", "meamed", "cge", ["nnm", "trimmed_mean"]),
        ["bucketing", "median"],
    ],
    "attack": [
        *({"name": "sign_flipping"}, {"name": "sign_flipping", "of": "mean"}, {"name": "label_flipping"}),
        *({"name": "alie"}, {"name": "ipm"}, {"name": "min_max"}, {"name": "opt_ipm"}, {"name": "time_coupled"}),
        *({"name": "gaussian", "std": 0.1}, {"name": "free_rider", "what": "last"}, {"name": "mimic", "warmup": 2}),
        *[{"name": "nan"}] * 4,
    ],
    "server": [
        *({"name": "sgd"}, {"name": "sgd", "lr": 0.5}, {"name": "momentum"}, {"name": "adam"}),
        {"name": "momentum", "lr": 0.5, "beta": 0.5, "nesterov": True},
    ],
    "steps": [{"epochs": 1}, {"epochs": 3}, {"steps": 1}, {"steps": 7}],
    "momentum": [{}, {"momentum": 0.5}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}],
}


@cache
def drawn(seed):
    """Return a small experiment that depends only on `seed`, and the three numbers of the reference in each round."""
    rng = random.Random(seed)
    while True:
        chosen = {key: rng.choice(values) for key, values in CHOICES.items()}
        workers = rng.randint(1, 9)
        cohort = rng.randint((workers + 1) // 2, workers)
        weights = rng.choice([None, "uniform", "samples", [rng.random() for _ in range(workers)]])
        local = {"batch_size": rng.randint(5, 60), "lr": rng.choice([0.02, 0.1])}
        tables = {
            **{"seed": seed, "rounds": 3, "workers": workers, "cohort": cohort},
            **{"precision": "float64", "data": DATA, "records": {"curve": False}},
            **{key: chosen[key] for key in ("model", "partition", "server")},
            "local": {**local, **chosen["steps"], **chosen["momentum"]},
            "attack": {**chosen["attack"], "f": rng.randint(1, 2)} if rng.random() < 0.8 else "none",
            "aggregate": {"rule": chosen["rule"], "weights": weights, "nonfinite": "exclude"},
        }
        try:
            return tables, list(reference.run(fedsim.Experiment(**tables)))
        except (fedsim.FedsimError, ZeroDivisionError):  # not valid, or all updates of a round are excluded
            continue


def difference(tables, rounds, engine, session):
    """Return the largest difference between a run and the reference, relative to numbers above 1.

    The losses of each round show the global model of each round. Infinity: different workers are excluded.
    """
    result = fedsim.run({**tables, **engine}, session=session)
    if [record.excluded for record in result.history] != [excluded for _, _, excluded in rounds]:
        return float("inf")
    gaps = [relative_gap(result.global_row, rounds[-1][0])]
    for record, (w, train_loss, _) in zip(result.history, rounds, strict=True):
        losses = [record.train_loss, record.test_loss], [train_loss, loss_on_test_samples(result.model, w)]
        gaps.append(relative_gap(*torch.tensor(losses, dtype=torch.double)))
    return max(gaps)


def relative_gap(computed, expected):
    return ((computed - expected).abs().max() / expected.abs().max().clamp(min=1)).item()


@torch.no_grad()
def loss_on_test_samples(model, w):
    test = components.tiny(None)[1].to(torch.device("cpu"), torch.float64)
    inputs, targets = test.gather(torch.arange(len(test)))
    vector_to_parameters(w, model.parameters())
    return F.cross_entropy(model(inputs), targets).item()


ENGINES = {"serial": ({}, 16), "batched": ({}, 16), "processes": ({"processes": 2}, 4)}


@pytest.mark.filterwarnings("ignore")  # about settings without an effect
@pytest.mark.parametrize(
    ("engine", "seeds"),
    [
        pytest.param({"engine": name, **settings}, seeds, marks=marks, id=f"{name}-{seeds.start}-{seeds.stop}")
        for name, (settings, count) in ENGINES.items()
        for seeds, marks in ((range(count), ()), (range(count, DRAWS), pytest.mark.slow))
    ],
)
def test_engines_equal_the_reference_in_every_round(engine, seeds, session):
    gaps = {seed: difference(*drawn(seed), engine, session) for seed in seeds}
    assert {seed: gap for seed, gap in gaps.items() if not gap <= TOLERANCE} == {}
