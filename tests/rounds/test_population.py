"""Populations of a million workers: cost and memory depend on the cohort, not on the population."""

from __future__ import annotations

import pickle
import tracemalloc

import pytest
import torch

import fedsim
from fedsim import reference
from fedsim.data.partitions import DrawnShards, partition_shards
from fedsim.rounds import participants
from fedsim.runs.setup import task_of

MILLION = {"workers": 10**6, "cohort": 4, "rounds": 3, "partition": {"name": "virtual", "samples": 30}}


def test_a_run_on_virtual_shards_equals_the_reference(tiny_experiment):
    skewed = {"name": "virtual", "samples": 30, "alpha": 0.5}
    tables = {**tiny_experiment, **MILLION, "partition": skewed, "precision": "float64"}
    *_, (w, _, _) = reference.run(fedsim.Experiment(**tables))
    assert torch.allclose(fedsim.run(tables).global_row, w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_only_shards_of_the_cohorts_are_drawn_and_each_once(engine, tiny_experiment, monkeypatch):
    monkeypatch.setattr(participants, "MOST_SAMPLED", 20)
    drawn, draw = [], DrawnShards._draw
    monkeypatch.setattr(DrawnShards, "_draw", lambda self, worker: (drawn.append(worker), draw(self, worker))[1])
    sampled = []
    result = fedsim.run(
        {**tiny_experiment, **MILLION, "partition": "tests.components:some", "engine": engine, "processes": 1},
        on_start=lambda metadata: sampled.extend(metadata.sampled_workers),
    )
    assert len(sampled) == 20
    assert sorted(drawn) == sorted({*sampled, *(worker for record in result.history for worker in record["cohort"])})


def test_what_every_process_gets_does_not_grow_with_the_population():
    def size(workers):
        task = task_of(fedsim.Experiment(**{**MILLION, "workers": workers}), torch.device("cpu"))
        shards = partition_shards(torch.arange(10), "virtual", workers, samples=3)
        return len(pickle.dumps(task)) + len(pickle.dumps(shards))

    assert size(10**9) < size(100) + 50


def test_a_run_needs_no_memory_for_workers_that_do_not_take_part(tiny_experiment):
    tables = {**tiny_experiment, **MILLION, "model": "logistic", "rounds": 2}

    def peak(workers):
        tracemalloc.start()
        try:
            fedsim.run({**tables, "workers": workers})
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    fedsim.run(tables)
    assert peak(10**9) < peak(1000) + 1e6  # both look at a thousand workers


def test_fifty_thousand_workers_may_be_byzantine(tiny_experiment):
    attack = {"name": "sign_flipping", "fraction": 0.5}
    byzantine = []
    fedsim.run(
        {**tiny_experiment, **MILLION, "workers": 10**5, "attack": attack, "aggregate": "median"},
        on_start=lambda metadata: byzantine.extend(metadata.byzantine),
    )
    assert len(set(byzantine)) == 50_000


def test_workers_of_a_virtual_population_may_see_their_samples_each_in_their_way(tiny_experiment):
    """The transforms are a lazy sequence, of which only those of the cohort are read."""
    first, second = (
        fedsim.run(
            tiny_experiment | MILLION | {"partition": {"name": "tests.components:Darkened", "by": by}}
        ).global_row
        for by in (0, 1)
    )
    assert not torch.equal(first, second)
