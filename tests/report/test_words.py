from __future__ import annotations

import pytest

from fedsim.report import words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("krum", "krum"),
        (0.5, "0.5"),
        (True, "true"),
        (["nnm", "trimmed_mean"], "nnm + trimmed_mean"),
        ({"rule": "krum", "f": 2}, "krum (f = 2)"),
        ({"rule": "krum"}, "krum"),
        ({"lr": 0.1, "momentum": 0.9}, "lr = 0.1, momentum = 0.9"),
        (["nnm", {"rule": "krum", "f": 2}], "nnm + krum (f = 2)"),
        (None, "none"),
    ],
)
def test_values_of_axes(value, text):
    assert words.label(value) == text


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("aggregate.rule", "rule"),
        ("attack.name", "attack"),
        ("clock.speed.name", "clock speed"),
        ("local.batch_size", "local batch size"),
        ("seed", "seed"),
        ("", ""),
    ],
)
def test_names_of_keys(key, name):
    assert words.key_name(key) == name


def test_the_title_of_a_comparison():
    titles = [words.comparison_title(keys) for keys in ([], ["aggregate.rule"], ["aggregate.rule", "attack", "sync"])]
    assert titles == ["Test accuracy by seed", "Test accuracy by rule", "Test accuracy by rule, attack and sync"]


def test_nested_tables_become_dotted_keys():
    table = {"a": {"b": {"c": 1}, "d": [{"e": True}]}, "f": {}}
    assert list(words.flatten(table)) == [("a.b.c", "1"), ("a.d", "[{e = true}]"), ("f", "{}")]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (3.14159, "3.14 s"), (119, "119 s"), (600, "10 min"), (7260, "2 h 1 min")],
)
def test_durations(seconds, text):
    assert words.seconds(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB")])
def test_sizes(count, text):
    assert words.size(count) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0.0000"), (1.23456, "1.2346"), (1e-7, "1.000e-07"), (3e8, "3.000e+08")]
)
def test_losses(value, text):
    assert words.number(value) == text


def test_what_is_missing_is_a_dash():
    for say in (words.fraction, words.number, words.seconds, words.size, words.percent):
        assert say(None) == words.MISSING
