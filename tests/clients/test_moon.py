"""MOON against a plain PyTorch loop, and where features come from."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedsim
from fedsim.core.randomness import sample_cohort
from fedsim.core.recorded_features import recorded_features
from fedsim.core.rows import Layout
from tests import models, plugs
from tests.textbook import Federation

WORKERS, COHORT, ROUNDS, BATCH, MU, T = 5, 3, 4, 16, 2.0, 0.5


@pytest.fixture
def tables():
    return {
        **{"rounds": ROUNDS, "workers": WORKERS, "cohort": COHORT, "engine": "serial", "precision": "float64"},
        **{"model": "tests.models:WithFeatures", "data": "tests.plugs:tiny"},
        "local": {"solver": "moon", "mu": MU, "batch_size": BATCH, "lr": 0.1, "momentum": 0.5},
    }


def reference(factory, features):
    """The global row after a run of MOON by hand; `features(model, inputs)` are those of a model."""
    federation = Federation(factory, plugs.tiny, WORKERS, BATCH)
    model, at_start, before = all_three = [federation.model, *(factory().double() for _ in range(2))]
    layout = Layout.of(model)
    previous = dict.fromkeys(range(WORKERS), federation.row)
    for round in range(1, ROUNDS + 1):
        cohort = sample_cohort(0, round, WORKERS, COHORT).tolist()
        for worker in cohort:
            layout.write(federation.row, model)
            layout.write(federation.row, at_start)
            layout.write(previous[worker], before)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
            for x, y in federation.epoch(round, worker):
                z, received, old = (features(each, x) for each in all_three)
                positive = (F.cosine_similarity(z, received.detach()) / T).exp()
                negative = (F.cosine_similarity(z, old.detach()) / T).exp()
                optimizer.zero_grad()
                (F.cross_entropy(model(x), y) - MU * (positive / (positive + negative)).log().mean()).backward()
                optimizer.step()
            previous[worker] = layout.read(model)
        federation.row = federation.average({worker: previous[worker] for worker in cohort})
    return federation.row


@pytest.mark.parametrize(
    ("model", "factory", "features"),
    [
        ("tests.models:WithFeatures", models.WithFeatures, lambda model, x: model.features(x)),
        (
            {"name": "tests.models:sized", "hidden": [8]},
            lambda: models.sized(hidden=(8,)),
            lambda model, x: model[:2](x),
        ),
    ],
)
def test_moon_is_the_plain_loop(model, factory, features, tables):
    row = fedsim.run({**tables, "model": model}).global_row
    assert torch.allclose(row, reference(factory, features), rtol=0, atol=1e-12)
    plain = fedsim.run({**tables, "model": model, "local": {**tables["local"], "mu": 0.0}}).global_row
    assert not torch.allclose(row, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize("engine", [{"engine": "serial"}, {"engine": "batched", "processes": 1}])
def test_a_model_without_features_is_an_error_in_one_line(engine, tables):
    with pytest.raises(fedsim.ExperimentError, match="has no features") as caught:
        fedsim.run({**tables, **engine, "model": "tests.models:Convolved", "rounds": 1})
    assert len(caught.value.lines) == 1


def test_features_are_those_of_a_module_of_this_name():
    model = nn.Sequential()
    model.features, model.last = nn.Conv2d(1, 2, 3), nn.Flatten()
    with recorded_features(model) as recorded:
        outputs = model(torch.zeros(4, 1, 3, 3))
    assert torch.equal(recorded.of(4), outputs)


def test_the_module_is_as_before_when_features_have_been_recorded():
    model = models.WithFeatures()
    before = dict(vars(model))
    with recorded_features(model) as recorded:
        model(torch.zeros(4, 1, 28, 28))
    assert recorded.of(4).shape == (4, 6)
    assert vars(model) == before
    with pytest.raises(fedsim.ExperimentError, match=r"must be \[5, ...\], not \(4, 6\)"):
        recorded.of(5)
