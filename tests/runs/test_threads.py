"""Runs in several threads, and runs inside callbacks of other runs, have the results of runs one after another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fedsim
from fedsim.core.randomness import preserve_random_state, seed_everything
from tests.models import OnImages

CPU = torch.device("cpu")
BUSY = "another thread runs an experiment"


class Noisy(OnImages):
    """A model that draws from PyTorch's global generator in training."""

    def forward(self, images):
        return super().forward(images + torch.rand_like(images) if self.training else images)


@pytest.fixture
def run(tiny_experiment):
    return lambda seed, **arguments: fedsim.run(
        {**tiny_experiment, "seed": seed, "model": f"{__name__}:Noisy"}, **arguments
    )


def in_thread(work):
    """Call `work` in another thread, and return its result, or the error that it raises."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        return future.exception() or future.result()


def test_a_run_in_another_thread_is_refused_in_one_line_and_changes_no_number(run, tiny_experiment, tmp_path):
    alone = run(0)
    run(1, out=tmp_path / "stored")
    refused = {
        "run": lambda: run(1, out=tmp_path / "new"),
        "compare": lambda: fedsim.compare(tiny_experiment, {"seed": [0, 1]}, out=tmp_path / "compared", jobs=1),
        "load": lambda: fedsim.load_run(tmp_path / "stored", allow_imports=True).model,
    }
    errors = {}

    def on_round(record):
        errors.update({name: in_thread(work) for name, work in refused.items()})

    together = run(0, on_round=on_round)
    assert torch.equal(together.global_row, alone.global_row)
    assert [record.train_loss for record in together.history] == [record.train_loss for record in alone.history]
    assert errors.keys() == refused.keys()
    for error in errors.values():
        assert isinstance(error, fedsim.ExperimentError)
        (line,) = error.lines
        assert line.startswith(BUSY)
    assert not (tmp_path / "new").exists()
    assert [run.error for run in fedsim.compare(tiny_experiment, {"seed": [0, 1]}, jobs=1).runs] == [None, None]


def test_threads_that_build_models_wait_for_each_other():
    def draw(seed):
        with preserve_random_state(CPU):
            seed_everything(CPU, seed, "model")
            return [torch.rand(1).item() for _ in range(200)]

    alone, before = [draw(seed) for seed in range(8)], torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(draw, range(8))) == alone
    assert torch.equal(torch.get_rng_state(), before)


def test_after_a_failed_run_other_threads_may_run(run):
    def fail(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(0, on_round=fail)
    assert len(in_thread(lambda: run(0)).history) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"model": f"{__name__}:Noisy"},
        {"engine": "batched"},
        {"engine": "processes", "processes": 2},
        {"mode": "clock", "clock.slowdown": "lognormal"},
    ],
    ids=str,
)
def test_a_run_inside_a_callback_changes_no_number_of_either_run(changes, tiny_experiment, run):
    outer, inner, rows = {**tiny_experiment, **changes}, run(5).global_row, []
    alone = fedsim.run(outer)
    nested = fedsim.run(outer, on_round=lambda record: rows.append(run(5).global_row))
    assert torch.equal(nested.global_row, alone.global_row)
    assert [record.train_loss for record in nested.history] == [record.train_loss for record in alone.history]
    assert len(rows) == 2
    assert all(torch.equal(row, inner) for row in rows)


def test_a_run_inside_a_callback_needs_a_session_of_its_own(run):
    with fedsim.Session() as session:

        def on_round(record):
            with pytest.raises(fedsim.ExperimentError, match="session: is in use by a run that has not ended"):
                run(5, session=session)

        assert torch.equal(run(0, session=session, on_round=on_round).global_row, run(0, session=session).global_row)
