"""Named columns of data sets: their values as arrays, their roles, and the names of parts."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedsim.core.model_inputs import leaves
from fedsim.data.partitions.ids import NUMBER
from fedsim.data.pictures import pixels_of
from fedsim.data.tensors import TensorData, as_tensor_data
from fedsim.errors import DataError, FedsimWarning, cut, one_line, show
from fedsim.system.devices import free_memory
from fedsim.system.files import require_regular, user_path

TARGETS = "label", "labels", "target", "targets", "y"  # names of the target column that need not be set
NAMELESS = re.compile(r"(Unnamed: \d+(\.\d+)?)?")  # names that pandas gives to a column without a name
NUMBERING = re.compile(r"id|index|level_0|__index_level_\d+__", re.IGNORECASE)  # names of columns of row numbers
TRAIN_PARTS = ("train", "training")
TEST_PARTS = ("test", "testing"), ("validation", "valid", "val")  # in order of preference
PART_NAMES = {name for names in (TRAIN_PARTS, *TEST_PARTS) for name in names}
SIGNED = re.compile(  # a number with a currency, a percent sign, a sign between thousands, or a decimal comma
    r"[-+]?\s*([$€£¥]?)\s*[-+]?"
    r"(?:[1-9]\d{0,2}(?P<sign>[.,' \xa0\u2019\u202f])(?:(?<=,)\d\d,)*\d{3}(?:(?P=sign)\d{3})*|\d+)"  # also 1,00,000
    r"(?:([.,])\d+)?\s*([$€£¥%]?)"
)
ALIKE = {" ": " \xa0\u202f", "'": "'\u2019"}  # forms of a sign
Columns = Mapping[str, Any]
UNSCALED = 10  # root mean square from which a warning recommends to scale numbers
DIVERGES = "for which SGD often diverges"


def samples_of(inputs: Any, targets: np.ndarray, ids: Mapping[str, np.ndarray], place: str) -> TensorData:
    """Return a data set of n samples.

    Args:
        inputs: array [n, ...], or several arrays as a dict or a tuple.
        targets: array [n, ...].
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
        signs: end of error messages about numbers that contain a sign such as a comma: what to change. {} in it is
            replaced by the settings to change. "": numbers with signs are accepted as text.
    """

    values: Any
    place: str
    row: Callable[[int], str] = "row {}".format
    signs: str = "convert the column to numbers"

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
        if array.shape[1:] == (1,):
            array = array[:, 0]
        self._require_values(array)
        if all(isinstance(value, str) for value in array):
            return without_spaces(array.astype(str), self.place, self.row)
        try:
            numbers = np.array(array.tolist())
            return numbers if numbers.dtype.kind in "iubf" else numbers.astype(float)
        except (TypeError, ValueError, OverflowError):
            kinds = ", ".join(sorted({type(value).__name__ for value in array}))
            raise DataError(
                f"{self.place}: must contain only text, or only numbers of one shape, not {cut(kinds)}; convert the "
                "values, or leave the column out by setting data.inputs"
            ) from None

    def numbers_or_text(self, *, convert: bool = True) -> np.ndarray:
        """Return `array()`, with text that consists of numbers converted to numbers. Raise DataError for other types.

        convert=False: text is not converted.

        If at least half of the texts are numbers, all must be numbers: an error names the first bad value.
        """
        array = self.array()
        if array.dtype.kind == "U":
            return self.numbers(array) if convert and mostly_numbers(array) else array
        if array.dtype.kind not in "iubf":
            kind = "dates or times" if array.dtype.kind in "mM" else f"{array.dtype} values"
            raise DataError(
                f"{self.place}: contains {kind}, such as {show(str(array[0]))}, instead of numbers or text; convert "
                "them, or leave the column out by setting data.inputs"
            )
        return array

    def numbers(self, texts: np.ndarray) -> np.ndarray:
        """Return text [n] as numbers. Raise DataError with the first text that is not a number."""
        bad = np.flatnonzero([NUMBER.fullmatch(text) is None for text in texts.tolist()])
        if len(bad):
            self.require_text(np.unique(texts))
            value = show(str(texts[bad[0]]))
            raise self.error(
                f"contains {value}, which is not a number,",
                int(bad[0]),
                "remove such rows, write numbers, or leave the column out by setting data.inputs",
                len(bad),
            )
        return texts.astype(float)

    def require_text(self, texts: np.ndarray) -> None:
        """Raise DataError if over half of the column's different texts are numbers and one has a sign, as in 1,011."""
        signed = signed_numbers(texts.tolist())
        first = next((found for found in signed if not NUMBER.fullmatch(found[0])), None)
        if first is None or 2 * len(signed) <= len(texts):
            return
        before, _, decimal, after = first.groups()
        between, unit = first["sign"], before or after
        if not (unit or self.signs):
            return
        between = next((sign for sign, forms in ALIKE.items() if between and between in forms), between)
        sign = unit or between or decimal
        may_be_decimal = sign == "," and first[0].count(sign) == 1
        remedy = self.signs.format(f"data.decimal={show(sign)} or " * may_be_decimal + f"data.thousands={show(sign)}")
        if between and (decimal or between == "."):
            remedy = self.signs.format(f"data.thousands={show(between)} and data.decimal={show(decimal or ',')}")
        if unit:
            remedy = f"remove {show(unit)} from all values"
        raise DataError(
            f"{self.place}: contains {show(first[0])}, which is a number except for {show(sign)}; {remedy}, or leave "
            "the column out with data.inputs"
        )

    def owners(self) -> np.ndarray:
        """Return the owner of each sample, [n]: numbers of the column's type, otherwise text as it was written.

        Raises DataError for missing values, and for floating-point numbers that are too large to represent integers
        exactly.
        """
        array = self._stacked()
        if array.dtype.kind in "iu":
            return array
        self._require_values(array)
        if array.dtype.kind != "f":
            return without_spaces(array.astype(str), self.place, self.row)
        if np.abs(array).max(initial=0) >= 2**53:  # neighbouring integers would be equal
            raise DataError(f"{self.place}: contains integers beyond 2^53 as owners; write them as text, such as id_1")
        return array

    def error(self, problem: str, row: int, remedy: str, count: int = 1) -> DataError:
        """Return the error for the first of `count` bad values in the column. It is in row number `row` (from 0).

        `problem` says what is wrong with the value, and `remedy` what to change.
        """
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
            if array.dtype.kind == "O" and len(array) and isinstance(array[0], (list, np.ndarray)):
                array = np.stack([np.asarray(value) for value in array])
        except ValueError:
            raise DataError(
                f"{self.place}: its values have different shapes; all values must have the same shape"
            ) from None
        return array

    def _require_values(self, array: np.ndarray) -> None:
        """Raise DataError if an array [n] contains missing values."""
        if len(missing := np.flatnonzero([_is_missing(value) for value in array])):
            raise self.error("has no value", int(missing[0]), "remove such rows or fill in the values", len(missing))

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


def signed_numbers(texts: Sequence[str]) -> list[re.Match[str]]:
    """Return the matches of SIGNED for the texts that are numbers, perhaps with signs such as a comma or a space.

    Texts with spaces are left out if all have one length, because they are probably telephone numbers.
    """
    signed = [found for text in texts if (found := SIGNED.fullmatch(text))]
    with_signs = [found for found in signed if not NUMBER.fullmatch(found[0])]
    lengths = {len(found[0]) for found in with_signs if found["sign"] == " "}
    return [found for found in signed if len(lengths) != 1 or found["sign"] != " "]


def mostly_numbers(texts: np.ndarray) -> bool:
    """Whether at least half of the texts [n] are numbers."""
    return 2 * sum(NUMBER.fullmatch(text) is not None for text in texts.tolist()) >= len(texts)


@contextlib.contextmanager
def collected(errors: list[str]) -> Iterator[None]:
    """Context manager that appends the message of a DataError to `errors` instead of raising the error."""
    try:
        yield
    except DataError as error:
        errors.append(str(error))


def require_finite(values: np.ndarray, place: str) -> None:
    """Raise DataError, which names `place` and the row, if an array [n, ...] contains NaN or infinity as float32."""
    if values.dtype.kind == "f":
        DataColumn(values, place).array()


def require_different_names(names: Sequence[Any], place: str) -> None:
    """Raise DataError if two columns have the same name."""
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{place}: has two columns {show(repeated[0])}; rename or remove one of the two")


def only_target(columns: Columns, place: str) -> str:
    """Return the only column whose name is usual for targets. Raise DataError if there is none, or several."""
    names = [name for name in columns if name in TARGETS]
    names = names or [name for name in columns if isinstance(name, str) and name.casefold() in TARGETS]
    if len(names) != 1:
        are_values = any(NUMBER.fullmatch(str(name)) for name in columns)
        header = "; if the first line of a file has values, write the names of the columns above it" * are_values
        raise DataError(
            f"{place}: must have exactly one column with one of the names {', '.join(TARGETS)}; otherwise, set "
            f"data.target to one of the columns {cut(', '.join(map(str, columns)))}, or rename a column{header}"
        )
    return names[0]


def warn(message: str) -> None:
    """Issue a FedsimWarning about data."""
    warnings.warn(message, FedsimWarning, stacklevel=3)


def warn_of_unscaled(data: TensorData, place: str, *kinds: str) -> None:
    """Warn if floating-point "inputs" or "targets" (`kinds`) are so large that SGD often diverges."""
    for kind in kinds if data.scale == 1 else ():
        for values in leaves(getattr(data, kind)):
            if values.is_floating_point() and values.norm(dtype=torch.float64) > UNSCALED * values.numel() ** 0.5:
                extent = f"values from {values.min():,.6g} to {values.max():,.6g}"
                warn(f"{place}: the {kind} have {extent}, {DIVERGES}; scale them to mean 0 and standard deviation 1")


def data_path(path: str) -> str:
    """Return the path of a data file or folder with `~` replaced by the home folder.

    Raises DataError for a pipe or a device, also in a folder, because reading it may never end, and for a file that is
    larger than the free memory.
    """
    top = user_path(path)
    for file in (top, *top.rglob("*")) if os.path.isdir(top) else (top,):
        if os.path.exists(file) and not os.path.isdir(file):
            try:
                require_regular(file, free_memory())
            except OSError as error:
                raise DataError(f"{file}: cannot be read: {error.strerror}") from None
    return str(top)


def unreadable(path: str, error: Exception) -> DataError:
    """Return the error for a data file that does not exist or cannot be read."""
    exists = Path(path).exists()
    return DataError(f"{path}: cannot be read: {one_line(error) if exists else 'no such file; check data.path'}")


def input_columns(columns: Columns, place: str) -> list[str]:
    """Return the names of the input columns: all columns that do not only number the rows. A warning names the rest.

    A column without a name, or called id or index, numbers the rows if it contains a different integer in each row.

    Raises DataError if another column has no name.
    """
    inputs = []
    for name, values in columns.items():
        nameless = name is None or name != name or bool(NAMELESS.fullmatch(str(name)))
        if (nameless or NUMBERING.fullmatch(str(name))) and _are_different_integers(values):
            warn(
                f"{place}: column {show(name)} only numbers the rows, and is not an input; to use it, set "
                "data.inputs or data.ids"
            )
        elif nameless:
            raise DataError(
                f"{place}: column {show(name)} has no name; give it a name, remove it (such as a comma at line ends), "
                "or set data.inputs to the columns of inputs"
            )
        else:
            inputs.append(name)
    return inputs


def _are_different_integers(values: Any) -> bool:
    array = np.asarray(values)
    return array.ndim == 1 and array.dtype.kind in "iu" and len(np.unique(array)) == len(array) > 0


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
            f"{show(str(values[changed[0]]))}"
        )
    return stripped


def parts_of(names: Collection[str], place: str) -> tuple[str | None, str | None]:
    """Return the names of the training part and the test part among names of folders or splits.

    Upper and lower case are not distinguished. The training part is called train or training, and the test part test,
    testing, validation, valid or val. If there are parts for tests and for validation, a warning says that only the
    first is used. None: there is no such part.

    Raises DataError if two names mean the same part, such as train and Training.

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
    """Warn of parts that are used neither for training nor for tests nor for validation."""
    known = {name for part in TEST_PARTS for name in part}  # `parts_of` has warned of these
    if unused := [name for name in names if name not in used and name.casefold() not in known]:
        warn(f"{place}: parts that are not used: {cut(', '.join(unused))}")


def part_like(names: Collection[str]) -> tuple[str | None, str | None]:
    """Return the first name that may be meant as the training part, and the first that may be meant as a test part.

    Such a name begins or ends with the name of a part, next to other characters than letters: training_set, images-val.

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
