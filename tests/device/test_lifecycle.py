"""Runs on a GPU from their beginning to their end, and what becomes of them when something fails."""

from __future__ import annotations

import pytest

import fedsim


@pytest.fixture
def tables(tiny_experiment):
    return {**tiny_experiment, "rounds": 1, "workers": 4, "device": "cuda", "model": "logistic"}


def how_computed(tables):
    settings = []
    fedsim.run(tables, on_start=settings.append)
    return settings[0].how


def test_auto_stacks_all_rows_in_one_process_and_replays_their_steps(gpu, tables):
    how = how_computed({**tables, "engine": "auto", "processes": 4, "rounds": 1})
    assert (how["engine"], how["processes"], how["width"], how["cuda_graphs"]) == ("batched", 1, 4, True)


def test_auto_trains_a_model_that_cannot_be_stacked_in_one_process(gpu, tables):
    how = how_computed({**tables, "engine": "auto", "processes": 4, "model": "tests.plugs:Stateful"})
    assert (how["engine"], how["processes"]) == ("serial", 1)
    assert "cannot be stacked" in how["reason"]
