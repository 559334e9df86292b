"""What a user's code warns about is shown as often as Python's filters say, whatever the number of rounds."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch import nn

import fedsim
from fedsim.system.precision import without_recurrent_advice
from tests.device.pretend import GPU, pretend_gpu, upload

ADVICE = "this model prefers larger images"
RECURRENT = "RNN module weights are not part of single contiguous chunk of memory. This means"


class Advising(nn.Module):
    """A linear model that warns in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(784, 10)

    def forward(self, images):
        warnings.warn(ADVICE, stacklevel=1)
        return self.linear(images.flatten(1))


@pytest.mark.parametrize(
    ("device", "engine"), [("cpu", "serial"), ("cpu", "batched"), ("cuda", "serial"), ("cuda", "batched")]
)
def test_a_warning_of_a_model_is_not_repeated_in_each_round(device, engine, tiny_experiment):
    tables = {**tiny_experiment, "model": f"{__name__}:Advising", "device": device, "engine": engine, "processes": 1}
    assert times_shown(tables | {"rounds": 3}) == times_shown(tables | {"rounds": 1})


def test_a_warning_of_a_process_is_not_repeated_in_each_round(tiny_experiment):
    tables = {**tiny_experiment, "model": f"{__name__}:Advising", "engine": "processes", "processes": 2}
    tables["device"] = "cpu"
    assert times_shown(tables | {"rounds": 3}) == times_shown(tables | {"rounds": 1})


def times_shown(tables):
    on_gpu = pretend_gpu() if tables["device"] == "cuda" else contextlib.nullcontext()
    with warnings.catch_warnings(record=True) as shown, on_gpu:
        warnings.simplefilter("default")
        fedsim.run(tables)
    return len([warning for warning in shown if str(warning.message) == ADVICE])


def test_a_rule_that_warns_is_not_repeated_in_each_call():
    def advising(updates):
        warnings.warn(ADVICE, stacklevel=1)
        return updates.mean(0)

    with pretend_gpu(), warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            fedsim.aggregate(upload(torch.rand(3, 5)), advising)
    assert len(shown) == 1


def test_the_filter_of_a_run_ends_with_it_and_keeps_those_that_the_user_adds(gpu):
    with warnings.catch_warnings():
        with without_recurrent_advice(GPU):
            warnings.filterwarnings("ignore", ADVICE)
            with without_recurrent_advice(GPU):
                pass
            warnings.warn(RECURRENT, stacklevel=1)
        assert warnings.filters[0][1].pattern == ADVICE
        with pytest.warns(UserWarning, match="RNN"):
            warnings.warn(RECURRENT, stacklevel=1)
