"""`fedsim.components` lists what `fedsim list` lists, and the functions that it replaces name it."""

from __future__ import annotations

import pytest

import fedsim
from fedsim.config.components import COMPONENTS, registry_of
from fedsim.config.files import experiments
from fedsim.config.keys import key_tables
from fedsim.config.listing import KINDS

REMOVED = ["rules", "attacks", "noises", "partitions", "policies", "processors", "slowdowns"]
REMOVED += ["pre_aggregators", "server_optimizers"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_the_names_and_the_text_of_the_command(kind, cli):
    names = {"experiments": experiments, "keys": lambda: [key.path for table in key_tables() for key in table.keys]}
    assert list(fedsim.components(kind)) == list(names.get(kind, lambda: registry_of(kind).names())())
    printed, listed = repr(fedsim.components(kind)), cli("list", kind).stdout
    assert printed.split() == listed.split()
    assert max(map(len, printed.splitlines())) <= 100 or kind == "experiments"


def test_without_a_kind_all_names_are_listed(cli):
    listed = fedsim.components()
    assert {kind: list(fedsim.components(kind)) for kind in KINDS if kind != "keys"} == listed
    assert cli("list").stdout.split()[: len(repr(listed).split())] == repr(listed).split()


@pytest.mark.parametrize("kind", COMPONENTS)
def test_a_name_has_its_description_and_the_parameters_that_experiments_set(kind, cli):
    for name, listed in fedsim.components(kind).items():
        assert repr(listed) == listed.text
        assert listed.text in cli("list", name).stdout
        assert list(listed.parameters) == registry_of(kind).get(name).parameter_names
        assert listed.text.startswith(f"{name} (")
        assert listed.summary in listed.text


def test_names_that_are_not_listed_can_be_looked_up():
    rule, model = fedsim.components("rules")["tests.components:clipped_mean"], fedsim.components("models")
    assert rule.text.startswith("tests.components:clipped_mean (aggregate.rule)")
    assert "resnet18" not in model
    assert model["torchvision:resnet18"].summary.startswith("Classification model of torchvision")


@pytest.mark.parametrize(
    ("look_up", "line"),
    [
        (lambda: fedsim.components("model"), 'kind = "model": no such kind of component; did you mean "models"?'),
        (
            lambda: fedsim.components("krum"),
            'kind = "krum": no such kind of component; write fedsim.components("rules")["krum"]',
        ),
        (
            lambda: fedsim.components("aggregators"),
            'kind = "aggregators": no such kind of component; did you mean "rules" or "pre-aggregators"?',
        ),
        (
            lambda: fedsim.components("graphs"),
            'kind = "graphs": no such kind of component; write fedsim.components("topologies")',
        ),
        (lambda: fedsim.components("fedadam"), 'kind = "fedadam": no such kind of component; write server=adam'),
        (
            lambda: fedsim.components("losses"),
            'kind = "losses": no such kind of component; write fedsim.components("tasks")',
        ),
        (
            lambda: fedsim.components("rules")["nnm"],
            '"nnm": is not in the list of rules; write fedsim.components("pre-aggregators")["nnm"]',
        ),
        (
            lambda: fedsim.components("rules")["krumm"],
            'aggregation rule = "krumm": no such aggregation rule; did you mean "krum"?',
        ),
        (
            lambda: fedsim.components("keys")["clock.slowdown.factor"],
            '"clock.slowdown.factor": is a parameter of stragglers; write fedsim.components("slowdowns")["stragglers"]',
        ),
        (lambda: fedsim.components("keys")["race.zzz"], '"race.zzz": is not in the list of keys; allowed: race.runs'),
        (lambda: fedsim.components("keys")["roundz"], '"roundz": is not in the list of keys; did you mean "rounds"?'),
    ],
)
def test_an_unknown_name_is_one_line_with_the_nearest(look_up, line):
    with pytest.raises(fedsim.ExperimentError) as caught:
        look_up()
    assert str(caught.value) == line


@pytest.mark.parametrize("name", [*REMOVED, "datasets", "list_models"])
def test_a_removed_function_names_the_call_that_replaces_it(name):
    with pytest.raises(AttributeError) as caught:
        getattr(fedsim, name)
    kind = name.removeprefix("list_").replace("_", "-")
    assert str(caught.value) == f"module 'fedsim' has no attribute {name!r}; write fedsim.components(\"{kind}\")"
    assert fedsim.components(kind)
