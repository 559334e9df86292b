"""The loop that replaces lost processes and repeats their rounds, around loops without real processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedsim.core.snapshot import Snapshot
from fedsim.errors import FedsimWarning, ProcessLostError, WorkerError
from fedsim.runs.recovery import recovering


class Fake:
    """A loop that adds 1 to a tensor in each round, and its engine. `losses` names the calls that lose a process."""

    can_lose_processes = True

    def __init__(self, *losses, retries=2, rounds=2):
        self.row, self.losses, self.replaced = torch.zeros(1), list(losses), 0
        self.experiment = SimpleNamespace(process_retries=retries, rounds=rounds)
        self.notes = []

    def loop(self):
        return recovering(self, self.experiment, self, lambda *kind, **facts: self.notes.append((*kind, facts)))

    def maybe(self, where):
        if self.losses and self.losses[0] == where:
            del self.losses[0]
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
        self.maybe("state")
        state = Snapshot()
        state.keep({"row": self.row})
        return state

    def resume(self, state):
        self.maybe("resume")
        state.put_back({"row": self.row})

    def replace_processes(self):
        self.replaced += 1
        self.maybe("start")

    def finish(self):
        self.maybe("finish")
        self.finished = True


@pytest.mark.parametrize("where", ["run_round", "start", "prepare", "resume"])
def test_every_loss_counts_for_its_round(where):
    fake = Fake("run_round", where)
    loop = fake.loop()
    with pytest.warns(FedsimWarning):
        assert [loop.run_round(round)["row"] for round in (1, 2)] == [1.0, 2.0]
    assert fake.replaced == 2
    assert [facts["attempt"] for _, facts in fake.notes] == [1, 2]
    fake = Fake("run_round", where, where)
    with pytest.warns(FedsimWarning), pytest.raises(WorkerError, match="^process 1 is gone; round 1 has been tried 3 "):
        fake.loop().run_round(1)
    assert fake.replaced == 2


def test_a_loss_after_a_round_repeats_that_round_once():
    fake = Fake()
    loop = fake.loop()
    loop.run_round(1)
    fake.losses = ["state"]
    with pytest.warns(FedsimWarning):
        assert loop.run_round(2)["row"] == 2.0
    assert loop.run_round(3)["row"] == 3.0
    assert loop.state().tensors["row"].item() == 3.0


def test_a_loss_before_the_first_or_after_the_last_round_repeats_no_round():
    fake = Fake("state", "resume", rounds=1)
    loop = fake.loop()
    with pytest.warns(FedsimWarning, match=r"^process 1 is gone; a new process replaces it \(restart 1 of at most 2\)"):
        loop.resume(loop.state())
    assert loop.run_round(1)["row"] == 1.0
    fake.losses = ["finish"]
    with pytest.warns(FedsimWarning):
        loop.finish()
    assert (fake.finished, fake.replaced) == (True, 3)
    assert [facts["round"] for _, facts in fake.notes] == [0, 0, 1]


@pytest.mark.parametrize(
    ("losses", "call", "line", "rounds"),
    [
        (["state", "start", "state"], lambda loop: loop.run_round(1), "its processes have been started", [0, 0]),
        (["finish"] * 3, lambda loop: loop.finish(), "ending the run has been tried", [2, 2]),
    ],
    ids=["before the first round", "after the last"],
)
def test_losses_outside_of_rounds_count(losses, call, line, rounds):
    fake = Fake()
    loop = fake.loop()
    if rounds[0]:
        loop.run_round(2)
    fake.losses = losses
    expected = rf"^process 1 is gone; {line} 3 times \(process_retries = 2\)$"
    with pytest.warns(FedsimWarning), pytest.raises(WorkerError, match=expected):
        call(loop)
    assert [facts["round"] for _, facts in fake.notes] == rounds


def test_only_losses_are_repeated_and_only_if_retries_are_allowed():
    fake = Fake()
    fake.run_round = lambda round: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fake.loop().run_round(1)
    assert fake.replaced == 0
    with pytest.raises(WorkerError, match="^process 1 is gone$"):
        Fake("run_round", retries=0).loop().run_round(1)


def test_a_loop_without_processes_or_retries_is_returned_as_it_is():
    """Otherwise unused snapshots would be taken."""
    fake = Fake(retries=0)
    assert fake.loop() is fake
    fake = Fake()
    fake.can_lose_processes = False
    assert fake.loop() is fake
