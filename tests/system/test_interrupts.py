"""Signals during a command, during its clean-up, and at the end of the program."""

from __future__ import annotations

import random
import signal
import sys
import time

import pydantic
import pytest

from fedsim.system import interrupts
from fedsim.system.interrupts import Terminated, signals_as_exceptions
from tests.commands import ROOT, assert_none_left, read_until, start


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)], ids=["INT", "TERM"]
)
def test_only_the_first_signal_is_an_exception(number, kind):
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    closed = []

    def run():
        with signals_as_exceptions():
            try:
                signal.raise_signal(number)
            finally:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGTERM)
                closed.append(True)

    with pytest.raises(kind):
        run()
    assert closed
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_ends_the_program_where_cleaning_up_takes_too_long(monkeypatch):
    ended = []
    monkeypatch.setattr(interrupts, "CLEANUP_SECONDS", -1.0)
    monkeypatch.setattr(interrupts, "_exit", lambda number, frame=None: ended.append(number))

    def run():
        with signals_as_exceptions():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert ended == [signal.SIGTERM]


class Dumped(pydantic.BaseModel):
    @pydantic.model_serializer
    def _interrupted(self):
        signal.raise_signal(signal.SIGINT)


class Nested(pydantic.BaseModel):
    table: Dumped = Dumped()

    @pydantic.model_serializer(mode="wrap")
    def _unchanged(self, handler):
        return handler(self)


@pytest.mark.parametrize("model", [Dumped(), Nested()])
def test_an_interruption_that_pydantic_wraps_is_raised(model):
    with pytest.raises(KeyboardInterrupt), signals_as_exceptions():
        model.model_dump()
    with pytest.raises(ValueError, match="its own"), signals_as_exceptions():
        raise ValueError("its own")


VALIDATORS = """
import contextlib
from fedsim.cli import program
from fedsim.config.experiment import Experiment

@contextlib.contextmanager
def from_now_on():
    print(Experiment.__pydantic_complete__)
    yield

print(Experiment.__pydantic_complete__)
program.signals_as_exceptions = from_now_on
with program.errors_as_lines("fedsim.runs.run"):
    pass
"""


def test_validators_are_built_before_signals_raise_exceptions(tmp_path):
    """While pydantic builds validators, it turns KeyboardInterrupt and Terminated into its own errors."""
    process = start("-c", VALIDATORS, cwd=tmp_path)
    assert process.communicate(timeout=60) == ("False\nTrue\n", "")


class Interrupted:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def test_a_signal_that_meets_a_destructor_is_not_lost():
    def run():
        with signals_as_exceptions():
            Interrupted()
            time.sleep(10)

    with pytest.raises(KeyboardInterrupt):
        run()


class Fails:
    def __del__(self):
        raise ValueError


def test_other_exceptions_in_destructors_go_to_the_hook_that_was_set_before(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(unraisable.exc_type))
    with signals_as_exceptions():
        Fails()
    assert seen == [ValueError]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_many_signals_are_one_word(seed, tmp_path):
    """Signals at random moments, from the start of the processes or from the first round to the end of the program."""
    rng = random.Random(seed)
    for moment in ("starting", "training"):
        words = [
            "engine=processes",
            "processes=2",
            "data=tests.components:tiny",
            "rounds=100000",
            "--out",
            f"{seed}-{moment}",
        ]
        process = start(str(ROOT / "run_experiment.py"), *words, cwd=tmp_path)
        if moment == "training":
            read_until(process, "    2")
        else:
            while not (tmp_path / words[-1]).exists():
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 1))
        while process.poll() is None:
            process.send_signal(rng.choice([signal.SIGINT, signal.SIGTERM]))
            time.sleep(rng.choice([0.001, 0.01, 0.1]))
        _, error = process.communicate(timeout=30)
        assert error in {"interrupted\n", "terminated\n", ""}
        assert process.returncode in {
            130,
            143,
            -signal.SIGTERM,
            -signal.SIGINT,
        }  # the last two during the exit of the interpreter
        assert_none_left(process.pid)
