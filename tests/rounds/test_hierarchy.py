"""Groups of workers agree with Hier-FAVG in float64, written from Algorithm 1 of Liu et al. 2020."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import torch

import fedsim
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


def hier_favg(every, cohort=WORKERS, edge=weighted, top=weighted, attackers=(), false_groups=(), excluded=()):
    """Return the global row at the end. Byzantine workers and groups send updates times -1."""
    fed = Federation(partial(models.sized, hidden=(6,)), components.tiny, WORKERS, BATCH, "tests.components:uneven")
    cloud, edges, counted = fed.row, [fed.row] * 3, [0] * 3
    for round in range(1, ROUNDS + 1):
        drawn = range(WORKERS) if cohort == WORKERS else sample_cohort(0, round, WORKERS, cohort).tolist()
        for group in range(3):
            updates, sizes = [], []
            for worker in drawn:
                if GROUPS[worker] != group or worker in excluded:
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
    "a pre-aggregator at the top": (
        {"group_rounds": 2, "top_aggregate": "nnm+mean", "aggregate": "mean"},
        {"every": 2, "top": uniform, "edge": uniform},
    ),
    "an excluded update": (
        {"group_rounds": 2, "attack": {"name": "nan", "workers": [3]}, "aggregate": {"nonfinite": "exclude"}},
        {"every": 2, "excluded": (3,)},
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


FLAT = {key: value for key, value in TABLES.items() if key != "groups"} | {"engine": "serial", "cohort": 4}
MOMENTUM = {"server": {"name": "momentum", "lr": 0.5}, "processors": "qsgd", "sampling": {"dropout_rate": 0.2}}
DRAWS = {"aggregate": {"rule": "dnc", "b": 50, "f": 1}, "attack": {"name": "gaussian", "workers": [1]}}


@pytest.mark.parametrize("tables", [{}, MOMENTUM, {**DRAWS, "top_aggregate": {"rule": "mean"}, "cohort": WORKERS}])
def test_one_group_is_fedavg(tables):
    flat, grouped = (finished({**FLAT, **tables, **more}) for more in ({}, {"groups": 1}))
    assert torch.allclose(flat.row, grouped.row, rtol=0, atol=1e-13)
    assert [record.bytes_up for record in flat.records] == [record.bytes_up for record in grouped.records]


@pytest.mark.parametrize("tables", [{}, MOMENTUM])
def test_weighted_means_of_groups_in_every_round_are_fedavg(tables):
    flat, grouped = (finished({**FLAT, **tables, **more}) for more in ({}, {"groups": GROUPS}))
    assert torch.allclose(flat.row, grouped.row, rtol=0, atol=1e-13)


def test_groups_in_every_round_average_buffers_as_fedavg_does():
    tables = {**FLAT, "model": "tests.models:Normalised", "rounds": 2}
    flat, grouped = (fedsim.run({**tables, **more}) for more in ({}, {"groups": GROUPS}))
    for name, value in flat.model.state_dict().items():
        assert torch.allclose(value, grouped.model.state_dict()[name], rtol=0, atol=1e-12), name


def test_the_global_model_is_tested_and_changes_only_at_the_top():
    history = fedsim.run({**FLAT, "groups": 3, "group_rounds": 3}).history
    losses = [record.test_loss for record in history]
    assert losses[0] == losses[1] != losses[2] == losses[3] == losses[4] != losses[5]


def test_bytes_are_counted_for_each_level():
    tables = {**FLAT, "cohort": 2, "group_rounds": 2, "groups": GROUPS, "processors": "sign"}
    result = fedsim.run(tables)
    nbytes, history = 8 * len(result.global_row), result.history
    pairs = zip(history[::2], history[1::2], strict=True)
    changed = [{GROUPS[worker] for worker in [*a.cohort, *b.cohort]} for a, b in pairs]
    assert min(map(len, changed)) < 3
    expected = [count * nbytes for groups in changed for count in (3, len(groups))]  # all groups receive
    assert [record.top_bytes for record in history] == expected
    assert all(record.bytes_down == 2 * nbytes for record in history)
    assert all(record.bytes_up < nbytes / 10 for record in history)


def test_coefficients_are_those_within_the_groups():
    record = fedsim.run({**FLAT, "cohort": WORKERS, "groups": GROUPS, "aggregate": "mean"}).history[0]
    assert record.weights == pytest.approx([1 / GROUPS.count(group) for group in GROUPS])


def test_a_run_is_resumed_between_two_aggregations_at_the_top(tmp_path):
    tables = {**FLAT, "groups": GROUPS, "group_rounds": 3, "checkpoint": {"every": 1}}
    tables["records"] = {"figures": []}
    tables |= {"model": "tests.models:Normalised"}
    tables |= {"aggregate": {"rule": "centered_clipping", "tau": 0.1}, "server": {"name": "bmuf", "nesterov": True}}
    tables |= {"attack": {"name": "mimic", "workers": [3], "warmup": 1}}
    whole = fedsim.run(tables)

    def interrupt(record):
        if record.round == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedsim.run(tables, out=tmp_path / "run", on_round=interrupt)
    resumed = fedsim.run(tables, out=tmp_path / "run", resume=True)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_groups_come_from_a_number_a_list_or_a_function():
    for groups in (2, [0, 0, 0, 0, 1, 1, 1], halves, "tests.rounds.test_hierarchy:halves"):
        assert fedsim.Experiment(workers=7, groups=groups).grouping.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert fedsim.Experiment(groups=10).workers == 40
    assert fedsim.Experiment(groups=[0, 1, 1]).workers == 3


def halves(workers):
    return np.arange(workers) * 2 // workers


def drawn(workers):
    return np.random.default_rng().permutation(workers)


def test_a_group_whose_rule_has_too_few_updates_is_named():
    tables = {**FLAT, "groups": 2, "cohort": 4, "aggregate": {"rule": "trimmed_mean", "f": 1}}
    with pytest.raises(fedsim.ExperimentError, match=r"^round 1, group 1: the cohort has 1 workers; aggregate.rule"):
        fedsim.run(tables)


def test_the_true_number_of_attackers_is_that_in_each_group():
    experiment = fedsim.Experiment(**FLAT, groups=GROUPS, attack={"name": "ipm", "workers": [0, 3, 5]})
    assert experiment.f_of_groups(experiment.byzantine) == [1, 2, 0]
    resampled = fedsim.Experiment(**FLAT, groups=GROUPS, attack={"name": "ipm", "f": 3, "resample": True})
    assert resampled.f_of_groups(resampled.byzantine) == [2, 3, 1]
