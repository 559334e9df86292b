from __future__ import annotations

import traceback
from pathlib import Path

import fedsim
from fedsim.clients.sgd import SGD

PACKAGE = str(Path(fedsim.__file__).parent)


def test_a_run_calls_at_most_nine_functions_down_to_the_step_of_the_solver(tiny_experiment, monkeypatch):
    """Counted from the command `fedsim run`, which calls `fedsim.run`."""
    stacks, step = [], SGD.step

    def recorded(*arguments):
        stacks.append([frame.name for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)])
        return step(*arguments)

    monkeypatch.setattr(SGD, "step", recorded)
    fedsim.run(tiny_experiment)
    calls = [*stacks[0], "step"]
    assert calls[0] == "run"
    assert len(calls) <= 9, calls
