"""The user's global settings of PyTorch and NumPy neither reach a run nor are changed by it."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedsim
from fedsim.system.global_settings import SETTINGS
from tests.foreign import WALKED, foreign, foreign_value
from tests.fuzz.properties import difference
from tests.fuzz.runs import Outcome

SERIAL = {"engine": "serial"}
OTHERS = [{"engine": "batched"}, {"engine": "processes", "processes": 2, "start_method": "fork"}]


class Sensitive(nn.Module):
    """A model whose forward pass checks that the settings have the values of a run, and depends on many of them."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(1, 2, 5, stride=4), nn.Linear(72, 10)
        self.scale = nn.Parameter(torch.rand(72))

    def forward(self, images):
        assert [setting.name for setting in SETTINGS if setting.read() != setting.in_run] in ([], ["gradients"])
        features = self.convolution(images).flatten(1) * self.scale
        return self.linear(F.scaled_dot_product_attention(features, features, features))


@pytest.fixture(scope="module")
def undisturbed():
    """Return the outcomes of undisturbed runs, by engine."""
    return {}


def assert_undisturbed(engine, settings, tiny_experiment, undisturbed):
    """Assert that a run inside foreign `settings` has the bits of a run without them, and restores them."""
    tables = {**tiny_experiment, "model": f"{__name__}:Sensitive", **engine}
    if engine["engine"] not in undisturbed:
        undisturbed[engine["engine"]] = Outcome.of(fedsim.run(tables))
    with contextlib.ExitStack() as stack:
        for setting in settings:
            stack.enter_context(foreign(setting))
            assert setting.read() == foreign_value(setting) != setting.in_run
        before = [setting.read() for setting in WALKED]
        outcome = Outcome.of(fedsim.run(tables))
        assert [setting.read() for setting in WALKED] == before
    assert difference(undisturbed[engine["engine"]], outcome, "without and with foreign settings") is None


@pytest.mark.parametrize("setting", WALKED, ids=lambda setting: setting.name)
def test_a_setting_of_the_user_changes_no_bit_and_is_found_again(setting, tiny_experiment, undisturbed):
    assert_undisturbed(SERIAL, [setting], tiny_experiment, undisturbed)


@pytest.mark.parametrize("engine", OTHERS, ids=lambda engine: engine["engine"])
def test_all_settings_together_change_no_bit_with_other_engines(engine, tiny_experiment, undisturbed):
    assert_undisturbed(engine, WALKED, tiny_experiment, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("engine", OTHERS, ids=lambda engine: engine["engine"])
@pytest.mark.parametrize("setting", WALKED, ids=lambda setting: setting.name)
def test_each_setting_changes_no_bit_with_other_engines(engine, setting, tiny_experiment, undisturbed):
    assert_undisturbed(engine, [setting], tiny_experiment, undisturbed)
