"""The list of keys: every key of an experiment, with its type, default and description."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from fedsim.cli.main import app
from fedsim.config.experiment import Experiment
from fedsim.config.keys import key_tables

TABLES = key_tables()
KEYS = {key.path: key for table in TABLES for key in table.keys}


@pytest.mark.parametrize("key", KEYS.values(), ids=lambda key: key.path)
def test_every_key_has_a_description_of_whole_sentences(key):
    assert key.description.endswith((".", "...")), key


def test_every_table_has_a_description():
    assert [table.path for table in TABLES if not table.description] == [""]


def test_all_keys_of_an_experiment_are_listed():
    assert set(Experiment.model_fields) == {path.partition(".")[0].removesuffix("[]") for path in KEYS}


@pytest.mark.parametrize(
    ("path", "type", "default"),
    [
        ("rounds", "integer above 0", "10"),
        ("cohort", "integer above 0, or unset", "unset"),
        ("processes", "integer above 0 and at most 1024, or unset", "unset"),
        ("data.validation_fraction", "number at least 0 and below 1", "0.0"),
        ("model.name", "name", '"net"'),
        ("sync", '`"parameters"`, `"gradients"`, `"post_local"`', '"parameters"'),
        ("processors", "list of: name or table", "[]"),
        ("processors[].name", "name", "required"),
        ("aggregate.rule", "name or list of: name or table", '"weighted_mean"'),
        ("clock.departures", "table", "{}"),
        ("local.schedule.per", '`"round"`, `"step"`', '"round"'),
    ],
)
def test_a_key_has_this_type_and_default(path, type, default):
    assert (KEYS[path].type, KEYS[path].default) == (type, default)


def test_the_command_lists_the_keys():
    done = CliRunner().invoke(app, ["list", "keys"])
    assert done.exit_code == 0, done.output
    assert "  rounds = 10  (integer above 0)\n      Number of rounds.\n" in done.stdout
    assert "fedsim list partitions" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
