"""Text of values and numbers."""

from __future__ import annotations

import pytest

from fedsim.records import formatting as fmt


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (fmt.label, "krum", "krum"),
        (fmt.label, 0.5, "0.5"),
        (fmt.label, True, "true"),
        (fmt.label, None, "none"),
        (fmt.label, ["nnm", "trimmed_mean"], "nnm + trimmed_mean"),
        (fmt.label, {"rule": "krum"}, "krum"),
        (fmt.label, {"lr": 0.1, "momentum": 0.9}, "lr = 0.1, momentum = 0.9"),
        (fmt.label, ["nnm", {"rule": "krum", "f": 2}], "nnm + krum (f = 2)"),
        (fmt.key_name, "aggregate.rule", "rule"),
        (fmt.key_name, "attack.name", "attack"),
        (fmt.key_name, "clock.slowdown.name", "clock slowdown"),
        (fmt.key_name, "local.batch_size", "local batch size"),
        (fmt.key_name, "", ""),
        (fmt.comparison_title, [], "Test accuracy by seed"),
        (fmt.comparison_title, ["aggregate.rule"], "Test accuracy by rule"),
        (fmt.comparison_title, ["aggregate.rule", "attack", "sync"], "Test accuracy by rule, attack and sync"),
        (fmt.seconds, 0.0123, "12.3 ms"),
        (fmt.seconds, 3.14159, "3.14 s"),
        (fmt.seconds, 0.999, "999 ms"),
        (fmt.seconds, 119, "119 s"),
        (fmt.seconds, 120, "2 min"),
        (fmt.seconds, 170, "3 min"),
        (fmt.seconds, 600, "10 min"),
        (fmt.seconds, 7260, "2 h 1 min"),
        (fmt.size, 0, "0 B"),
        (fmt.size, 1500, "1.5 kB"),
        (fmt.size, 2.5e9, "2.5 GB"),
        (fmt.number, 0.0, "0.0000"),
        (fmt.number, 1.23456, "1.2346"),
        (fmt.number, 0.001, "0.0010"),
        (fmt.number, 0.0009, "9.000e-04"),
        (fmt.number, 99999.0, "99999.0000"),
        (fmt.number, 1e5, "1.000e+05"),
        (fmt.amount, 1000, "1,000"),
        (fmt.amount, 999.96, "1000"),
        (fmt.percent, 0.125, "12.5 %"),
        *((show, None, fmt.MISSING) for show in (fmt.fraction, fmt.number, fmt.seconds, fmt.size, fmt.percent)),
    ],
)
def test_a_value_is_shown_as_text(show, value, text):
    assert show(value) == text


def test_nested_tables_become_dotted_keys():
    table = {"a": {"b": {"c": 1}, "d": [{"e": True}]}, "f": {}}
    assert fmt.flatten(table) == [("a.b.c", "1"), ("a.d", "[{e = true}]")]
