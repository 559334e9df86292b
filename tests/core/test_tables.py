from __future__ import annotations

import pytest
from pydantic import ValidationError

from fedsim import ExperimentError
from fedsim.core.base_table import PlugTable
from fedsim.core.registry import Registry

oven = Registry("oven")


@oven("gas")
def gas(*, degrees: float = 180.0, fan: bool = False):
    """One with a flame."""
    return degrees, fan


class Bake(PlugTable):
    place, named_by, registry = "bake", "oven", oven

    oven: str = "gas"
    minutes: int = 30


def test_a_bare_string_names_the_plug():
    assert Bake.model_validate("gas") == Bake(oven="gas") == Bake()


def test_the_key_name_names_the_plug_in_every_table():
    assert Bake(name="gas", minutes=10) == Bake(oven="gas", minutes=10)
    assert Bake(name="gas").model_dump() == Bake().model_dump()


def test_the_parameters_are_checked_and_filled_in_with_the_plugs_defaults():
    bake = Bake(minutes=10, fan=True)
    assert (bake.minutes, bake.params) == (10, {"degrees": 180.0, "fan": True})
    assert bake.component() == (180.0, True)
    assert bake.model_dump() == {"oven": "gas", "minutes": 10, "degrees": 180.0, "fan": True}


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"minuts": 3}, 'bake.minuts = 3: unknown key (the oven is gas); did you mean "minutes"?'),
        ({"oven": f"{__name__}:hasty"}, "bake.minutes: is a key of every [bake]; give the parameter of"),
        ({"oven": f"{__name__}:vague", "turns": None}, "bake.turns = None: TOML cannot express None"),
    ],
)
def test_wrong_keys_of_a_plug_table_are_one_line(keys, line):
    with pytest.raises((ExperimentError, ValidationError)) as caught:
        Bake(**keys)
    assert line in str(caught.value)


def hasty(*, minutes: int = 1):
    """Its parameter is called as a key of the table is."""


def vague(*, turns: int | None = 2):
    """Its parameter may be None, but is not so by itself."""
