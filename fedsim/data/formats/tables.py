"""CSV and Parquet files."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.core.numbers import ProperFraction
from fedsim.data.columns import data_path, unreadable, warn
from fedsim.data.encoding import DataTable, Names, train_and_test
from fedsim.data.sources import dataset
from fedsim.data.tensors import TensorData
from fedsim.errors import DataError, MissingPackageError, show
from fedsim.system.files import decoded
from fedsim.system.packages import import_extra

DELIMITERS = ",;\t|"
EXCEL_LINE = re.compile(r"sep=(.)\r?\n")  # a first line of Excel, which names the delimiter
MAGIC = {  # first bytes of files that are no CSV files, and what to do
    b"\x1f\x8b": "is compressed; let its name end in .csv.gz",
    b"PK\x03\x04": "is an Excel workbook or a zip archive; save the table as CSV",
    b"PAR1": "is a Parquet file; let its name end in .parquet",
}
COMMA_NUMBER = re.compile(r"[-+]?\d*,?\d+")  # a number with a decimal comma
SAMPLE = 2**16  # number of characters in which the delimiter is searched


@dataset("csv")
@dataset("parquet")
def table(
    *,
    path: str,
    test_path: str | None = None,
    target: str | None = None,
    inputs: Names | None = None,
    ids: Names | None = None,
    standardize: bool = False,
    delimiter: str | None = None,
    test_fraction: ProperFraction = 0.2,
) -> tuple[TensorData, TensorData]:
    """Table in a CSV or Parquet file, one sample per line, read by PyArrow (`pip install pyarrow`).

    Columns of numbers are concatenated to inputs [n, features]. A column of text with at most 100 different texts
    becomes one input per text of the training samples, in sorted order: 1 for the text of a sample, else 0. A test
    sample whose text no training sample has gets only zeros. A single column of lists of one length is an input
    [n, length]. Targets that are text become class labels in sorted order. Missing values are errors.

    Args:
        path: file of the training samples: Parquet if its name ends in `.parquet`, otherwise CSV in UTF-8, perhaps
            compressed (`.csv.gz`).
        test_path: file of the test samples. Unset: a fraction `test_fraction` of the samples in `path` is drawn at
            random. The draw is the same for every seed, and stratified by class.
        target: column of the targets. Unset: the only column called label, labels, target, targets or y.
        inputs: columns of the inputs. Unset: all columns except the target, `ids`, and the index of a data frame. In
            CSV files, an index is a column without a name, or called "Unnamed: 0", with the values 0, 1, 2, ..., or a
            column called index with these values in any order.
        ids: columns that contain the owner of each sample (such as a user), for the partition `natural`. The test file
            may lack them.
        standardize: whether to subtract the mean of each column of numbers and to divide by its standard deviation,
            both of the training samples. A column that is constant in them is not divided. Columns of text and
            targets are unchanged.
        delimiter: character between columns of a CSV file. Unset: found among comma, semicolon, tab and |. If it is not
            a comma, a column of numbers such as 1,5 has decimal commas.
        test_fraction: fraction of test samples, 0 < test_fraction < 1.

    Raises DataError, with the file and the column, for a file that cannot be read, missing columns, NaN, missing
    values, text between numbers, more than 100 different texts, dates, and other columns without a name. For bad values
    it names the line and the value.

    >>> import tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "points.csv"
    >>> _ = file.write_text("x,user,y\\n" + "".join(f"{k / 10},{'ab'[k % 2]},{k}.5\\n" for k in range(10)))
    >>> train, test = fedsim.load_dataset("csv", path=str(file), ids="user")
    >>> train.inputs.shape, len(test), sorted(set(train.ids["user"].tolist()))
    (torch.Size([8, 1]), 2, ['a', 'b'])
    """
    if delimiter is not None and len(delimiter) != 1:
        raise DataError(f'data.delimiter = {show(delimiter)}: must be one character, such as ";"')
    train = _read(path, delimiter)
    texts = [name for name, values in train.columns.items() if values.dtype.kind == "O"]
    test = None if test_path is None else _read(test_path, delimiter, texts)
    options: dict[str, Any] = {"target": target, "inputs": inputs, "ids": ids, "standardize": standardize}
    return train_and_test(train, test, test_fraction=test_fraction, **options)


def _read(path: str, delimiter: str | None, texts: Sequence[str] = ()) -> DataTable:
    """Return a CSV or Parquet file as a table. Raise DataError if the file cannot be read.

    `texts` names columns that are read as text from a CSV file, so that 01 remains 01.
    """
    path = data_path(path)
    parquet = Path(path).suffix.lower() in (".parquet", ".pq")
    if parquet and delimiter is not None:
        raise DataError(f"data.delimiter = {show(delimiter)}: is only used for CSV files; remove it")
    try:
        return _parquet(path) if parquet else _csv(path, delimiter, texts)
    except (DataError, MissingPackageError):
        raise
    except Exception as error:  # the errors of PyArrow have no common base class
        raise unreadable(path, error) from None


def _parquet(path: str) -> DataTable:
    content = import_extra("pyarrow.parquet", extra="tables", purpose="reading tables").read_table(path)
    described = (content.schema.pandas_metadata or {}).get("index_columns", [])
    return DataTable(_columns(content, path), path, [name for name in described if isinstance(name, str)])


def _csv(path: str, delimiter: str | None, texts: Sequence[str]) -> DataTable:
    module = import_extra("pyarrow.csv", extra="tables", purpose="reading tables")
    start = _start(path)
    excel = EXCEL_LINE.match(start)
    found = delimiter or (excel[1] if excel else _delimiter(start))
    assumed = [f"delimiter {show(found)}"] if delimiter is None and found != "," else []
    names = next(_records(path, found))[1] if texts else []
    try:
        content = module.read_csv(
            path,
            read_options=module.ReadOptions(skip_rows=1 if excel else 0),
            parse_options=module.ParseOptions(delimiter=found, newlines_in_values=True),
            convert_options=module.ConvertOptions(
                null_values=[""],
                strings_can_be_null=True,
                column_types={name: "string" for name in names if name.strip() in texts},
            ),
        )
        if any(column.type in ("binary", "large_binary") for column in content.columns):
            raise UnicodeError
    except UnicodeError:
        raise _undecodable(path) from None
    columns = _columns(content, path)
    if len(columns) == 1:
        only = f"has only one column, {show(next(iter(columns)))} (delimiter {show(found)})"
        raise DataError(f"{path}: {only}; set `delimiter`, or add columns of inputs")
    for name, values in columns.items() if found != "," else ():
        if (numbers := _with_decimal_commas(values)) is not None:
            columns[name] = numbers
            example = next(text for text in values if "," in text)
            assumed.append(f"column {name} has decimal commas, such as {example} for {example.replace(',', '.')}")
    return DataTable(columns, path, (), lambda row: f"line {_line_of(path, found, row)}", tuple(assumed))


def _columns(content: Any, path: str) -> dict[str, Any]:
    """Return the columns of a table of PyArrow by name, without spaces around the names."""
    names = [name.strip() for name in content.column_names]
    if spaced := [name for name in content.column_names if name != name.strip()]:
        warn(f"{path}: spaces around the names of columns are removed, such as in {show(spaced[0])}")
    if repeated := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{path}: has two columns {show(repeated[0])}; the first line must contain the column names")
    return {name: column.to_numpy() for name, column in zip(names, content.columns, strict=True)}


def _opened(path: str) -> Any:
    return gzip.open(path, "rb") if path.lower().endswith(".gz") else open(path, "rb")


def _start(path: str) -> str:
    """Return the start of a CSV file, as whole lines if possible. Raise DataError for a file of another format."""
    with _opened(path) as file:
        start = file.read(SAMPLE)
    if other := next((text for magic, text in MAGIC.items() if start.startswith(magic)), None):
        raise DataError(f"{path}: {other}")
    if b"\0" in start:
        raise _undecodable(path)
    if not start.strip():
        raise DataError(f"{path}: is empty")
    return start[: start.rfind(b"\n") + 1 or None].decode("utf-8-sig", errors="replace")


def _delimiter(start: str) -> str:
    """Return the delimiter of the CSV file that begins with `start`."""
    header = re.sub('"[^"]*"', "", start.lstrip().partition("\n")[0])
    candidates = [character for character in DELIMITERS if character in header]
    if len(candidates) > 1:
        with contextlib.suppress(csv.Error):
            return csv.Sniffer().sniff(start, "".join(candidates)).delimiter
    return candidates[0] if candidates else ","


def _with_decimal_commas(values: np.ndarray) -> np.ndarray | None:
    """Return a column of text as numbers if all values are numbers with decimal commas, such as 1,5, else None."""
    texts = values.dtype.kind == "O" and all(isinstance(text, str) for text in values)
    if not texts or not all(map(COMMA_NUMBER.fullmatch, values)) or not any("," in text for text in values):
        return None
    return np.array([text.replace(",", ".") for text in values]).astype(float)


def _records(path: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the last line and the values of each row of a CSV file, starting with the column names."""
    with _opened(path) as file:
        lines = io.TextIOWrapper(file, "utf-8-sig", errors="replace", newline="")
        reader = csv.reader(lines, delimiter=delimiter)
        yield from ((reader.line_num, values) for values in reader if values and not values[0].startswith("sep="))


def _line_of(path: str, delimiter: str, row: int) -> int:
    """Return the number of the line with the sample `row` of a CSV file. The first line has number 1."""
    return next(line for number, (line, _) in enumerate(_records(path, delimiter)) if number == row + 1)


def _undecodable(path: str) -> DataError:
    """Return the error for a CSV file that is not UTF-8."""
    with _opened(path) as file:
        try:
            decoded(file.read())
        except ValueError as error:
            return DataError(f"{path}: {error}")
    return DataError(f"{path}: is not a text file; save the table as CSV in UTF-8")
