from __future__ import annotations

import traceback
from pathlib import Path

import torch

import fedsim
from fedsim.clients.sgd import SGD

PACKAGE = str(Path(fedsim.__file__).parent)
MOST = {"model": 12, "step": 8, "rule": 10}  # functions of fedsim between `fedsim.run` and user code


def calls_between_run_and(place):
    """Return the functions of fedsim on the stack, without `fedsim.run` and the caller."""
    names = [frame.name for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
    assert names[0] == "run"
    return place, names[1:]


def test_few_functions_are_between_a_run_and_the_models_step_or_the_rule(tiny_experiment, monkeypatch):
    calls, step = {}, SGD.step

    class Noting(torch.nn.Flatten):
        def forward(self, images):
            calls.update([calls_between_run_and("model")] if self.training else [])
            return super().forward(images)

    def noting_mean(updates):
        calls.update([calls_between_run_and("rule")])
        return updates.mean(0)

    def noting_step(*arguments):
        calls.update([calls_between_run_and("step")])
        return step(*arguments)

    monkeypatch.setattr(SGD, "step", noting_step)
    model = torch.nn.Sequential(Noting(), torch.nn.Linear(784, 10))
    fedsim.run({**tiny_experiment, "model": model, "aggregate": noting_mean})
    assert calls.keys() == MOST.keys()
    assert all(len(names) <= MOST[place] for place, names in calls.items()), calls
