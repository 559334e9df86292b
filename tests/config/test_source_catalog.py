"""Keys and components that are read from the source equal those of the real tables and registries."""

from __future__ import annotations

import pytest

from fedsim.config import experiment, source_catalog
from fedsim.config.components import COMPONENTS, registry_of
from fedsim.config.keys import table_of
from fedsim.config.source_catalog import experiment_table, source_components
from fedsim.core.base_table import ComponentTable


@pytest.mark.parametrize("kind", COMPONENTS)
def test_the_source_has_every_component_with_its_parameters(kind):
    from_registry, from_source = (
        {
            registration.name: (set(registration.parameter_names), registration.accepts_any)
            for registration in components
        }
        for components in (registry_of(kind), source_components(kind).values())
    )
    assert from_source == from_registry
    assert source_catalog.title_of(kind) == registry_of(kind).kind


def test_the_source_has_every_table_with_its_keys():
    def compare(source, table):
        assert source.keys == tuple(table.model_fields)
        annotations = {key: field.annotation for key, field in table.model_fields.items()}
        inner = {key: below for key, each in annotations.items() if (below := table_of(each))}
        assert set(source.tables) == {key for key, below in inner.items() if below is annotations[key]}
        assert set(source.lists) == inner.keys() - source.tables.keys()
        for key, below in {**source.tables, **source.lists}.items():
            compare(below, inner[key])
        if not issubclass(table, ComponentTable):
            assert source.kind is None
            return
        default = table.model_fields[table.named_by].default
        assert registry_of(source.kind) is table.registry
        assert (source.named_by, source.alternatives) == (table.named_by, table.alternatives)
        assert source.default == (default if isinstance(default, str) else None)
        for value in ("name", ["name"], {"a": 1}, 3):
            assert source.is_name(value) == table.is_name(value)

    compare(experiment_table(), experiment.Experiment)
