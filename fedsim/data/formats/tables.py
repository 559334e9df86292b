"""CSV and Parquet files."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import re
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import Any

from fedsim.core.numbers import ProperFraction
from fedsim.data.columns import NUMBERING, data_path, require_different_names, unreadable
from fedsim.data.encoding import DataTable, Names, train_and_test
from fedsim.data.sources import dataset
from fedsim.data.tensors import TensorData
from fedsim.errors import DataError, MissingPackageError, show
from fedsim.system.files import decoded
from fedsim.system.packages import import_extra

DELIMITERS = ",;\t|"
SAMPLE = 2**16  # maximum number of bytes of the column names


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
    split: str | None = None,
    test_fraction: ProperFraction = 0.2,
) -> tuple[TensorData, TensorData]:
    """Table in a CSV or Parquet file, one sample per line, read by PyArrow (`pip install pyarrow`).

    Columns of numbers are concatenated to inputs [n, features]. A column of text with at most 100 different texts is
    one-hot encoded: each text of the training samples, in sorted order, becomes one feature. Texts that occur only in
    test samples are encoded as zeros. A single column of lists of equal length becomes the inputs [n, length]. Text
    targets become class labels in sorted order. Missing values are errors.

    Args:
        path: file of the training samples: Parquet if its name ends in `.parquet`, otherwise CSV in UTF-8, perhaps
            compressed (`.csv.gz`).
        test_path: file of the test samples. Unset: a fraction `test_fraction` of the samples in `path` is drawn at
            random. The draw is the same for every seed, and stratified by class.
        target: column of the targets. Unset: the only column called label, labels, target, targets or y.
        inputs: columns of the inputs. Unset: all columns except the target, `ids` and row numbers. A column of row
            numbers is called id or index, or has no name, and contains a different integer in each row.
        ids: columns that contain the owner of each sample (such as a user), for the partition `natural`. Unset: the
            named index of a data frame that was written to a Parquet file. The test file does not need these columns.
        split: column with the part of each sample (train, test, ...), if there is no other test part. Unset: the column
            called split, if all of its values are names of parts.
        standardize: whether to subtract the mean of each column of numbers and to divide by its standard deviation,
            both computed from the training samples. Columns that are constant in the training samples are not divided.
            Columns of text and targets are unchanged.
        delimiter: character between columns of a CSV file. Unset: detected (comma, semicolon, tab or |). If the
            delimiter is not a comma, numbers such as 1,5 are read with a decimal comma.
        test_fraction: fraction of test samples, 0 < test_fraction < 1.

    Raises DataError, with the file and the column, for a file that cannot be read, missing columns, NaN, missing
    values, text between numbers, more than 100 different texts, dates, and columns without a name that are not row
    numbers. For bad values, the message contains the line and the value.

    >>> import tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "points.csv"
    >>> _ = file.write_text("x,user,y\\n" + "".join(f"{k / 10},{'ab'[k % 2]},{k}.5\\n" for k in range(10)))
    >>> train, test = fedsim.load_dataset("csv", path=str(file), ids="user")
    >>> train.inputs.shape, len(test), sorted(set(train.ids["user"].tolist()))
    (torch.Size([8, 1]), 2, ['a', 'b'])
    """
    if delimiter is not None and len(delimiter) != 1:
        raise DataError(f'data.delimiter = {show(delimiter)}: must be one character, such as ";"')
    owned_by = [ids] if isinstance(ids, str) else ids or ()
    train = _read(path, delimiter, [*owned_by, split])
    texts = [name for name, values in train.columns.items() if values.dtype.kind == "O"]
    test = [] if test_path is None else [_read(test_path, delimiter, texts)]
    options: dict[str, Any] = {"target": target, "inputs": inputs, "ids": ids, "standardize": standardize}
    return train_and_test([train], test, split=split, test_fraction=test_fraction, **options)


def _read(path: str, delimiter: str | None, texts: Collection[str | None]) -> DataTable:
    """Return a CSV or Parquet file as a table. Raise DataError if the file cannot be read.

    `texts` names columns that are read as text from a CSV file, so that 01 remains 01, such as owners.
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
    named = [name for name in described if isinstance(name, str) and not NUMBERING.fullmatch(name)]
    return DataTable(_columns(content, path), path, named)


def _csv(path: str, delimiter: str | None, texts: Collection[str | None]) -> DataTable:
    module = import_extra("pyarrow.csv", extra="tables", purpose="reading tables")
    with _opened(path) as file:
        header = (
            file.read(SAMPLE).lstrip(b"\r\n").partition(b"\n")[0].decode("utf-8-sig", errors="replace").rstrip("\r")
        )
    found = delimiter or max(DELIMITERS, key=re.sub('"[^"]*"', "", header).count)
    names = next(csv.reader([header], delimiter=found), [])
    try:
        content = module.read_csv(
            path,
            parse_options=module.ParseOptions(delimiter=found, newlines_in_values=True),
            convert_options=module.ConvertOptions(
                null_values=[""],
                strings_can_be_null=True,
                column_types={name: "string" for name in names if name.strip() in texts},
            ),
        )
        columns = _columns(content, path)
        if any(column.type == "binary" for column in content.columns):
            raise UnicodeError
    except Exception:
        with _opened(path) as file:
            decoded(file.read())  # an error that names the line, if the file is not UTF-8
        raise
    assumed = [f"delimiter {show(found)}"] if delimiter is None and found != "," else []
    if len(columns) == 1:
        only = f"has only one column, {show(next(iter(columns)))} (delimiter {show(found)})"
        raise DataError(f"{path}: {only}; set `delimiter`, or add columns of inputs")
    for name, column in zip(columns, content.columns, strict=True):
        if found != "," and column.type == "string" and name not in texts:
            with contextlib.suppress(ValueError):  # other text
                points = import_module("pyarrow.compute").replace_substring(column, ",", ".")
                columns[name] = points.cast("float64").to_numpy()
                assumed.append(f"column {name} has decimal commas, such as {column[0]}")
    return DataTable(columns, path, (), lambda row: f"line {_line_of(path, found, row)}", tuple(assumed))


def _columns(content: Any, path: str) -> dict[str, Any]:
    """Return the columns of a table of PyArrow by name, without spaces around the names."""
    names = [name.strip() for name in content.column_names]
    require_different_names(names, path)
    return {name: column.to_numpy() for name, column in zip(names, content.columns, strict=True)}


def _opened(path: str) -> Any:
    return gzip.open(path, "rb") if path.lower().endswith(".gz") else open(path, "rb")


def _line_of(path: str, delimiter: str, row: int) -> int:
    """Return the number of the last line with the sample `row` of a CSV file. The first line has number 1."""
    with _opened(path) as file:
        reader = csv.reader(io.TextIOWrapper(file, "utf-8-sig", errors="replace", newline=""), delimiter=delimiter)
        return next(itertools.islice((reader.line_num for values in reader if values), row + 1, None))
