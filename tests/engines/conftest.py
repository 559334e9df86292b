from __future__ import annotations

import contextlib

import pytest

import fedsim
from fedsim.runs.setup import prepare
from tests.engines.zoo import experiment


@pytest.fixture
def prepared():
    """Return a function that prepares task and memory of a small experiment (by default a convolution on images)."""
    with contextlib.ExitStack() as stack:

        def prepare_one(kind="convolution", **changes):
            wanted = fedsim.Experiment(**{**experiment(kind), "engine": "serial", **changes})
            session = stack.enter_context(fedsim.Session())
            task, engine = stack.enter_context(prepare(wanted, session))
            return task, engine.shared

        yield prepare_one
