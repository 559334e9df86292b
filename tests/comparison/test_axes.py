from __future__ import annotations

import re

import numpy as np
import pytest

from fedsim import ExperimentError
from fedsim.comparison.axes import (
    apply_words,
    axes_of_tables,
    changes_of,
    label,
    readable_id,
    split_at_commas,
    split_labels,
    split_words,
)
from fedsim.comparison.plan import plan_comparison
from fedsim.comparison.stored import ID

VARIANTS = [
    {"label": "sync", "sync": "gradients"},
    {"label": "fed buff", "policy": {"name": "fedbuff", "k": 5}, "local.lr": 0.1, "clock": {"noise": {"sigma": 1.0}}},
]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a", ["a"]),
        ("0, 1 ,2", ["0", " 1 ", "2"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ('[["nnm","median"],"krum"]', ['[["nnm","median"],"krum"]']),
        ('{rule="krum",f=4},mean', ['{rule="krum",f=4}', "mean"]),
        ("'a,]b',\"c,d\"", ["'a,]b'", '"c,d"']),
        ("a,", ["a", ""]),
        ("", [""]),
    ],
)
def test_commas_inside_brackets_braces_and_quotes_do_not_separate(text, pieces):
    assert split_at_commas(text) == pieces


@pytest.mark.parametrize(
    ("words", "axes", "others"),
    [
        (["rule=mean,median", "rounds=5", "w=[1,2]"], {"rule": ["mean", "median"]}, ["rounds=5", "w=[1,2]"]),
        (["seed=0, 1", "lr=0.1,1e-2", "s=0,inf"], {"seed": [0, 1], "lr": [0.1, 0.01], "s": [0, "inf"]}, []),
        (
            ['a={rule="krum",f=4},mean', 'b=["nnm"],x'],
            {"a": [{"rule": "krum", "f": 4}, "mean"], "b": [["nnm"], "x"]},
            [],
        ),
    ],
)
def test_words_with_commas_become_axes(words, axes, others):
    assert split_words(words) == (axes, others)


@pytest.mark.parametrize(
    "words", [["seed=0,1", "seed=2,3"], ["seed=0,1", "seed=2"], ["seed=2", "seed=0,1"], ["seed=2", "seed=3"]]
)
def test_a_key_twice_is_refused(words):
    with pytest.raises(ExperimentError, match="^seed: is set twice; remove one of the two$"):
        apply_words({}, words)
    assert apply_words({"seed": [0, 1]}, ["seed=2"])[0] == {}


def test_a_comparison_table_has_dotted_keys_or_nested_tables():
    dotted = axes_of_tables({"aggregate.rule": ["mean", "median"], "seed": [0, 1]})
    nested = axes_of_tables({"aggregate": {"rule": ["mean", "median"]}, "seed": [0, 1]})
    named = axes_of_tables({"aggregate.name": ["mean", "median"], "seed": [0, 1]})
    assert dotted == nested == named == {"aggregate.rule": ["mean", "median"], "seed": [0, 1]}


def test_values_become_json_values():
    axes = axes_of_tables({"seed": tuple(np.arange(2)), "a": [("nnm", "median"), {"b": (1,)}], "x": [1, 1.0, True]})
    assert axes == {"seed": [0, 1], "a": [["nnm", "median"], {"b": [1]}], "x": [1, 1.0, True]}
    assert [type(value) for value in axes["seed"]] == [int, int]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([1], r"comparison = \[1\]: must be a table of lists"),
        ({"seed": 3}, "comparison.seed = 3: must be a list with at least one value"),
        ({"seed": []}, r"comparison.seed = \[\]: must be a list with at least one value"),
        ({"seed": "012"}, 'comparison.seed = "012": must be a list'),
        ({"seed": [0, 0]}, "comparison.seed: the value 0 is repeated"),
        ({"a..b": [0]}, "comparison.a..b: has an empty name before or after a dot"),
        ({"a.b": [0], "a": {"b": [1]}}, "comparison.a.b: is set twice"),
        ({"seed": [None]}, r"comparison.seed\[0\] = None: must be a string, a number, a list or a table"),
        (
            {"variant": ["asgd"]},
            r'comparison.variant\[0\] = "asgd": must be a table with a label, such as {label = "b", ',
        ),
        (
            {"variant": [VARIANTS[0], {"sync": "gradients"}]},
            r"comparison.variant\[1\] = {sync .*: must be a table with a lab",
        ),
        ({"variant": [{"label": "a\nb"}]}, r"comparison.variant.label = .*: contains unprintable characters"),
        ({"variant": [{"label": 3}]}, r"comparison.variant\[0\].label = 3: must be a non-empty string"),
        ({"local": [{"label": " ", "lr": 1.0}]}, r'comparison.local\[0\].label = " ": must be a non-empty string'),
        ({"local": [{"label": "a", "lr": 1.0}, {"label": "a"}]}, 'comparison.local: the label "a" is repeated'),
    ],
)
def test_a_wrong_table_raises_an_error_with_its_place(tables, message):
    with pytest.raises(ExperimentError, match=f"^{message}"):
        axes_of_tables(tables)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"label": "my own", "lr": 0.1}, "my own"),
        ("krum", "krum"),
        (0.1, "0.1"),
        (True, "true"),
        (["nnm", "median"], "nnm+median"),
        ([], "none"),
        ({"f": 4, "rule": "krum"}, "krum,f=4"),
        ({"lr": 0.1, "momentum": 0.9}, "lr=0.1,momentum=0.9"),
        ({}, "base"),
    ],
)
def test_a_value_has_a_short_label(value, text):
    assert label(value) == text


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("none,alie,z=1.5", ["none", "alie,z=1.5"]),
        ("alie,z=1.5,none", ["alie,z=1.5", "none"]),
        ("alie,none", ["alie", "none"]),
        ("alie,", ["alie", ""]),
        ("", [""]),
    ],
)
def test_labels_with_commas_are_not_split(text, labels):
    assert split_labels(text, ["none", {"name": "alie", "z": 1.5}]) == labels


@pytest.mark.parametrize("key", ["aggregate.rule", "processors", "downlink"])
def test_a_printed_list_of_names_can_be_typed(key):
    names = ["nnm", "median"] if key == "aggregate.rule" else ["top_k", "qsgd"]
    typed, listed = (plan_comparison(None, {key: [value]}).runs[0].tables for value in (label(names), names))
    assert typed == listed


@pytest.mark.parametrize(
    ("key", "value", "changes"),
    [
        ("variant", VARIANTS[0], {"sync": "gradients"}),
        ("variant", VARIANTS[1], {"policy.name": "fedbuff", "policy.k": 5, "local.lr": 0.1, "clock.noise.sigma": 1.0}),
        ("variant", {"label": "base"}, {}),
        ("local", {"label": "slow", "lr": 0.01}, {"local.lr": 0.01}),
    ],
)
def test_a_table_changes_its_keys_without_the_label(key, value, changes):
    assert {".".join(path): each for path, each in changes_of(key, value)} == changes


@pytest.mark.parametrize(
    ("point", "name"),
    [
        ({"variant": VARIANTS[1], "seed": 0}, "fed_buff-seed0"),
        ({"aggregate.rule": "krum", "local.lr": 0.1, "seed": 0}, "krum-lr0.1-seed0"),
        ({"aggregate.rule": ["nnm", "median"]}, "nnm+median"),
        ({"local.nesterov": True}, "nesterov=true"),
        ({"model": "my.models:net"}, "my.models_net"),
        ({"x": "../../etc"}, "etc"),
        ({"x": "-"}, "run"),
    ],
)
def test_ids_are_readable_folder_names(point, name):
    assert readable_id(point) == name
    assert re.fullmatch(ID, name)


@pytest.mark.parametrize("name", ["..", "../x", "a/b", "", ".hidden", "a\n", "/etc"])
def test_a_path_to_another_folder_is_not_an_id(name):
    assert not re.fullmatch(ID, name)
