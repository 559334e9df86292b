"""The generated types of keys follow the schema, and mypy checks settings in Python with them."""

from __future__ import annotations

import inspect
import pydoc
import re
import typing
from dataclasses import is_dataclass

import pytest

import fedsim
from fedsim.config.experiment import Experiment
from tests.commands import ROOT, ended, start_python
from tests.config import typed_keys

PROGRAM = """
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import fedsim


def my_median(updates: Tensor, *, scale: float = 1.0) -> Tensor:
    return scale * updates.median(0).values


@dataclass(frozen=True)
class MyServer:
    lr: float = 1.0


fedsim.run(rounds=3, workers=8, seed=1)
fedsim.run({"rounds": 3, "local.lr": 0.1}, "folder", local={"lr": 0.1}, progress=True)
fedsim.run(local={"algorithm": "fedprox", "mu": 0.1, "steps": [1, 2, 3, 4], "schedule": "cosine"})
fedsim.run(model=nn.Linear, aggregate=my_median, server=MyServer(lr=0.1), data=(torch.ones(2), torch.ones(2)))
fedsim.run(model={"name": nn.Linear, "in_features": 3}, aggregate={"rule": my_median, "scale": 2.0})
fedsim.run(aggregate=["nnm", {"rule": "multi_krum", "m": 2}], partition=[[0, 1], [2, 3]], groups=[0, 1])
fedsim.run(processors="sign", downlink=["top_k", {"name": "cast"}], metrics=["r2"], cohort=None)
fedsim.run(clock={"slowdown": [1.0, 2.0], "noise": {"name": "pareto", "alpha": 3.0}}, stop={"patience": 3})
fedsim.Experiment(mode="clock", policy={"name": "gossip", "topology": "ring"}, records={"figures": ["pdf"]})
fedsim.load_experiment("mnist_sync_sgd", ["rounds=3"], attack={"name": "alie", "f": 1}).resolved()
fedsim.compare({"rounds": 3}, {"seed": [0, 1]}, out=Path("folder"), checkpoint={"every": 0})
fedsim.components("rules")["krum"].parameters["f"].default
fedsim.run(workres=3)  # wrong: Unexpected keyword argument "workres" for "run"; did you mean "workers"?
fedsim.run(rounds="three")  # wrong: Argument "rounds" to "run" has incompatible type "str"; expected "int"
fedsim.run(mode="clocks")  # wrong: Argument "mode" to "run" has incompatible type
fedsim.run(stop={"patiens": 3})  # wrong: Extra key "patiens" for TypedDict "StopTable"
fedsim.run(server=0.1)  # wrong: Argument "server" to "run" has incompatible type "float"
fedsim.Experiment(round=3)  # wrong: Unexpected keyword argument "round" for "Experiment"
fedsim.load_experiment(locals={"lr": 0.1})  # wrong: Unexpected keyword argument "locals" for "load_experiment"
fedsim.compare(seeds=[0, 1])  # wrong: Unexpected keyword argument "seeds" for "compare"
fedsim.components("rules")["krum"].parameter  # wrong: "ListedName" has no attribute "parameter"
"""
CHECKED = [  # other modules count as untyped, because mypy would take minutes for PyTorch
    "__init__.py",
    "comparison/__init__.py",
    "comparison/runner.py",
    "config/experiment.py",
    "config/listing.py",
    "config/load.py",
    "config/typed_keys.pyi",
    "runs/run.py",
]


def test_the_types_are_those_of_the_schema():
    """After a change of keys or components, `python -m tests.config.typed_keys` writes them again."""
    assert typed_keys.FILE.read_text() == typed_keys.text()
    assert not (typed_keys.FILE.with_suffix(".py")).exists()


def test_mypy_accepts_right_settings_and_refuses_wrong_ones(tmp_path):
    pytest.importorskip("mypy", reason="needs mypy: pip install -e '.[test]'")
    (tmp_path / "program.py").write_text(PROGRAM)
    options = ["--config-file=", "--follow-imports=skip", f"--cache-dir={tmp_path / 'cache'}", "--no-error-summary"]
    files = [f"fedsim/{name}" for name in CHECKED]
    mypy = start_python("-m", "mypy", *options, *files, str(tmp_path / "program.py"), cwd=ROOT)
    _, [out], _ = ended([mypy], timeout=300)
    errors = {int(number): text for number, text in re.findall(r"program\.py:(\d+): error: (.*)", out)}
    lines = enumerate(PROGRAM.splitlines(), 1)
    expected = {number: text for number, line in lines if (text := line.partition("  # wrong: ")[2])}
    assert errors.keys() == expected.keys(), out
    assert all(errors[number].startswith(text) for number, text in expected.items()), out


@pytest.mark.parametrize("function", [fedsim.run, fedsim.load_experiment, fedsim.compare, fedsim.Experiment.__init__])
def test_help_shows_that_keywords_are_the_keys_of_an_experiment(function):
    *_, keywords = inspect.signature(function).parameters.values()
    assert (keywords.kind, keywords.annotation) == (keywords.VAR_KEYWORD, "Unpack[ExperimentKeys]")
    keys = re.search(r"class ExperimentKeys\(.*", typed_keys.text(), re.DOTALL)[0]
    assert re.findall(r"^    (\w+): ", keys, re.MULTILINE) == list(Experiment.model_fields)


def public_functions():
    """Yield the public functions and classes of fedsim, and the methods of these classes that fedsim defines."""
    for name in fedsim.__all__:
        value = getattr(fedsim, name)
        yield from [value] * callable(value)
        for base in value.__mro__ if isinstance(value, type) else ():
            for method, member in list(vars(base).items()) if base.__module__.startswith("fedsim.") else ():
                function = getattr(member, "fget", getattr(member, "__func__", member))
                is_own = getattr(function, "__module__", "").startswith("fedsim.")  # not added by pydantic
                is_public = not method.startswith("_") or (method == "__init__" and not is_dataclass(base))
                yield from [function] * (inspect.isfunction(function) and is_own and is_public)


def test_type_hints_of_public_functions_can_be_evaluated():
    functions = list(public_functions())
    assert {fedsim.run, fedsim.Experiment, fedsim.Experiment.__init__, fedsim.Result.plot} <= set(functions)
    for function in functions:
        assert isinstance(typing.get_type_hints(function), dict)
    for function in (fedsim.run, fedsim.load_experiment, fedsim.compare):
        hint = typing.get_type_hints(function)["changes"]
        (keys,) = typing.get_args(hint) or [hint]
        assert list(keys.__annotations__) == list(Experiment.model_fields)


@pytest.mark.parametrize("function", [fedsim.run, fedsim.load_experiment, fedsim.compare, fedsim.Experiment])
def test_help_says_where_the_keys_are_listed(function):
    shown = pydoc.plain(pydoc.render_doc(function))
    assert 'fedsim.components("keys")' in shown
    assert "ValidationError" not in shown.partition("Methods inherited from")[0]


def test_notebooks_complete_the_keys_of_an_experiment():
    """Jupyter reads signatures while a program runs. That of a pydantic class has all fields once the class is used."""
    assert fedsim.Experiment().rounds == 10
    assert list(inspect.signature(fedsim.Experiment).parameters) == list(Experiment.model_fields)
