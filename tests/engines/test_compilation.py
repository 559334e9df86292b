from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

import fedsim
from fedsim.engines.trainers.compilation import CompiledFunction
from fedsim.errors import FedsimWarning
from fedsim.system.precision import PRECISIONS
from tests.engines.test_contract import CASES, CLOSE, ROUNDING, assert_close

CPU = torch.device("cpu")
FLOAT64 = PRECISIONS["float64"]

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))), reason="needs a C++ compiler"
)


def compiling_as(monkeypatch, compiled):
    """Have torch.compile turn a function into what `compiled` makes of it."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled(function))


def doubled(x):
    return [(2 * x).sum(), x + torch.rand(3)]


def run_once(function):
    return function(torch.ones(3))


def fails(function):
    def call(*arguments):
        raise RuntimeError("no such thing\nand a page of advice\nDeveloper debug context: operator frob")

    return call


def gives_more(function):
    return lambda x: [value + 1e-6 for value in function(x)]


def draws_more(function):
    def call(x):
        results = function(x)
        torch.rand(1)
        return results

    return call


@pytest.mark.parametrize(
    ("compiled", "reason"),
    [
        (fails, "RuntimeError: no such thing; Developer debug context: operator frob"),
        (gives_more, "compiled it gives other numbers"),
        (draws_more, "compiled it draws other random numbers"),
    ],
)
def test_what_does_not_compile_to_the_same_is_not_compiled_and_says_so_once(compiled, reason, monkeypatch):
    compiling_as(monkeypatch, compiled)
    for warns in (True, False):
        compilation, state = CompiledFunction(doubled, warns=warns), torch.get_rng_state()
        if warns:
            with pytest.warns(FedsimWarning, match="compile = true: the model is trained uncompiled, .*: ") as caught:
                compilation.dry_run(run_once, CPU, FLOAT64)
            assert len(caught) == 1
        else:
            compilation.dry_run(run_once, CPU, FLOAT64)
        assert compilation.refusal == reason.replace("Developer debug context: ", "")
        assert torch.equal(torch.get_rng_state(), state)
        assert compilation(torch.ones(3))[0] == 6


def test_what_fails_later_goes_on_uncompiled(monkeypatch):
    calls = []

    def fails_later(function):
        def call(x):
            calls.append(len(x))
            return function(x) if len(x) == 3 else fails(function)(x)

        return call

    compiling_as(monkeypatch, fails_later)
    compilation = CompiledFunction(lambda x: [x.sum()], warns=True)
    compilation.dry_run(run_once, CPU, FLOAT64)
    assert compilation.refusal is None
    assert compilation(torch.ones(3)) == [3]
    with pytest.warns(FedsimWarning, match="no such thing"):
        assert compilation(torch.ones(4)) == [4]
    assert compilation(torch.ones(3)) == [3]
    assert calls == [3, 3, 4]


@pytest.mark.parametrize("sync", ["parameters", "gradients", "post_local"])
@pytest.mark.parametrize(("engine", "expected"), [("serial", {(16,)}), ("batched", {(3, 16), (2, 16)})])
def test_only_whole_batches_of_whole_stacks_are_compiled(engine, expected, sync, tiny_experiment, monkeypatch):
    shapes = set()

    def noting(function):
        def call(*arguments):
            shapes.add(tuple(arguments[2 if engine == "serial" else 3].shape))
            return function(*arguments)

        return call

    compiling_as(monkeypatch, noting)
    tables = {**tiny_experiment, "workers": 5, "partition": "tests.plugs:uneven", "sync": sync, "precision": "float64"}
    tables |= {"engine": engine, **(CLOSE["batched"] if engine == "batched" else {})}
    tables |= {"gradient_rounds": 1} if sync == "post_local" else {}
    found = fedsim.run({**tables, "compile": True})
    assert shapes == expected
    assert_close(fedsim.run(tables), found, ROUNDING)


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_the_record_says_whether_it_is_compiled(engine, tiny_experiment, tmp_path, monkeypatch):
    tables = {**tiny_experiment, "engine": engine, "processes": 1, "rounds": 1}

    def recorded(name, **change):
        fedsim.run({**tables, **change}, out=tmp_path / name)
        return json.loads((tmp_path / name / "environment.json").read_text()).get("compiled")

    assert recorded("no") is None
    compiling_as(monkeypatch, lambda function: function)
    assert recorded("yes", compile=True) is True
    compiling_as(monkeypatch, fails)
    with pytest.warns(FedsimWarning):
        assert recorded("failed", compile=True) == "RuntimeError: no such thing; operator frob"


def test_a_model_with_state_in_attributes_is_not_compiled(tiny_experiment):
    tables = {**tiny_experiment, "model": "tests.plugs:Stateful"}
    with pytest.warns(FedsimWarning, match="changes attributes or unsaved buffers"):
        found = fedsim.run({**tables, "compile": True})
    assert torch.equal(found.global_row, fedsim.run(tables).global_row)


@needs_compiler
def test_compiled_training_agrees_with_uncompiled(tiny_experiment):
    tables = {**tiny_experiment, "model": "logistic", "precision": "float64"}
    assert_close(fedsim.run(tables), fedsim.run({**tables, "compile": True}), ROUNDING)


def test_without_a_compiler_there_is_one_warning_and_the_run_goes_on(tmp_path):
    words = ["compile=true", "engine=serial", "model=logistic", "rounds=1", "workers=2", "local.steps=1", "device=cpu"]
    environment = {**os.environ, "CXX": "/no/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "fedsim", "run", *words, "--out", str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    (line,) = [line for line in done.stderr.splitlines() if "ompile" in line]
    assert line.startswith("warning: compile = true: the model is trained uncompiled, with the same results: ")
    assert isinstance(json.loads((tmp_path / "run" / "environment.json").read_text())["compiled"], str)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("sync", ["parameters", "gradients"])
@pytest.mark.parametrize("engine", ["serial", "spawn", "batched"])
@pytest.mark.parametrize(
    "case", ["partial cohorts of uneven shards", "dropout", "buffers averaged", "momentum, weight decay"]
)
def test_every_engine_compiles_and_agrees_with_serial(case, engine, sync, tiny_experiment):
    tables = {**tiny_experiment, **CASES[case], "sync": sync, "precision": "float64"}
    serial = fedsim.run({**tables, "engine": "serial"})
    how = {"engine": engine, "processes": {"serial": None, "spawn": 2, "batched": 1}[engine]}
    assert_close(serial, fedsim.run({**tables, **how, "compile": True}), ROUNDING)
