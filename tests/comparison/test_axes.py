from __future__ import annotations

import numpy as np
import pytest

from fedsim import ExperimentError
from fedsim.comparison.axes import (
    IS_ID,
    axes_of_tables,
    changes_of,
    describe_point,
    label,
    readable_id,
    split_at_commas,
    split_words,
)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("0, 1 ,2", ["0", " 1 ", "2"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("[1,2]", ["[1,2]"]),
        ('[["nnm","median"],"krum"]', ['[["nnm","median"],"krum"]']),
        ('{rule="krum",f=4},mean', ['{rule="krum",f=4}', "mean"]),
        ('"a,b",c', ['"a,b"', "c"]),
        ("'a,]b',c", ["'a,]b'", "c"]),
        ("a,", ["a", ""]),
        ("", [""]),
    ],
)
def test_commas_inside_brackets_braces_and_quotes_separate_nothing(text, pieces):
    assert split_at_commas(text) == pieces


def test_words_with_commas_are_axes_and_the_others_are_left():
    axes, others = split_words(
        ["aggregate.rule=mean,median", "rounds=5", "seed=0, 1", "aggregate.weights=[1,2]", "local.lr=0.1,1e-2"]
    )
    assert axes == {"aggregate.rule": ["mean", "median"], "seed": [0, 1], "local.lr": [0.1, 0.01]}
    assert others == ["rounds=5", "aggregate.weights=[1,2]"]


def test_of_two_words_with_one_key_the_later_counts():
    assert split_words(["attack.name=none,nan,inf"]) == ({"attack.name": ["none", "nan", "inf"]}, [])
    assert split_words(["policy.s=0,inf"]) == ({"policy.s": [0, "inf"]}, [])
    assert split_words(["seed=0,1", "seed=2,3"]) == ({"seed": [2, 3]}, [])
    assert split_words(["seed=0,1", "seed=2"]) == ({}, ["seed=2"])
    assert split_words(["seed=2", "seed=0,1"]) == ({"seed": [0, 1]}, [])


def test_values_of_words_may_be_lists_and_tables():
    axes, _ = split_words(['aggregate={rule="krum",f=4},mean', 'aggregate.rule=["nnm","median"],krum'])
    assert axes == {"aggregate": [{"rule": "krum", "f": 4}, "mean"], "aggregate.rule": [["nnm", "median"], "krum"]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed=0,"], '"seed=0,": a value is missing'),
        (["seed=0,,1"], '"seed=0,,1": a value is missing'),
        (["seed=0,1,0"], "seed: 0 is repeated"),
        (["=1,2"], '"=1,2": expected key=value'),
    ],
)
def test_a_wrong_word_is_one_clear_line(words, message):
    with pytest.raises(ExperimentError) as caught:
        split_words(words)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_table_has_dotted_keys_or_nested_tables():
    dotted = axes_of_tables({"aggregate.rule": ["mean", "median"], "seed": [0, 1]})
    nested = axes_of_tables({"aggregate": {"rule": ["mean", "median"]}, "seed": [0, 1]})
    assert dotted == nested == {"aggregate.rule": ["mean", "median"], "seed": [0, 1]}


def test_values_become_what_json_has():
    axes = axes_of_tables({"seed": tuple(np.arange(2)), "aggregate.rule": [("nnm", "median")], "a": [{"b": (1,)}]})
    assert axes == {"seed": [0, 1], "aggregate.rule": [["nnm", "median"]], "a": [{"b": [1]}]}
    assert [type(value) for value in axes["seed"]] == [int, int]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([1], r"grid = \[1\]: must be a table of lists"),
        ({"seed": 3}, "grid.seed = 3: must be a list of one or more values"),
        ({"seed": []}, r"grid.seed = \[\]: must be a list of one or more values"),
        ({"seed": "012"}, 'grid.seed = "012": must be a list'),
        ({"seed": [0, 0]}, "grid.seed: 0 is repeated"),
        ({"a..b": [0]}, "grid.a..b: is no key of an experiment"),
        ({"a.b": [0], "a": {"b": [1]}}, "grid.a.b: is given twice"),
        ({"seed": [None]}, r"grid.seed\[0\] = None: must be a string, a number, a list or a table"),
    ],
)
def test_a_wrong_table_is_one_clear_line(tables, message):
    with pytest.raises(ExperimentError, match=f"^{message}"):
        axes_of_tables(tables)


def test_one_one_point_nought_and_true_are_three_values():
    assert axes_of_tables({"x": [1, 1.0, True]}) == {"x": [1, 1.0, True]}


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
def test_labels_are_short(value, text):
    assert label(value) == text


def test_a_point_reads_as_one_would_type_it():
    assert describe_point({"aggregate.rule": "krum", "seed": 0}) == "aggregate.rule=krum seed=0"


VARIANTS = [
    {"label": "sync", "sync": "gradients"},
    {"label": "fed buff", "policy": {"name": "fedbuff", "k": 5}, "local.lr": 0.1, "clock": {"noise": {"sigma": 1.0}}},
]


def test_a_variant_changes_keys_of_several_tables():
    sync, buffered = axes_of_tables({"variant": VARIANTS})["variant"]
    assert changes_of("variant", sync) == [(["sync"], "gradients")]
    assert changes_of("variant", buffered) == [
        (["policy", "name"], "fedbuff"),
        (["policy", "k"], 5),
        (["local", "lr"], 0.1),
        (["clock", "noise", "sigma"], 1.0),
    ]
    assert changes_of("variant", {"label": "base"}) == []


def test_the_label_of_a_table_changes_nothing():
    (slow,) = axes_of_tables({"local": [{"label": "slow", "lr": 0.01}]})["local"]
    assert changes_of("local", slow) == [(["local", "lr"], 0.01)]
    assert label(slow) == "slow"


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"variant": ["asgd"]}, r'grid.variant\[0\] = "asgd": must be a table with a label, such as {label = "b", '),
        (
            {"variant": [VARIANTS[0], {"sync": "gradients"}]},
            r"grid.variant\[1\] = {sync .*: must be a table with a lab",
        ),
        ({"variant": [{"label": 3}]}, r"grid.variant\[0\].label = 3: must be a text"),
        ({"local": [{"label": " ", "lr": 1.0}]}, r'grid.local\[0\].label = " ": must be a text'),
        ({"local": [{"label": "a", "lr": 1.0}, {"label": "a"}]}, 'grid.local: the label "a" is repeated'),
    ],
)
def test_a_wrong_label_is_one_clear_line(tables, message):
    with pytest.raises(ExperimentError, match=f"^{message}"):
        axes_of_tables(tables)


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
def test_ids_are_readable_names_for_folders(point, name):
    assert readable_id(point) == name
    assert IS_ID.match(name)


@pytest.mark.parametrize("name", ["..", "../x", "a/b", "", ".hidden", "a\n", "/etc"])
def test_what_could_lead_elsewhere_is_no_id(name):
    assert not IS_ID.match(name)
