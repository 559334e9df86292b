"""Groups of workers agree with Hier-FAVG in float64, written from Algorithm 1 of Liu et al. 2020."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from fedsim.core.randomness import sample_cohort
from tests import components, models
from tests.textbook import Federation, finished

WORKERS, ROUNDS, BATCH, LR = 7, 6, 16, 0.1
GROUPS = [1, 0, 2, 1, 1, 0, 1]
TABLES = {
    **{"workers": WORKERS, "rounds": ROUNDS, "model": {"name": "tests.models:sized", "hidden": [6]}},
    **{"data": "tests.components:tiny", "partition": "tests.components:uneven", "precision": "float64"},
    **{"local": {"batch_size": BATCH, "steps": 2, "lr": LR}, "groups": GROUPS},
}


def weighted(updates, weights):
    return sum(weight * update for update, weight in zip(updates, weights, strict=True)) / sum(weights)


def median(updates, weights):
    rows = torch.stack(updates).sort(0).values
    return (rows[(len(rows) - 1) // 2] + rows[len(rows) // 2]) / 2


def uniform(updates, weights):
    return sum(updates) / len(updates)


def hier_favg(every, cohort=WORKERS, edge=weighted, top=weighted, attackers=(), false_groups=()):
    """Return (global row, rows of the groups) at the end. Attackers and false groups flip the sign of their updates."""
    fed = Federation(partial(models.sized, hidden=(6,)), components.tiny, WORKERS, BATCH, "tests.components:uneven")
    cloud, edges, counted = fed.row, [fed.row] * 3, [0] * 3
    for round in range(1, ROUNDS + 1):
        drawn = range(WORKERS) if cohort == WORKERS else sample_cohort(0, round, WORKERS, cohort).tolist()
        for group in range(3):
            updates, sizes = [], []
            for worker in drawn:
                if GROUPS[worker] != group:
                    continue
                row = edges[group]
                for batch in itertools.islice(fed.batches(round, worker), 2):
                    row = row - LR * fed.gradient(row, batch)
                updates.append((-1 if worker in attackers else 1) * (row - edges[group]))
                sizes.append(len(fed.shards[worker]))
            if updates:
                edges[group] = edges[group] + edge(updates, sizes)
                counted[group] += sum(sizes)
        if round % every == 0:
            present = [group for group in range(3) if counted[group]]
            updates = [(-1 if g in false_groups else 1) * (edges[g] - cloud) for g in present]
            cloud = cloud + top(updates, [counted[group] for group in present])
            edges, counted = [cloud] * 3, [0] * 3
    return cloud


CASES = {
    **{f"every {every}": ({"group_rounds": every}, {"every": every}) for every in (1, 2, 3)},
    "cohorts that miss groups": ({"group_rounds": 2, "cohort": 2}, {"every": 2, "cohort": 2}),
    "a robust rule in the groups": ({"group_rounds": 3, "aggregate": "median"}, {"every": 3, "edge": median}),
    "a robust rule at the top": (
        {"group_rounds": 2, "top_aggregate": "median", "aggregate": "mean"},
        {"every": 2, "top": median, "edge": uniform},
    ),
    "an attack on each level": (
        {
            **{"group_rounds": 2, "attack": {"name": "sign_flipping", "workers": [3, 5]}},
            **{"top_attack": {"name": "sign_flipping", "workers": [2]}},
        },
        {"every": 2, "attackers": (3, 5), "false_groups": (2,)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_groups_are_hier_favg(name):
    tables, arguments = CASES[name]
    row = finished({**TABLES, "engine": "serial", **tables}).row
    reference = hier_favg(**arguments)
    assert torch.allclose(row, reference, rtol=0, atol=1e-12)
    assert not torch.allclose(row, hier_favg(every=6), rtol=0, atol=1e-6)
