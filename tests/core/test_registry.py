"""Components, their parameters, and the tables that name them."""

from __future__ import annotations

import inspect
import math
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field, ValidationError

import fedsim
from fedsim.asynchronous.policies import Policy, policy
from fedsim.asynchronous.policies.gradient_updates import Hogwild
from fedsim.config.components import COMPONENTS, registry_of
from fedsim.core.base_table import ComponentTable
from fedsim.core.import_policy import local_modules
from fedsim.core.numbers import UNSURE, fitted
from fedsim.core.parameter_model import checked_by_pydantic, parameter_model
from fedsim.core.registry import Registry
from fedsim.errors import ExperimentError
from tests import components


@dataclass(frozen=True)
class Tamed(Hogwild):
    """A user-defined component that inherits from one of fedsim's."""

    rate: float = 0.1


@pytest.fixture
def registry():
    registry = Registry("gadget", inputs=("value",))

    @registry("double")
    def double(value, *, times: Annotated[int, Field(ge=1)], loud: bool = False):
        """Says it again.

        And more.
        """
        return value * times

    registry("other")(lambda value, *, lots: value)
    return registry


def test_keyword_only_parameters_are_the_configuration(registry):
    assert list(registry.get("double").parameters.model_fields) == ["times", "loud"]
    assert registry.get("double").check({"times": 2}) == {"times": 2, "loud": False}
    assert registry.get("double").bind({"times": 2, "loud": False})("ab") == "abab"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"times": 1, "lound": True}, r'x.lound = true: unknown key \(the gadget is double\); did you mean "loud"\?'),
        ({"times": 1, "lots": 1}, r"x.lots = 1: unknown key \(the gadget is double\); lots is a parameter of other"),
        ({"times": 0}, "x.times = 0: must be greater than or equal to 1"),
        ({}, "x.times: is required"),
    ],
)
def test_a_wrong_parameter_is_one_line_with_place_and_value(registry, values, message):
    with pytest.raises(ExperimentError, match=message) as caught:
        registry.get("double").check(values, "x")
    assert len(caught.value.lines) == 1


VALUES = [None, True, False, "", "own", "tau^2", "1", [], [1, 2], [0.5, 1], [[1], [2, 3]], ["a"], {}]
NUMBERS = [-1, 0, 1, 2, 10_001, 2**53 + 1, 2**63, 10**400, -1.0, 0.0, 0.5, 1.0, 2.5, 2e12, math.inf, math.nan]


def test_what_is_accepted_without_pydantic_is_what_pydantic_returns():
    kinds = {
        str(f.annotation): f.annotation for kind in COMPONENTS for r in registry_of(kind) for f in r.fields.values()
    }
    accepted = 0
    for kind in kinds.values():
        model = parameter_model(
            "any", {"x": inspect.Parameter("x", inspect.Parameter.KEYWORD_ONLY, annotation=kind)}, False
        )
        for value in [*VALUES, *NUMBERS]:
            result = fitted(kind, value)
            if result is not UNSURE:
                accepted += 1
                assert repr(checked_by_pydantic(model, {"x": value}, "")) == repr(({"x": result}, []))
    assert accepted > 300


@dataclass(frozen=True)
class Idle(Policy):
    """A policy that never uses a result."""


class Patterned:
    """A component whose parameter bounds are not numbers."""

    def __init__(
        self, word: Annotated[str, Field(pattern="^a+$")] = "a", few: Annotated[list[int], Field(min_length=1)] = (1,)
    ) -> None: ...


def test_requirements_of_pydantic_are_sentences():
    registry = Registry("patterned")
    registry("p")(Patterned)
    with pytest.raises(ExperimentError) as caught:
        registry.get("p").check({"word": "b", "few": []}, "x")
    assert caught.value.lines == (
        'x.word = "b": must be a string that matches the pattern "^a+$"',
        "x.few = []: must be a list that has at least 1 item, not 0",
    )


def test_the_fields_of_a_base_are_known_by_the_names_of_the_module_it_is_from():
    assert "Literal" not in globals()  # used by the annotation of `momentum`
    tamed = policy.get("tests.core.test_registry:Tamed")
    assert tamed.check({}) == {"momentum": "private", "rate": 0.1}
    with pytest.raises(ExperimentError, match='must be "private" or "shared"'):
        tamed.check({"momentum": "none"})


def test_a_class_without_a_required_method_is_refused_when_it_is_named():
    with pytest.raises(ExperimentError, match=": cannot be used: the policy must define take$"):
        policy.get("tests.core.test_registry:Idle")


def test_the_decorator_sets_the_traits_of_a_kind_and_no_others():
    registry = Registry("gadget", traits=("loud",))
    assert registry("a", loud=True)(lambda: 1).loud
    with pytest.raises(TypeError, match="the gadget 'b' does not accept lound; allowed: loud"):
        registry("b", lound=True)


def test_a_name_with_a_colon_imports(registry):
    registration = registry.get("tests.components:times")
    assert registration.check({"factor": 2.0}) == {"factor": 2.0}
    assert pickle.loads(pickle.dumps(registration.bind({"factor": 2.0})))(value=3) == 6


def test_a_component_takes_only_the_inputs_that_it_declares():
    registry = Registry("gadget", inputs=("value", "other", "third"))
    registry("two")(lambda third, value=1, *, c=2: (value, third, c))
    registration = registry.get("two")
    assert registration.takes == {"third": True, "value": False}
    assert registration.target(**registration.select_inputs(value=5, other=6, third=7)) == (5, 7, 2)


def test_parameters_that_toml_has_no_type_for_are_given_as_json_gives_them(registry):
    registration = registry.get("tests.components:typed")
    checked = registration.check({"sizes": [1, 2], "folder": "a/b", "level": "high"})
    assert checked == {"sizes": (1, 2), "folder": Path("a/b"), "level": components.Level.HIGH}
    assert registration.check(checked) == checked
    with pytest.raises(ExperimentError, match="x.sizes"):
        registration.check({"sizes": "12", "folder": "a", "level": "high"}, "x")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        *((f"tests.components:{name}", "") for name in ("missing", "TINY_TEST", "")),
        *((path, "") for path in ("no.such.module:f", ":f")),
        ("tests.components:misplaced", r": fedsim does not pass the argument factor, only value"),
    ],
)
def test_a_failed_import_gives_a_one_line_error(registry, path, reason):
    with pytest.raises(ExperimentError, match=f'x = "{path}": cannot be (imported|used){reason}') as caught:
        registry.get(path, "x")
    assert len(caught.value.lines) == 1


oven = Registry("oven")


@oven("gas")
def gas(*, degrees: float = 180.0, fan: bool = False):
    """One with a flame."""
    return degrees, fan


class Bake(ComponentTable):
    place, named_by, registry = "bake", "oven", oven

    oven: str = "gas"
    minutes: int = 30


def test_a_bare_string_names_the_component():
    assert Bake.model_validate("gas") == Bake(oven="gas") == Bake()


def test_the_key_name_names_the_component_in_every_table():
    assert Bake(name="gas", minutes=10) == Bake(oven="gas", minutes=10)
    assert Bake(name="gas").model_dump() == Bake().model_dump()


def test_the_parameters_are_checked_and_filled_in_with_the_components_defaults():
    bake = Bake(minutes=10, fan=True)
    assert (bake.minutes, bake.params) == (10, {"degrees": 180.0, "fan": True})
    assert bake.component() == (180.0, True)
    assert bake.model_dump() == {"oven": "gas", "minutes": 10, "degrees": 180.0, "fan": True}


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"minuts": 3}, 'bake.minuts = 3: unknown key (the oven is gas); did you mean "minutes"?'),
        ({"oven": f"{__name__}:hasty"}, "but it is a built-in key of [bake]; rename the parameter"),
        ({"oven": f"{__name__}:vague", "turns": None}, "bake.turns = None: TOML cannot express None"),
    ],
)
def test_wrong_keys_of_a_component_table_give_a_one_line_error(keys, line):
    with pytest.raises((ExperimentError, ValidationError)) as caught:
        Bake(**keys)
    assert line in str(caught.value)


def hasty(*, minutes: int = 1):
    """A component whose parameter has the name of a key of the table."""


def vague(*, turns: int | None = 2):
    """A component whose parameter may be None but has another default."""


OWN_FILE = """
import torch
import fedsim
from fedsim.data.sources import load_dataset

class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(784, 10))

def rule(updates):
    return updates.mean(0)

def attack(own_updates):
    return -own_updates

def parts(labels, n_workers):
    return [list(range(worker, len(labels), n_workers)) for worker in range(n_workers)]

def data():
    return load_dataset("mnist5k")

def loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets)
"""


@pytest.mark.parametrize(
    ("key", "module", "attribute"),
    [
        ("model", "cnn", "Net"),
        ("aggregate", "krum", "rule"),
        ("attack", "alie", "attack"),
        ("partition", "dirichlet", "parts"),
        ("data", "mnist", "data"),
        ("task", "regression", "loss"),
    ],
)
def test_a_file_may_have_the_name_of_a_component(key, module, attribute, tmp_path, monkeypatch):
    (tmp_path / f"{module}.py").write_text(OWN_FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local_modules, "folders", {})
    name, attacked = f"{module}:{attribute}", ["attack.f=1"] * (key == "attack")
    try:
        experiment = fedsim.load_experiment(None, [f"{key}={name}", *attacked])
        table = getattr(experiment, key)
        assert getattr(table, table.named_by) == name
        fedsim.run(experiment, rounds=1, engine="serial")
        with pytest.raises(fedsim.ExperimentError, match=f'= "{module}:missing": cannot be imported: .*missing'):
            fedsim.load_experiment(None, [f"{key}={module}:missing"])
    finally:
        sys.modules.pop(module, None)
