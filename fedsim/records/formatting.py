"""Formatting of values and numbers for reports and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedsim.config.experiment import Experiment
from fedsim.config.tables import component_tables
from fedsim.core.confidence import fixed
from fedsim.core.input_limits import leaves_of
from fedsim.errors import show_bytes
from fedsim.records.record import RoundRecord, score_in

# keys whose values name components
COMPONENT_KEYS = {table.named_by for table in component_tables(Experiment).values()}
MISSING = "\N{EN DASH}"

# Plain names of keys.
NAMES = {
    "aggregate": "rule",
    "aggregate.rule": "rule",
    "data": "data set",
    "data.name": "data set",
    "local": "local training",
    "local.lr": "learning rate",
    "partition.name": "partition",
    "server.lr": "server learning rate",
}


def key_name(key: str) -> str:
    """Return a plain English name for a setting, such as "local batch size" for "local.batch_size"."""
    return NAMES.get(key) or key.removesuffix(".name").replace(".", " ").replace("_", " ")


def comparison_title(keys: Sequence[str], score: str = "Test accuracy") -> str:
    """Return the title of a comparison, such as "Test accuracy by rule and attack"."""
    *others, last = map(key_name, keys or ["seed"])
    return f"{score} by {', '.join(others)} and {last}" if others else f"{score} by {last}"


def label(value: Any) -> str:
    """Return a compared value as text: ["nnm", "median"] is "nnm + median", {rule = "krum", f = 2} is "krum (f = 2)".

    A dict with the key `label` is shown as this label.
    """
    if isinstance(value, list):
        return " + ".join(map(label, value))
    if isinstance(value, Mapping) and isinstance(value.get("label"), str):
        return value["label"]
    if isinstance(value, Mapping):
        names = [label(item) for key, item in value.items() if key in COMPONENT_KEYS]
        others = ", ".join(f"{key} = {label(item)}" for key, item in value.items() if key not in COMPONENT_KEYS)
        return " ".join([*names, f"({others})" if names and others else others]).strip()
    return prepared(value)


def prepared(value: Any) -> str:
    """Return a value as text, written as in an experiment file but without quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(prepared, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {prepared(item)}" for key, item in value.items()) + "}"
    return "none" if value is None else str(value)


def flatten(table: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return all values of nested dicts as pairs (dotted key, value as text)."""
    return [(key, prepared(value)) for key, value in leaves_of(table)]


def score_text(record: RoundRecord) -> str:
    """Return the test result as text: "test accuracy 0.9312", or "test loss 0.0518" for a task without accuracy."""
    score = score_in([record])
    return f"{score.label.lower()} {(fraction if score.share else number)(score.read(record))}"


def race_caveat(runs: int) -> str:
    """Return the warning about results of mode "race". `runs` is how often the race was repeated."""
    if runs == 1:
        return "a race is not repeatable, and a single repetition shows no spread; set race.runs=5"
    return (
        f"a race is not repeatable: numbers are means over {runs} repetitions, and the model is that of the first one"
    )


def fraction(value: float | None) -> str:
    """Return a number between 0 and 1, such as an accuracy, as text with four decimals."""
    return MISSING if value is None else fixed(value)


def number(value: float | None) -> str:
    """Return a number, such as a loss, as text with four decimals, or in scientific notation if very small or large."""
    if value is None:
        return MISSING
    return fixed(value) if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.3e}"


def seconds(value: float | None) -> str:
    """Return a duration in seconds as text with a unit: "250 ms", "12.3 s", "5 min" or "1 h 10 min"."""
    if value is None:
        return MISSING
    if value < 1:
        return f"{value * 1000:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    hours, minutes = divmod(round(value / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def size(value: float | None) -> str:
    """Return a number of bytes as text with a unit, such as "1.5 MB" (powers of 1000)."""
    return MISSING if value is None else show_bytes(value)


def amount(value: float | None) -> str:
    """Return a number as text with four significant digits, or as a whole number from 1000, such as "12,346"."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def percent(value: float | None) -> str:
    """Return a fraction as a percentage, such as "12.5 %" for 0.125."""
    return MISSING if value is None else f"{100 * value:.3g} %"
