"""Numbers in CSV files with decimal commas, or with signs between thousands. Texts are arrays of PyArrow."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from fedsim.data.columns import ALIKE, DataColumn, signed_numbers
from fedsim.data.encoding import DataTable
from fedsim.errors import DataError, cut, show

GROUPS = r"[-+]?([1-9]\d{0,2}\.\d{3}|\d{1,3})"  # a number below a million, whose point may separate thousands


class Signs(NamedTuple):
    """Parameters `delimiter`, `decimal` and `thousands` of a CSV file. None: not set."""

    delimiter: str | None
    decimal: str | None
    thousands: str | None

    @property
    def are_set(self) -> bool:
        """Whether `decimal` or `thousands` is set."""
        return self.decimal is not None or self.thousands is not None

    def numbers(
        self,
        table: DataTable,
        texts: Mapping[str, Any],
        doubles: Sequence[str],
        written: Callable[[Sequence[str]], Mapping[str, Any]],
        delimiter: str,
    ) -> tuple[dict[str, np.ndarray], list[str]]:
        """Return {name: numbers} for the columns whose numbers contain signs, and texts about what was assumed.

        Args:
            table: the table, as PyArrow has read it with decimal points.
            texts: columns of text.
            doubles: names of the columns that PyArrow has read as numbers with decimals.
            written: function that returns columns as text.
            delimiter: character between columns.

        Raises DataError for ambiguous numbers, and for numbers whose signs differ from the settings.
        """
        if self.are_set:
            as_read = self.decimal == "." and self.thousands is None
            texts = {**texts, **({} if as_read else written(doubles))}
            decimal, commas = self.decimal or ("," if self.thousands == "." else "."), list[str]()
        else:
            decimal, commas = ",", _with_decimal_commas(texts) if delimiter != "," else []
            unclear = doubles if commas else [name for name in doubles if _may_be_thousands(table.columns[name])]
            for name, text in written(unclear).items():
                _require_points(table.column(name), text.to_pylist(), commas, delimiter)
            texts = {name: texts[name] for name in commas}
        columns = {name: _numbers(table.column(name), text, decimal, self.thousands) for name, text in texts.items()}
        assumed = [f"column {name} has decimal commas, such as {texts[name][0]}" for name in commas]
        return {name: numbers for name, numbers in columns.items() if numbers is not None}, assumed


def _with_decimal_commas(columns: Mapping[str, Any]) -> list[str]:
    """Return the names of text columns whose values are numbers with decimal commas.

    Returns [] if all commas could also separate thousands, as in 54,031.
    """
    numbers = {name: text for name, text in columns.items() if _all_match(text, r"\d*,\d+|\d+,?")}
    clear = [name for name, text in numbers.items() if not _all_match(text, r"[1-9]\d{0,2},\d{3}|\d{1,3}")]
    return list(numbers) if clear else []


def _all_match(text: Any, pattern: str) -> bool:
    """Whether all values match a pattern, apart from a leading sign and an exponent."""
    compute = import_module("pyarrow.compute")
    return bool(compute.all(compute.match_substring_regex(text, rf"^\s*[-+]?({pattern})([eE][-+]?\d+)?\s*$")).as_py())


def _may_be_thousands(numbers: np.ndarray) -> bool:
    """Whether numbers [n] with decimals may be whole numbers with points between thousands, such as 5.840 and 966."""
    if not (abs(numbers) < 1000).all():
        return False
    thousandths, whole = numbers * 1000, numbers % 1 == 0
    return 0 < whole.sum() < len(whole) and np.allclose(thousandths, thousandths.round())


def _require_points(column: DataColumn, texts: Sequence[str | None], commas: Sequence[str], delimiter: str) -> None:
    """Raise DataError if points in the texts of numbers may separate thousands.

    Points are ambiguous if other columns (`commas`) have decimal commas, or if all numbers have groups of three digits,
    such as 5.840 and 966. If the `delimiter` is a comma, at least one of these numbers must also end in 0.
    """
    row = next((row for row, text in enumerate(texts) if text and "." in text), None)
    if row is None:
        return
    grouped = all(re.fullmatch(GROUPS, text) for text in texts if text)
    ends_in_zero = any(re.search(r"\.\d\d0", text) for text in texts if text)
    if commas or (grouped and (delimiter != "," or ends_in_zero)):
        why = f"beside decimal commas in column {cut(commas[0])}" if commas else "beside whole numbers"
        remedy = f'set data.thousands="." {"and" if commas else "or"} data.decimal={show("," if commas else ".")}'
        raise column.error(f"contains {show(texts[row])} {why}, so the point may separate thousands,", row, remedy)


def require_one_text_per_number(column: DataColumn, text: Any) -> None:
    """Raise DataError if two texts in a column of class labels mean the same number, such as 01 and 1."""
    texts, names = import_module("pyarrow.compute").utf8_trim_whitespace(text).unique(), dict[int, str]()
    for name in texts.drop_null().to_pylist() if len(texts) > len(np.unique(column.values)) else ():
        if (other := names.setdefault(int(name), name)) != name:
            raise DataError(
                f"{column.place}: contains {show(other)} and {show(name)}, which may be one class or two; write each "
                "class in one way"
            )


def _numbers(column: DataColumn, text: Any, decimal: str, thousands: str | None) -> np.ndarray | None:
    """Return the numbers in a column of text, or None if less than half of its values are numbers.

    `decimal` is the sign before the decimals, and `thousands` the sign between thousands, or None.

    Raises DataError with the first value that is not such a number.
    """
    compute = import_module("pyarrow.compute")
    point, sign = re.escape(decimal), f"[{ALIKE.get(thousands, thousands)}]" if thousands else ""
    groups = rf"|[1-9]\d{{0,2}}({sign}\d{{3}})+" * bool(sign) + r"|[1-9]\d?(,\d\d)+,\d{3}" * (thousands == ",")
    pattern = rf"^\s*[-+]?((\d+{groups})({point}\d*)?|{point}\d+)([eE][-+]?\d+)?\s*$"
    matching = compute.match_substring_regex(text, pattern).to_numpy(zero_copy_only=False)
    if len(wrong := np.flatnonzero(matching == False)):  # noqa: E712  # None has no value
        values = [value.strip() for value in text.to_pylist() if value]
        if 2 * max((matching == True).sum(), len(signed_numbers(values))) < len(values):  # noqa: E712
            return None
        said = f"decimal {show(decimal)}" + f" and thousands {show(thousands)}" * (thousands is not None)
        problem = f"contains {show(text[int(wrong[0])].as_py())}, which is not a number with {said},"
        remedy = "correct it, or leave the column out by setting data.inputs"
        raise column.error(problem, int(wrong[0]), remedy, len(wrong))
    plain = compute.utf8_trim_whitespace(compute.replace_substring_regex(text, sign, "") if sign else text)
    plain = compute.replace_substring(plain, decimal, ".")
    with contextlib.suppress(ValueError):  # other than integers
        return plain.cast("int64").to_numpy()
    return plain.cast("float64").to_numpy()
