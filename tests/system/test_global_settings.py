"""The user's global settings of PyTorch and NumPy neither reach a run nor are changed by it."""

from __future__ import annotations

import contextlib
import itertools
import socket
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedsim
from fedsim.engines import base
from fedsim.integrations.rounds import RuleOverRounds
from fedsim.processes.process_context import HeartbeatTable
from fedsim.system.global_settings import (
    AUTOCAST,
    DEFAULT_DEVICE,
    FLOAT32,
    PRECISION,
    SETTINGS,
    THREADS,
    plain_arithmetic,
)
from tests.foreign import FOREIGN, WALKED, foreign, foreign_value
from tests.fuzz.properties import difference
from tests.fuzz.runs import Outcome

SERIAL = {"engine": "serial"}
SPAWNED = {"engine": "processes", "processes": 2, "start_method": "spawn"}
OTHERS = [{"engine": "batched"}, {"engine": "processes", "processes": 2}]


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


def test_no_setting_is_missing():
    assert FOREIGN.keys() - {"einsum"} <= {setting.name for setting in WALKED}  # einsum needs an optional package


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


UPDATES = torch.rand(8, 40, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "call",
    [
        lambda: fedsim.aggregate(UPDATES, ["nnm", "multi_krum"], f=2),
        lambda: fedsim.pre_aggregate(UPDATES, "nnm", f=2),
        lambda: fedsim.attack(UPDATES, "min_max", 2),
        lambda: fedsim.compress(UPDATES[0], "qsgd")[0],
        lambda: RuleOverRounds("geometric_median", {})(UPDATES, round=1),
        lambda: fedsim.load_dataset("mnist5k")[0].gather(torch.arange(3, device="cpu"))[0],
    ],
    ids=["aggregate", "pre_aggregate", "attack", "compress", "a rule over rounds", "load_dataset"],
)
def test_functions_outside_a_run_compute_with_the_same_settings(call):
    expected = call()
    with contextlib.ExitStack() as stack:
        for setting in (AUTOCAST, DEFAULT_DEVICE, PRECISION):
            stack.enter_context(foreign(setting))
        actual = call()
    assert (actual.dtype, actual.device) == (expected.dtype, expected.device)
    assert torch.equal(actual, expected)


@pytest.mark.skipif(not FLOAT32, reason="this PyTorch has one interface for the precision of products")
def test_functions_outside_a_run_ignore_a_precision_that_only_products_on_a_cpu_have():
    with PRECISION.at(PRECISION.in_run):
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        assert PRECISION.read() != PRECISION.in_run
        assert plain_arithmetic(PRECISION.read)() == PRECISION.in_run


@pytest.mark.parametrize(
    ("error", "engine"),
    [*itertools.product([KeyboardInterrupt], [SERIAL, *OTHERS]), (fedsim.StopRun, SERIAL), (ValueError, SERIAL)],
    ids=str,
)
def test_the_settings_of_the_user_are_found_again_after_an_early_end(error, engine, tiny_experiment):
    def end(record):
        assert all(setting.read() == setting.in_run for setting in SETTINGS)
        raise error

    with contextlib.ExitStack() as stack:
        for setting in WALKED:
            stack.enter_context(foreign(setting))
        before = [setting.read() for setting in WALKED]
        with contextlib.nullcontext() if error is fedsim.StopRun else pytest.raises(error):
            fedsim.run({**tiny_experiment, **engine}, on_round=end)
        assert [setting.read() for setting in WALKED] == before


def test_a_process_of_a_pool_has_the_settings_during_a_task(monkeypatch):
    """A spawned process does not inherit the settings of its parent."""
    monkeypatch.setattr(base, "Team", lambda *_: None)

    def read(*_):
        return {"executor": [setting.read() == setting.in_run for setting in SETTINGS]}

    monkeypatch.setattr(base, "_new_state", read)
    process = SimpleNamespace(state={})
    task = SimpleNamespace(device=torch.device("cpu"), experiment=SimpleNamespace(threads_per_process=1))
    with contextlib.ExitStack() as stack:
        for setting in WALKED:
            stack.enter_context(foreign(setting))
        before = [setting.read() for setting in WALKED]
        base._make_executor(process, torch.zeros(1, device="cpu"), task)
        assert all(process.state["executor"])
        base._drop_executor(process)
        assert [setting.read() for setting in WALKED] == before


def test_a_default_device_does_not_reach_the_processes_of_a_comparison():
    with foreign(DEFAULT_DEVICE):
        assert HeartbeatTable(2).count == 2


def test_a_session_does_not_keep_the_threads_of_a_run(tiny_experiment):
    with THREADS.at(2), fedsim.Session() as session:
        fedsim.run(tiny_experiment, session=session)
        assert THREADS.read() == 2


def test_a_default_timeout_of_sockets_does_not_reach_the_pipes_of_processes(tiny_experiment):
    expected = fedsim.run(tiny_experiment).global_row
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.001)
    try:
        assert torch.equal(fedsim.run({**tiny_experiment, **OTHERS[1]}).global_row, expected)
    finally:
        socket.setdefaulttimeout(before)


def test_the_cast_parameters_of_an_outer_autocast_are_not_used_again(tiny_experiment):
    """PyTorch keeps them until the outermost context ends, also if the parameters change."""
    expected = fedsim.run(tiny_experiment, precision="bf16").global_row
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fedsim.run(tiny_experiment, precision="bf16").global_row, expected)


@pytest.mark.parametrize("engine", [SERIAL, pytest.param(SPAWNED, marks=pytest.mark.slow)], ids=["serial", "spawned"])
def test_a_module_that_changes_settings_when_it_is_imported_changes_no_bit(
    engine, tiny_experiment, tmp_path, monkeypatch
):
    line = "from tests.models import OnImages as {}"
    (tmp_path / "plain_module.py").write_text(line.format("Plain"))
    (tmp_path / f"module_of_{engine['engine']}.py").write_text(
        f"import torch\n{line.format('Own')}\ntorch.set_default_dtype(torch.float64)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    expected = fedsim.run({**tiny_experiment, "model": "plain_module:Plain"})
    actual = fedsim.run({**tiny_experiment, **engine, "model": f"module_of_{engine['engine']}:Own"})
    assert torch.equal(actual.global_row, expected.global_row)
    assert torch.get_default_dtype() == torch.float32
