"""Tables of an experiment that select a component, and the keys that a name may mean."""

from __future__ import annotations

from functools import reduce

import pytest

from fedsim.config.components import COMPONENTS, registry_of
from fedsim.config.experiment import Experiment
from fedsim.config.tables import component_tables, keys_called, owners_of, settings_of
from fedsim.core.base_table import ComponentTable

TABLES = component_tables(Experiment)


def test_every_table_that_selects_a_component_is_found_at_its_key():
    in_experiment = [table for table in Experiment().tables() if isinstance(table, ComponentTable)]
    assert {place: type(reduce(getattr, place.split("."), Experiment())) for place in TABLES} == TABLES
    assert {type(table) for table in in_experiment} == set(TABLES.values())


# of two tables with the same components, hints name that of the workers, not that of the top level of groups
@pytest.mark.parametrize("place", [place for place in TABLES if not place.startswith("top_")])
def test_a_component_is_found_by_the_key_of_its_table(place):
    table, key = TABLES[place], f"{place}.{TABLES[place].named_by}"
    kinds = [kind for kind in COMPONENTS if registry_of(kind) is table.registry]
    assert [kind for kind in kinds if key in COMPONENTS[kind][0].split(", ")] == kinds != []
    key = key.removesuffix(".name")
    assert all(f"{key}={name}" in settings_of(name) for name in table.registry.names())


@pytest.mark.parametrize("place", TABLES)
def test_no_component_has_a_parameter_that_its_table_has_as_a_key(place):
    own_keys = TABLES[place].model_fields.keys() - {TABLES[place].named_by, "f"}  # f may be used by both
    for registration in TABLES[place].registry:
        assert not own_keys & set(registration.parameter_names), registration.name


def test_a_name_may_mean_keys_and_parameters_of_the_default_components():
    assert keys_called(Experiment, "lr") == ["local.lr", "server.lr"]
    assert keys_called(Experiment, "every") == ["worker_evaluation.every", "checkpoint.every"]
    assert keys_called(Experiment, "beta1") == []
    owners = "it may be local.beta1 of adam, adamw, muon or server.beta1 of adam, yogi, adagrad"
    assert owners_of(Experiment, "beta_1") == owners
