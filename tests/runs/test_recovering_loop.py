"""The loop that replaces lost processes and repeats their rounds, around loops without processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import fedsim
from fedsim.core.snapshot import Snapshot
from fedsim.errors import FedsimWarning, ProcessLostError, WorkerError
from fedsim.runs.loops.loop import loop_of
from fedsim.runs.loops.synchronous import SynchronousLoop
from fedsim.runs.recovery import RecoveringLoop, recovering
from fedsim.runs.setup import prepare

TABLES = {
    **{"rounds": 4, "workers": 4, "engine": "serial", "data": "tests.plugs:tiny", "model": "logistic"},
    "local": {"batch_size": 16, "lr": 0.05, "momentum": 0.5},
}


class Fake:
    """A loop that adds 1 to a tensor in every round, and an engine; `losses` names the calls that lose a process."""

    can_lose_processes = True

    def __init__(self, *losses, retries=2, policy="retry", rounds=2):
        self.row, self.losses, self.replaced = torch.zeros(1), list(losses), 0
        experiment = SimpleNamespace(on_worker_failure=policy, worker_retries=retries, rounds=rounds)
        self.prepared = SimpleNamespace(experiment=experiment)
        self.notes = []

    def loop(self):
        return recovering(self, self.prepared, self, lambda *kind, **facts: self.notes.append((*kind, facts)))

    def maybe(self, where):
        if self.losses and self.losses[0] == where:
            del self.losses[0]
            raise ProcessLostError("process 1 is gone", "is gone", 1, 2, None)

    def run_round(self, round):
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


@pytest.mark.parametrize("where", ["run_round", "start", "resume"])
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
    with pytest.warns(FedsimWarning, match=r"^process 1 is gone; a new one takes its place \(1 of at most 2 times\)$"):
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
    expected = rf"^process 1 is gone; {line} 3 times \(worker_retries = 2\)$"
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


def test_a_loop_without_processes_or_with_abort_is_returned_as_it_is():
    """So that no unused snapshots are taken."""
    fake = Fake(policy="abort")
    assert fake.loop() is fake
    fake = Fake()
    fake.can_lose_processes = False
    assert fake.loop() is fake


def test_a_recovering_loop_resumes_from_a_given_state():
    fake = Fake()
    loop = fake.loop()
    assert isinstance(loop, RecoveringLoop)
    loop.run_round(1)
    before = loop.state()
    loop.run_round(2)
    loop.resume(before)
    assert loop.state() is before
    assert loop.run_round(2)["row"] == 2.0
    loop.finish()
    assert fake.finished


class FakeCohort(SynchronousLoop):
    """A loop that has only a cohort."""

    def __init__(self, *losses):
        self.losses, self.left_out, self.cohort = list(losses), [], [5, 6, 8, 9]

    def run_round(self, round, lost=()):
        self.left_out.append(list(lost))
        if self.losses:
            process, worker = self.losses.pop(0)
            raise ProcessLostError("process is gone", "is gone", process, 2, worker)
        return {"round": round}

    def state(self):
        return Snapshot()

    def resume(self, state):
        pass


def dropping(tables, *losses):
    """The workers that each attempt of a round with these losses leaves out."""
    described = fedsim.Experiment(**{**TABLES, **tables, "workers": 10})
    described = described.model_copy(update={"on_worker_failure": "drop", "worker_retries": 9})
    with fedsim.Session() as session, prepare(described, session) as (prepared, engine):
        loop = FakeCohort(*losses)
        losing = SimpleNamespace(can_lose_processes=True, replace_processes=lambda: None, shared=engine.shared)
        with pytest.warns(FedsimWarning):
            recovering(loop, prepared, losing).run_round(1)
    return loop.left_out


def test_drop_removes_the_current_worker_or_all_workers_of_the_process():
    """Shards have about one size, so the workers are assigned in turn."""
    assert dropping({}, (1, 8)) == [[], [8]]
    assert dropping({}, (1, None)) == [[], [6, 9]]
    assert dropping({}, (0, 5), (0, None)) == [[], [5], [5, 6, 9]], "the others are assigned again"
    assert dropping({}, (0, 7)) == [[], []], "a worker outside of the cohort is not lost"


def test_drop_never_removes_the_row_of_the_server():
    fltrust = {"aggregate": {"rule": "fltrust", "root_samples": 20}}
    assert dropping(fltrust, (0, 10)) == [[], []], "its number follows that of the last worker"
    assert dropping(fltrust, (0, None)) == [[], [5, 8]]


def test_dropping_the_last_worker_ends_the_run():
    with pytest.raises(WorkerError, match="without workers? [0-9, ]+, no worker is left in the cohort"):
        dropping({}, (0, None), (0, 6), (1, 9), (0, None), (1, None))


def test_the_row_of_the_server_is_used_when_a_worker_is_dropped():
    """A round without one worker equals the aggregate of the other rows."""
    tables = {**TABLES, "aggregate": {"rule": "fltrust", "root_samples": 20}}
    with fedsim.Session() as session, prepare(fedsim.Experiment(**tables), session) as (prepared, engine):
        loop = loop_of(prepared, engine)
        start = engine.shared.global_row.clone()
        record = loop.run_round(1, [1])
        rows = engine.shared.rows
        moved = torch.stack([rows[0], rows[1], rows[2]]).double()
        root = rows[-1].double()
        trust = torch.clamp(torch.cosine_similarity(moved, root.expand_as(moved)), min=0)
        scaled = moved * (root.norm() / moved.norm(dim=1, keepdim=True))
        expected = start.double() + (trust / trust.sum()) @ scaled
        assert record["cohort"] == [0, 2, 3]
        assert record["lost"] == [1]
        assert torch.allclose(engine.shared.global_row.double(), expected, rtol=0, atol=1e-6)
