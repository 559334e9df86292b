"""Run these tests with `python -m pytest`."""

from __future__ import annotations

from pathlib import Path

import my_project
import numpy as np
import pytest
import torch

import fedsim


def test_softmedian_ignores_a_distant_row():
    updates = torch.tensor([[1.0, 0.0], [1.1, 0.0], [0.9, 0.0], [100.0, 100.0]])
    update = fedsim.aggregate(updates, my_project.softmedian, temperature=0.1)
    torch.testing.assert_close(update, torch.tensor([1.0, 0.0]), atol=0.1, rtol=0)


def test_opposite_median_sends_a_row_for_each_attacker():
    rows = fedsim.attack(torch.tensor([[1.0], [2.0], [3.0]]), my_project.opposite_median, 2, scale=2.0)
    assert rows.tolist() == [[-4.0], [-4.0]]


def test_growing_gives_each_sample_to_one_worker():
    shards = fedsim.partition(np.zeros(700, int), my_project.growing, 3, ratio=2.0)
    assert [len(shard) for shard in shards] == [100, 200, 400]
    assert sorted(np.concatenate(shards)) == list(range(700))


def test_worst_class_is_the_lowest_accuracy_of_a_class():
    outputs = torch.eye(2)[[0, 0, 1, 0]]
    assert my_project.worst_class(outputs, torch.tensor([0, 0, 1, 1])) == 0.5


def test_fedcm_is_sgd_in_the_first_round():
    same = {"model": my_project.perceptron, "data": my_project.small_digits, "rounds": 1, "engine": "serial"}
    ours = fedsim.run({**same, "local": {"algorithm": my_project.FedCM, "lr": 0.2, "alpha": 0.5}})
    sgd = fedsim.run({**same, "local": {"algorithm": "sgd", "lr": 0.1}})
    assert ours.history[-1]["test_loss"] == pytest.approx(sgd.history[-1]["test_loss"], rel=1e-4)


def test_the_experiment_learns(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)  # experiments may name modules of the working directory
    result = fedsim.run("experiment.toml", engine="serial")
    assert result.test_accuracy > 0.8
