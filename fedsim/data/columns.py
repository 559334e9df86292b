"""Named columns of data sets: their values as arrays, their roles, and the names of parts. Bad values are named."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedsim.data.pictures import pixels_of
from fedsim.data.tensors import TensorData, as_tensor_data
from fedsim.errors import DataError, FedsimWarning, cut, one_line, show

TARGETS = "label", "labels", "target", "targets", "y"  # names of the target column that need not be set
NAMELESS = re.compile(r"(Unnamed: \d+(\.\d+)?)?")  # names that pandas gives to a column without a name
RESET_INDEX = "index", "level_0"  # names that pandas gives to an index that becomes a column
PANDAS_INDEX = re.compile(r"__index_level_\d+__")  # columns in which pandas stores an index without a name
TRAIN_PARTS = ("train", "training")
TEST_PARTS = ("test", "testing"), ("validation", "valid", "val")  # in order of preference
MISSING = "na", "n/a", "nan", "null", "none", "?"
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
DIGITS = re.compile(r"[\W_]*\d[\W\d_]*")  # text with digits and without letters
LARGEST_OWNER = 2**53  # larger integers lose digits as floating-point numbers
Columns = Mapping[str, Any]


def samples_of(inputs: np.ndarray, targets: np.ndarray, ids: Mapping[str, np.ndarray], place: str) -> TensorData:
    """Return a data set of n samples.

    Args:
        inputs, targets: arrays [n, ...].
        ids: who owns each sample (such as a user): a dict from column name to an array [n].
        place: name of the data set in error messages.

    Raises DataError if the arrays cannot be used as a data set, for example if their lengths differ.
    """

    try:
        return replace(as_tensor_data((inputs, targets)), ids=ids)
    except DataError as error:
        raise DataError(f"{place}: {error}") from None


class DataColumn(NamedTuple):
    """A column of a table.

    Attributes:
        values: array or list [n, ...].
        place: name of the column in error messages, with the name of the table.
        row: function from the index of a row to its name in error messages, such as "row 7".
    """

    values: Any
    place: str
    row: Callable[[int], str] = "row {}".format

    def array(self) -> np.ndarray:
        """Return the column as finite numbers [n, ...] or text [n]. PIL images become uint8 [n, channels, h, w].

        Dates stay dates. Spaces around text are removed, with a warning.

        Raises DataError for missing values, NaN, infinity, and values of different types or shapes.
        """
        array = self._stacked()
        if array.dtype.kind == "f":
            self._require_finite(array)
            return array
        if array.dtype.kind not in "OUT":
            return array
        if len(missing := np.flatnonzero([_is_missing(value) for value in array])):
            raise self.error("has no value", int(missing[0]), "remove such rows or fill in the values", len(missing))
        if all(isinstance(value, str) for value in array):
            return without_spaces(array.astype(str), self.place, self.row)
        try:
            numbers = np.array(array.tolist())
            return numbers if numbers.dtype.kind in "iubf" else numbers.astype(float)
        except (TypeError, ValueError, OverflowError):
            kinds = ", ".join(sorted({type(value).__name__ for value in array}))
            raise DataError(
                f"{self.place}: must contain only text, or only numbers of one shape, not {cut(kinds)}; convert the "
                "values, or leave the column out with `inputs`"
            ) from None

    def numbers_or_text(self, *, convert: bool = True) -> np.ndarray:
        """Return `array()`, where text is converted if it consists of numbers. Raise DataError for other types.

        convert=False: text is not converted.

        Text of which at least half are numbers is a column of numbers with bad values: an error names the first one.
        """
        array = self.array()
        if array.dtype.kind == "U":
            return self.numbers(array) if convert and mostly_numbers(array) else array
        if array.dtype.kind not in "iubf":
            kind = "dates or times" if array.dtype.kind in "mM" else f"{array.dtype} values"
            raise DataError(
                f"{self.place}: contains {kind}, such as {show(str(array[0]))}, instead of numbers or text; convert "
                "them, or leave the column out with `inputs`"
            )
        return array

    def numbers(self, texts: np.ndarray) -> np.ndarray:
        """Return text [n] as numbers. Raise DataError that names the first text which is no number."""
        bad = np.flatnonzero([NUMBER.fullmatch(text) is None for text in texts.tolist()])
        if len(bad):
            value = show(str(texts[bad[0]]))
            raise self.error(
                f"contains {value}, which is not a number,",
                int(bad[0]),
                "remove such rows, write numbers, or leave the column out with `inputs`",
                len(bad),
            )
        return texts.astype(float)

    def owners(self) -> np.ndarray:
        """Return the column as owners of samples: integers or text [n]."""
        array = self.array()
        if array.dtype.kind == "f" and len(array) and np.abs(array).max() >= LARGEST_OWNER:
            raise DataError(
                f"{self.place}: contains integers of more than 64 bits or beyond 2^53 as owners; write them as text"
            )
        return array.astype(str) if array.dtype.kind in "mM" else array

    def error(self, problem: str, row: int, remedy: str, count: int = 1) -> DataError:
        """Return the error for a bad value, of which the column has `count`, first in row `row`."""
        more = f" ({count:,} such values)" if count > 1 else ""
        return DataError(f"{self.place}: {problem} in {self.row(row)}{more}; {remedy}")

    def _stacked(self) -> np.ndarray:
        """Return the values as one array. Raises DataError if they have different shapes."""
        values = self.values
        if hasattr(next(iter(values), None), "getbands"):  # PIL pictures
            mode = "L" if all(picture.mode in ("1", "L") for picture in values) else "RGB"
            try:
                values = [pixels_of(picture, mode).transpose(2, 0, 1) for picture in values]
            except ValueError as error:
                raise DataError(f"{self.place}: {error}") from None
        try:
            array = np.asarray(values)
        except ValueError:  # lists of different lengths
            raise DataError(
                f"{self.place}: its values have different shapes; all values must have the same shape"
            ) from None
        if array.dtype.kind == "O" and len(array) and isinstance(array[0], (list, np.ndarray)):
            shapes = {np.shape(value) for value in array}
            if len(shapes) > 1:
                raise DataError(
                    f"{self.place}: its values have different shapes, such as "
                    f"{' and '.join(map(str, sorted(shapes)[:2]))}; all values must have the same shape"
                )
            array = np.stack([np.asarray(value) for value in array])
        return array

    def _require_finite(self, array: np.ndarray) -> None:
        """Raise DataError if floating-point numbers [n, ...] contain NaN or infinity as float32."""
        with np.errstate(over="ignore"):
            finite = np.isfinite(array.astype(np.float32, copy=False))
        if finite.all():
            return
        rows = np.unique(np.argwhere(~finite)[:, 0])
        value = array[tuple(np.argwhere(~finite)[0])]
        problem = "contains NaN or no value" if np.isnan(value) else f"contains {value}, which float32 cannot hold,"
        raise self.error(problem, int(rows[0]), "remove such rows or fill in the values", len(rows))


def _is_missing(value: Any) -> bool:
    """Whether a value is None, "", NaN, or one of the missing values of pandas."""
    return value is None or type(value).__name__ in ("NAType", "NaTType") or bool(value != value) or value == ""


def mostly_digits(texts: np.ndarray) -> bool:
    """Whether at least half of the texts [n] have digits but no letters, such as 5%, 1,000 and 24.12.2026."""
    return 2 * sum(bool(DIGITS.fullmatch(text)) for text in texts.tolist()) >= len(texts)


def mostly_numbers(texts: np.ndarray) -> bool:
    """Whether at least half of the texts [n] are numbers."""
    return 2 * sum(NUMBER.fullmatch(text) is not None for text in texts.tolist()) >= len(texts)


def require_finite(values: np.ndarray, place: str) -> None:
    """Raise DataError, with the place and the row, if an array [n, ...] contains NaN or infinity as float32."""
    if values.dtype.kind == "f":
        DataColumn(values, place).array()


def only_target(columns: Columns, place: str) -> str:
    """Return the only column that has one of the names of targets. Raise DataError if there is none, or several."""
    names = [name for name in columns if name in TARGETS]
    names = names or [name for name in columns if isinstance(name, str) and name.casefold() in TARGETS]
    if len(names) != 1:
        are_values = any(NUMBER.fullmatch(str(name)) for name in columns)
        header = "; if the first line of a file has values, write the names of the columns above it" * are_values
        raise DataError(
            f"{place}: must have exactly one column with one of the names {', '.join(TARGETS)}; otherwise, set "
            f"`target` to one of the columns {cut(', '.join(map(str, columns)))}, or rename a column{header}"
        )
    return names[0]


def warn(message: str) -> None:
    """Issue a FedsimWarning about data."""
    warnings.warn(message, FedsimWarning, stacklevel=3)


def data_path(path: str) -> str:
    """Return the path of a data file with `~` replaced by the home folder."""
    return str(Path(path).expanduser())


def unreadable(path: str, error: Exception) -> DataError:
    """Return the error for a data file that does not exist or cannot be read."""
    exists = Path(path).exists()
    return DataError(f"{path}: cannot be read: {one_line(error) if exists else 'no such file; check data.path'}")


def input_columns(columns: Columns, index: Collection[str], place: str) -> list[str]:
    """Return the names of the columns of inputs: all that do not number the rows, which are named in a warning.

    A column called index numbers the rows if it contains 0, 1, 2, ... in any order, and a column without a name only
    in this order. Another warning names columns called id or index that are inputs and may number the samples.

    Raises DataError if another column has no name.
    """
    inputs = []
    for name, values in columns.items():
        folded = name.casefold() if isinstance(name, str) else ""
        is_index = name in index or PANDAS_INDEX.fullmatch(folded) is not None
        if is_nameless(name):
            is_index |= np.array_equal(np.asarray(values), np.arange(len(values)))
            if all(map(_is_missing, values)):
                raise DataError(
                    f"{place}: column {show(name)} has no name and no values; remove it, such as a comma at line ends"
                )
        elif folded in RESET_INDEX and _are_different_integers(values):
            is_index |= (np.min(values), np.max(values)) == (0, len(values) - 1)
        if is_index:
            warn(
                f"{place}: column {show(name)} is the index of a data frame, and is not an input; to use it, set "
                "`inputs` or `ids`",
            )
            continue
        if is_nameless(name):
            raise DataError(
                f"{place}: column {show(name)} has no name, and is not an index 0, 1, 2, ...; give it a name, remove "
                "it, or set `inputs` to the columns of inputs"
            )
        if folded in ("id", *RESET_INDEX) and _are_different_integers(values):
            warn(
                f"{place}: column {show(name)}, which contains a different integer in each row, is used as an input; "
                "if it only numbers the rows, remove it, or set `inputs` to the columns of inputs",
            )
        inputs.append(name)
    return inputs


def is_nameless(name: Any) -> bool:
    """Whether a column has no name, or the name that pandas gives to a column without a name."""
    if isinstance(name, str):
        return NAMELESS.fullmatch(name) is not None
    return name is None or (isinstance(name, float) and np.isnan(name))  # pandas may store None as NaN


def _are_different_integers(values: Any) -> bool:
    array = np.asarray(values)
    return array.ndim == 1 and array.dtype.kind in "iu" and len(np.unique(array)) == len(array) > 0


def warn_of_unlikely_classes(classes: Sequence[str], place: str) -> None:
    """Warn of class names that differ only in case or outer spaces, or probably stand for a missing value."""
    by_folded: dict[str, str] = {}
    for name in classes:
        twin = by_folded.setdefault(name.strip().casefold(), name)
        if twin != name:
            problem = f"{show(twin)} and {show(name)} are different classes; if they are one, write them alike"
        elif name.casefold() in MISSING:
            problem = f"{show(name)} is a class; if it is a missing value, remove its samples"
        else:
            continue
        warn(f"{place}: {problem}")


def without_spaces(values: np.ndarray, place: str, row: Callable[[int], str] = "row {}".format) -> np.ndarray:
    """Return an array of text [n] without spaces around its values. If there are any, one warning names them.

    `row` is a function from the index of a row to its name in error messages.

    Other arrays are returned unchanged. Raises DataError if nothing is left of a value.
    """
    if values.dtype.kind != "U":
        return values
    stripped = np.char.strip(values)
    if len(empty := np.flatnonzero(stripped == "")):
        raise DataError(f"{place}: has no value in {row(int(empty[0]))}; remove such rows or fill in the values")
    if len(changed := np.flatnonzero(stripped != values)):
        warn(
            f"{place}: spaces around {len(changed)} of {len(values)} values are removed, such as in "
            f"{show(str(values[changed[0]]))}",
        )
    return stripped


def parts_of(names: Collection[str], place: str) -> tuple[str | None, str | None]:
    """Return the names of the training part and the test part among names of folders or splits.

    Upper and lower case are the same. The training part is called train or training, and the test part test, testing,
    validation, valid or val. If there are parts for tests and for validation, a warning says that only the first is
    used. None: there is no such part.

    Raises DataError if two names are those of one part, such as train and Training.

    >>> parts_of(["Train", "cats", "VAL"], "photos")
    ('Train', 'VAL')
    """
    parts: list[str | None] = []
    for accepted in (TRAIN_PARTS, *TEST_PARTS):
        matching = [name for name in names if name.casefold() in accepted]
        if len(matching) > 1:
            raise DataError(f"{place}: {' and '.join(sorted(matching))} are names of the same part; keep only one")
        parts.append(matching[0] if matching else None)
    train, test, validation = parts
    if test is not None and validation is not None:
        warn(f"{place}: {validation} is not used, because {test} is the test part")
    return train, validation if test is None else test


def warn_of_unused(names: Collection[str], used: Collection[str | None], place: str) -> None:
    """Warn of parts that are neither the training part nor the test part, nor a validation part."""
    known = {name for part in TEST_PARTS for name in part}  # `parts_of` has warned of these
    if unused := [name for name in names if name not in used and name.casefold() not in known]:
        warn(f"{place}: parts that are not used: {cut(', '.join(unused))}")


def part_like(names: Collection[str]) -> tuple[str | None, str | None]:
    """Return the first name that may be meant as the training part, and the first that may be meant as a test part.

    Such a name begins or ends with the name of a part and has more than letters, as in training_set or images-val.

    >>> part_like(["cats", "train_images", "Test 2"])
    ('train_images', 'Test 2')
    """
    words = {name: re.split(r"[\W\d_]+", name.casefold()) for name in names}
    ends = {name: {parts[0], parts[-1]} for name, parts in words.items() if len(parts) > 1}
    train, test = (
        next((name for name in ends if ends[name].intersection(accepted)), None)
        for accepted in (TRAIN_PARTS, [name for part in TEST_PARTS for name in part])
    )
    return train, test
