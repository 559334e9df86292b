"""Tables of an experiment that select a component, and the keys that a name may mean."""

from __future__ import annotations

from functools import reduce

import pytest

from fedsim.config.components import COMPONENTS, registry_of
from fedsim.config.experiment import Experiment
from fedsim.config.tables import component_tables, keys_of_component, keys_of_tables
from fedsim.core.base_table import ComponentTable

TABLES = component_tables(Experiment)


def test_every_table_that_selects_a_component_is_found_at_its_key():
    in_experiment = [table for table in Experiment().tables() if isinstance(table, ComponentTable)]
    assert {place: type(reduce(getattr, place.split("."), Experiment())) for place in TABLES} == TABLES
    assert {type(table) for table in in_experiment} == set(TABLES.values())


@pytest.mark.parametrize("place", TABLES)
def test_a_component_is_found_by_the_key_of_its_table(place):
    table, key = TABLES[place], f"{place}.{TABLES[place].named_by}"
    kinds = [kind for kind in COMPONENTS if registry_of(kind) is table.registry]
    assert [kind for kind in kinds if key in COMPONENTS[kind][0].split(", ")] == kinds != []
    assert all(key in ", ".join(keys_of_component(name)) for name in table.registry.names())


@pytest.mark.parametrize("place", TABLES)
def test_no_component_has_a_parameter_that_its_table_has_as_a_key(place):
    own_keys = TABLES[place].model_fields.keys() - {TABLES[place].named_by, "f"}  # f may be used by both
    for registration in TABLES[place].registry:
        assert not own_keys & set(registration.parameter_names), registration.name


@pytest.mark.parametrize(
    ("tables", "key", "expected"),
    [
        ({}, "lr", ["local.lr", "server.lr"]),
        ({}, "every", ["worker_evaluation.every", "checkpoint.every"]),
        ({"local": "scaffold", "server": "adam"}, "beta1", ["server.beta1"]),
        ({"local": {"algorithm": "adam"}}, "beta1", ["local.beta1"]),
        ({}, "beta1", ["local.beta1", "server.beta1"]),
    ],
)
def test_a_name_may_mean_keys_of_the_selected_components_or_else_of_all_components(tables, key, expected):
    assert keys_of_tables(Experiment, tables)[key] == expected
