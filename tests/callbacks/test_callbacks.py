"""User-defined callbacks: when they are called, how they end a run, and what a run leaves if they raise."""

from __future__ import annotations

import pytest
import torch

import fedsim
from fedsim.errors import ExperimentError


class Noting(fedsim.Callback):
    """A callback that records its calls. It can end the run or raise an exception in a given round."""

    def __init__(self, *, ends=None, fails=None, calls=None, reason="enough"):
        self.ends, self.fails, self.reason, self.calls = ends, fails, reason, [] if calls is None else calls

    def on_setup(self, step):
        self.calls.append(step.split()[0])

    def on_start(self, run):
        self.run = run
        self.calls.append(("start", run.metadata.done, len(run.history)))

    def on_round(self, record):
        assert self.run.history[-1] == record
        self.calls.append(record.round)
        if record.round == self.fails:
            raise ZeroDivisionError
        return self.reason if record.round == self.ends else None

    def on_end(self, result):
        self.calls.append(("end", len(result.history), result.stopped))


def test_a_callback_is_called_before_the_first_round_after_each_and_at_the_end(tiny_experiment):
    noting = Noting()
    fedsim.run(tiny_experiment, callbacks=[noting])
    setup = ["starting", "making", "loading", "partitioning", "getting"]
    assert noting.calls == [*setup, ("start", 0, 0), 1, 2, ("end", 2, None)]


def test_every_file_is_written_before_the_end_and_the_record_before_the_round(tiny_experiment, tmp_path):
    class Looking(fedsim.Callback):
        def on_round(self, record):
            assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == record.round

        def on_end(self, result):
            assert (tmp_path / "run/model.safetensors").exists()

    fedsim.run(tiny_experiment, tmp_path / "run", callbacks=[Looking()])


def test_the_first_reason_ends_the_run_after_all_callbacks(tiny_experiment, tmp_path, capsys):
    calls, tables = [], {**tiny_experiment, "rounds": 5}
    callbacks = [Noting(ends=2, calls=calls), Noting(ends=9, calls=calls)]
    result = fedsim.run(tables, tmp_path / "run", callbacks=callbacks, progress=True)
    assert "stopped after round 2 of 5: enough" in capsys.readouterr().out
    assert calls[-6:] == [1, 1, 2, 2, ("end", 2, "enough"), ("end", 2, "enough")]
    assert fedsim.load_run(tmp_path / "run", allow_imports=True).stopped == result.stopped == "enough"


def test_an_exception_of_a_callback_leaves_a_run_that_can_be_resumed(tiny_experiment, tmp_path):
    tables, failing = {**tiny_experiment, "rounds": 4, "checkpoint.every": 1}, Noting(fails=3)
    with pytest.raises(ZeroDivisionError):
        fedsim.run(tables, tmp_path / "run", callbacks=[failing])
    assert failing.calls[-1] == 3, "on_end is not called if the run fails"
    resumed = Noting()
    result = fedsim.run(tables, tmp_path / "run", resume=True, callbacks=[resumed])
    assert resumed.calls[-4:] == [("start", 2, 2), 3, 4, ("end", 4, None)]
    assert torch.equal(result.global_row, fedsim.run(tables).global_row)


def test_a_callback_sees_the_current_model(tiny_experiment):
    losses = []

    class Testing(Noting):
        def on_round(self, record):
            row = torch.cat([parameter.flatten() for parameter in self.run.model().parameters()])
            losses.append((row.norm().item(), record.test_loss))

    result = fedsim.run(tiny_experiment, callbacks=[Testing()])
    assert losses[-1][0] == pytest.approx(result.global_row.norm().item())
    assert losses[0][0] != losses[1][0]


def test_a_reason_that_is_not_text_is_an_error(tiny_experiment):
    with pytest.raises(
        ExperimentError, match=r"^callbacks: Noting.on_round returned 1; return a string to end the run"
    ):
        fedsim.run(tiny_experiment, callbacks=[Noting(ends=1, reason=1)])


@pytest.mark.parametrize("callback", [print, Noting, object()], ids=["function", "class", "object"])
def test_what_is_no_callback_is_an_error(tiny_experiment, callback):
    line = (
        r"^callbacks: .* must be an object of a class that derives from fedsim.Callback; pass a function as on_round$"
    )
    with pytest.raises(ExperimentError, match=line):
        fedsim.run(tiny_experiment, callbacks=[callback])
