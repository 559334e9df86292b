"""Python calls of a worker in a stacked round. They are counted, because times depend on the machine."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

import fedsim
from fedsim.rounds.synchronous_rounds import SynchronousRounds

FEDSIM = str(Path(fedsim.__file__).parent)
FEW, MANY = 64, 128  # workers in a round: 2 and 4 stacks of 32
LOCAL = {"batch_size": 2, "epochs": 1}
CASES = {  # settings, and maximum calls of functions of fedsim per worker and round
    "plain": ({}, 13),
    "drawn epochs": ({"local": {**LOCAL, "epochs": {"uniform": [1, 3]}}}, 17),
    "numbers of the round": ({"local": {**LOCAL, "algorithm": "fednova"}}, 17),
    "personal state": ({"local": {**LOCAL, "algorithm": "scaffold"}}, 18),
    "an attack": ({"attack": {"name": "sign_flipping", "fraction": 0.25}, "aggregate": "median"}, 13),
    "workers that drop out": ({"sampling": {"dropout_rate": 0.5}}, 16),
    "compression": ({"processors": ["natural"]}, 81),
}


def calls_of_a_round(workers, changes, monkeypatch):
    """Return the calls of functions of fedsim in the second round, by function."""
    counts, run_round = Counter(), SynchronousRounds.run_round

    def count(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(FEDSIM):
            counts[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1

    def counting(rounds, round):
        counts.clear()
        sys.setprofile(count)
        try:
            return run_round(rounds, round)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(SynchronousRounds, "run_round", counting)
    tables = {
        **{"rounds": 2, "workers": 2 * workers, "cohort": workers, "model": "logistic", "partition": "contiguous"},
        **{"data": {"name": "tests.components:tiny", "train": 8 * workers}, "local": LOCAL, "device": "cpu"},
        **{"engine": "batched", "processes": 1, "batched": {"stack_size": 32}},
    }
    fedsim.run({**tables, **changes})
    monkeypatch.undo()
    return counts


@pytest.mark.parametrize("case", CASES)
def test_a_worker_of_a_stacked_round_costs_few_calls(case, monkeypatch):
    """The cost of a worker is the difference between two rounds, so that fixed costs of a round do not count."""
    changes, most = CASES[case]
    few, many = (calls_of_a_round(workers, changes, monkeypatch) for workers in (FEW, MANY))
    added = {name: (count - few[name]) / (MANY - FEW) for name, count in many.items()}
    assert sum(added.values()) <= most, sorted(added.items(), key=lambda pair: -pair[1])[:20]
