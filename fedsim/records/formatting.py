"""Formatting of values and numbers for reports and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedsim.config.source_catalog import component_tables
from fedsim.core.confidence import fixed
from fedsim.core.input_limits import leaves_of
from fedsim.errors import show_bytes
from fedsim.records.record import RoundRecord, score_in

COMPONENT_KEYS = {table.named_by for table in component_tables().values()}  # keys whose values are names of components
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
    """A key of an experiment in plain English: `attack.name` is "attack", `local.batch_size` "local batch size"."""
    return NAMES.get(key) or key.removesuffix(".name").replace(".", " ").replace("_", " ")


def comparison_title(keys: Sequence[str], score: str = "Test accuracy") -> str:
    """Return the title of a comparison: "Test accuracy by rule and attack"."""
    *others, last = map(key_name, keys or ["seed"])
    return f"{score} by {', '.join(others)} and {last}" if others else f"{score} by {last}"


def label(value: Any) -> str:
    """Return a value of an axis: `["nnm", "median"]` is `nnm + median`; `{rule = "krum", f = 2}` is `krum (f = 2)`.

    The `label` of a table, if it has one.
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
    """Return a value as in an experiment file, without quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(prepared, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {prepared(item)}" for key, item in value.items()) + "}"
    return "none" if value is None else str(value)


def flatten(table: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the dotted keys of nested tables with their values."""
    return [(key, prepared(value)) for key, value in leaves_of(table)]


def score_text(record: RoundRecord) -> str:
    """`test accuracy 0.9312`, or of a task without accuracy `test loss 0.0518`."""
    score = score_in([record])
    return f"{score.label.lower()} {(fraction if score.share else number)(score.read(record))}"


def fraction(value: float | None) -> str:
    """Return an accuracy, a rate."""
    return MISSING if value is None else fixed(value)


def number(value: float | None) -> str:
    """Return a loss: four decimals, or four digits if it is very small or large."""
    if value is None:
        return MISSING
    return fixed(value) if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.3e}"


def seconds(value: float | None) -> str:
    """Return a duration with a unit."""
    if value is None:
        return MISSING
    if value < 1:
        return f"{value * 1000:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    hours, minutes = divmod(round(value / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def size(value: float | None) -> str:
    """Return a number of bytes, in powers of a thousand."""
    return MISSING if value is None else show_bytes(value)


def amount(value: float | None) -> str:
    """Return a number with four digits, or all digits before the decimal point."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def percent(value: float | None) -> str:
    """Return a fraction as a percentage."""
    return MISSING if value is None else f"{100 * value:.3g} %"
