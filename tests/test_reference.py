"""The engines compute what `fedsim/reference.py` computes, in experiments that are drawn at random."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import vector_to_parameters

import fedsim
from fedsim import reference
from tests import components
from tests.commands import ROOT, ended, start_ranks
from tests.engines.test_distributed import PROGRAM

DRAWS, TOLERANCE = 200, 1e-12
DATA = {"name": "tests.components:tiny", "train": 80}
CHOICES = {
    "model": [{"name": "logistic"}, {"name": "2nn", "hidden": 6}],
    "partition": ["iid", "contiguous", "tests.components:uneven", {"name": "dirichlet", "alpha": 1.0}],
    "rule": [
        *["weighted_mean"] * 8,
        *("mean", "median", "trimmed_mean", "krum", "multi_krum", "bulyan", "mda"),
        *("geometric_median", [{"rule": "centered_clipping", "tau": 0.01}], "foolsgold", "meamed"),
        *("cge", ["nnm", "trimmed_mean"]),
        ["bucketing", "median"],
    ],
    "attack": [
        *({"name": "sign_flipping"}, {"name": "sign_flipping", "of": "mean"}, {"name": "label_flipping"}),
        *({"name": "alie", "z": 1.0}, {"name": "ipm"}, {"name": "min_max"}, {"name": "opt_ipm"}),
        {"name": "time_coupled", "z": 1.0},
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


@dataclass
class Drawn:
    """Randomly drawn experiment with the results of the reference.

    Attributes:
        tables: settings of the experiment.
        w: global model after the last round.
        losses: training loss and test loss of each round. Test losses show the global model of each round.
        excluded: IDs of the excluded workers of each round.
    """

    tables: dict
    w: torch.Tensor
    losses: list
    excluded: list

    def gap(self, row, history):
        """Return the largest difference of a run, relative to numbers above 1, or infinity if `excluded` differs."""
        pairs = [(row, self.w)]
        for record, losses in zip(history, self.losses, strict=True):
            pairs.append(torch.tensor([(record["train_loss"], record["test_loss"]), losses], dtype=torch.double))
        gaps = [((a - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs]
        return max(gaps) if self.excluded == [record["excluded"] for record in history] else float("inf")


@cache
def drawn(seed):
    """Return the experiment and the results that only depend on `seed`."""
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
            experiment = fedsim.Experiment(**tables)
            models, train_losses, excluded = zip(*reference.run(experiment), strict=True)
        except (fedsim.FedsimError, ZeroDivisionError):  # not valid, or all updates of a round are excluded
            continue
        model = experiment.model.component()
        losses = [(loss, loss_on_test_samples(model, w)) for loss, w in zip(train_losses, models, strict=True)]
        return Drawn(tables, models[-1], losses, list(excluded))


@torch.no_grad()
def loss_on_test_samples(model, w):
    test = components.tiny(None)[1].to(torch.device("cpu"), torch.float64)
    inputs, targets = test.gather(torch.arange(len(test)))
    vector_to_parameters(w, model.parameters())
    return F.cross_entropy(model(inputs), targets).item()


ENGINES = {"serial": ({}, 20), "batched": ({}, 16), "processes": ({"processes": 2}, 4)}


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
    runs = ((seed, fedsim.run({**drawn(seed).tables, **engine}, session=session)) for seed in seeds)
    gaps = {seed: drawn(seed).gap(result.global_row, result.history) for seed, result in runs}
    assert {seed: gap for seed, gap in gaps.items() if not gap <= TOLERANCE} == {}


@pytest.mark.slow
def test_ranks_equal_the_reference_in_every_round(tmp_path):
    (tmp_path / "cases.json").write_text(json.dumps({str(seed): drawn(seed).tables for seed in range(DRAWS)}))
    codes, _, errors = ended(start_ranks(2, PROGRAM, tmp_path / "cases.json", tmp_path, cwd=ROOT), 1200)
    assert codes == [0, 0], errors
    results = torch.load(tmp_path / "0.pt", weights_only=False)
    gaps = {seed: drawn(seed).gap(*(results[str(seed)][key] for key in ("row", "history"))) for seed in range(DRAWS)}
    assert {seed: gap for seed, gap in gaps.items() if not gap <= TOLERANCE} == {}
