"""A live run replaces lost processes and repeats their rounds, here with loops without real processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedsim.core.snapshot import Snapshot
from fedsim.errors import FedsimWarning, ProcessLostError, WorkerError
from fedsim.runs import live_run
from fedsim.runs.live_run import LiveRun


class Run(LiveRun):
    """A live run without a model."""

    model = global_row = lambda self: None


class Fake:
    """A loop that adds 1 to a tensor in each round, and its engine. `losses` names the calls that lose a process."""

    can_lose_processes = at_work = True

    def __init__(self, *losses, retries=2, rounds=2):
        self.row, self.losses, self.replaced, self.states = torch.zeros(1), list(losses), 0, 0
        aggregate, local = SimpleNamespace(nonfinite="error"), SimpleNamespace(component=None)
        self.experiment = SimpleNamespace(max_restarts=retries, rounds=rounds, aggregate=aggregate, local=local)
        self.notes, self.tests = [], None

    def live(self):
        folder = SimpleNamespace(path=None, event=lambda *kind, **details: self.notes.append((*kind, details)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(live_run, "loop_of", lambda *_: self)
            patch.setattr(live_run.RunMetadata, "of", lambda *_: self.maybe("metadata"))
            return Run(self.experiment, SimpleNamespace(worker_names=()), self, folder)

    def maybe(self, where):
        if self.losses and self.losses[0] == where:
            del self.losses[0]
            self.at_work = False
            raise ProcessLostError("process 1 is gone", "is gone", 1, None)

    def prepare(self):
        self.maybe("prepare")
        self.prepared = self.replaced

    def run_round(self, round):
        assert self.prepared == self.replaced, "new processes are prepared before they run a round"
        self.row += 0.5
        self.maybe("run_round")
        self.row += 0.5
        return {"round": round, "row": float(self.row)}

    def state(self):
        self.states += 1
        self.maybe("state")
        state = Snapshot()
        state.keep({"row": self.row})
        return state

    def resume(self, state):
        self.maybe("resume")
        state.put_back({"row": self.row})

    def replace_processes(self):
        self.replaced += 1
        self.at_work = True
        self.maybe("start")

    def test_workers(self, round):
        self.maybe("test")
        return {"tested": float(self.row)}

    def finish(self):
        self.maybe("finish")
        self.finished = True


@pytest.mark.parametrize("where", ["run_round", "start", "prepare", "resume"])
def test_every_loss_counts_for_its_round(where):
    fake = Fake("run_round", where)
    run = fake.live()
    with pytest.warns(FedsimWarning):
        assert [run.run_round(round)["row"] for round in (1, 2)] == [1.0, 2.0]
    assert fake.replaced == 2
    assert [details["attempt"] for _, details in fake.notes] == [1, 2]
    fake = Fake("run_round", where, where)
    with pytest.warns(FedsimWarning), pytest.raises(WorkerError, match="^process 1 is gone; round 1 has been tried 3 "):
        fake.live().run_round(1)
    assert fake.replaced == 2


def test_a_loss_before_the_first_or_after_the_last_round_repeats_no_round():
    fake = Fake("metadata", "state", "resume", rounds=1)
    line = r"^process 1 is gone; a new process takes over \(restart 1, max_restarts = 2\)"
    with pytest.warns(FedsimWarning, match=line):
        run = fake.live()
    with pytest.warns(FedsimWarning, match=line):
        run.resume(run.state())
    assert run.run_round(1)["row"] == 1.0
    fake.losses = ["test", "finish"]
    with pytest.warns(FedsimWarning):
        assert run.test_workers(1) == {"tested": 1.0}
    with pytest.warns(FedsimWarning):
        run.result()
    assert (fake.finished, fake.replaced) == (True, 5)
    assert [details["round"] for _, details in fake.notes] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("losses", "call", "line", "rounds"),
    [
        (["state", "start", "state"], lambda run: run.run_round(1), "its processes have been started", [0, 0]),
        (["finish"] * 3, lambda run: run.result(), "ending the run has been tried", [2, 2]),
    ],
    ids=["before the first round", "after the last"],
)
def test_losses_outside_of_rounds_count(losses, call, line, rounds):
    fake = Fake()
    run = fake.live()
    if rounds[0]:
        run.run_round(2)
    fake.losses = losses
    expected = rf"^process 1 is gone; {line} 3 times \(max_restarts = 2\)$"
    with pytest.warns(FedsimWarning), pytest.raises(WorkerError, match=expected):
        call(run)
    assert [details["round"] for _, details in fake.notes] == rounds


def test_only_losses_are_repeated_and_only_if_retries_are_allowed():
    fake = Fake()
    fake.run_round = lambda round: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fake.live().run_round(1)
    assert fake.replaced == 0
    with pytest.raises(WorkerError, match="^process 1 is gone$"):
        Fake("run_round", retries=0).live().run_round(1)


@pytest.mark.parametrize("changes", [{"retries": 0}, {"can_lose_processes": False}], ids=str)
def test_without_processes_or_retries_no_snapshots_are_taken(changes):
    fake = Fake(retries=changes.get("retries", 2))
    fake.can_lose_processes = changes.get("can_lose_processes", True)
    run = fake.live()
    assert run.run_round(1) == {"round": 1, "row": 1.0}
    assert fake.states == 0
    run.resume(run.state())
    run.run_round(2)
    assert run.state().tensors["row"] == 2.0, "the state is that after the latest round"
