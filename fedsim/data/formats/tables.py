"""CSV and Parquet files."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from fedsim.core.numbers import ProperFraction
from fedsim.data.columns import NUMBERING, TARGETS, data_path, require_different_names, unreadable
from fedsim.data.encoding import NOBODY, DataTable, InputNames, Names, names_in, train_and_test
from fedsim.data.formats.number_signs import Signs, require_one_text_per_number
from fedsim.data.formats.worker_files import files_of_parts, natural_order
from fedsim.data.partitions.ids import NUMBER
from fedsim.data.sources import dataset
from fedsim.data.tensors import TensorData, reading
from fedsim.errors import DataError, FedsimError, plural, show
from fedsim.system.devices import free_memory, require_memory
from fedsim.system.files import decoded
from fedsim.system.packages import import_extra

DELIMITERS = ",;\t|"
TYPES = "int64", "double", "string"  # types of PyArrow whose values may have been written in several ways
SAMPLE = 2**16  # maximum number of bytes of the column names


@dataset("csv")
@dataset("parquet")
def table(
    *,
    path: str,
    test_path: str | None = None,
    target: str | None = None,
    inputs: InputNames | None = None,
    ids: Names | None = None,
    standardize: bool = False,
    delimiter: str | None = None,
    decimal: Literal[".", ","] | None = None,
    thousands: Literal[",", ".", " ", "'"] | None = None,
    split: str | None = None,
    test_fraction: ProperFraction = 0.2,
) -> tuple[TensorData, TensorData]:
    """Table in a CSV or Parquet file, or a folder with one for each worker, read by PyArrow (`pip install pyarrow`).

    Each line is a sample. Columns of numbers are concatenated to inputs [n, features]. A column of text with at most
    100 different texts is one-hot encoded: each text of the training samples, in sorted order, becomes one feature.
    Texts that occur only in test samples are encoded as zeros. A single column of lists of equal length becomes the
    inputs [n, length]. Text targets become class labels in sorted order. Missing values are errors.

    Args:
        path: file of the training samples: Parquet if its name ends in `.parquet`, otherwise CSV in UTF-8, perhaps
            compressed (`.csv.gz`). Or a folder with one such file for each worker, where the worker's name is the file
            name without its ending. Workers are in the order of their names (2 before 10). The folder may consist of
            the folders `train` and `test`.
        test_path: file of the test samples, or a folder with those of each worker. Unset: a fraction `test_fraction` of
            the samples in `path` is drawn at random. The draw is the same for every seed, and stratified by class.
        target: column of the targets. Unset: the only column called label, labels, target, targets or y.
        inputs: columns of the inputs, or those of several inputs by name, such as {"vitals": ["age", "pulse"],
            "scan": "pixels"}. Unset: all columns except the target, `ids` and row numbers. A column of row numbers is
            called id or index, or has no name, and contains a different integer in each row.
        ids: columns that contain the owner of each sample (such as a user), for the partition `natural`. Unset: the
            named index of a data frame that was written to a Parquet file. The test file does not need these columns.
        split: column with the part of each sample (train, test, ...), if there is no other test part. Unset: the column
            called split, if all of its values are names of parts.
        standardize: whether to subtract the mean of each column of numbers and to divide by its standard deviation,
            both computed from the training samples. Columns that are constant in the training samples are not divided.
            Columns of text and targets are unchanged.
        delimiter: character between columns of a CSV file. Unset: detected (comma, semicolon, tab or |), or taken from
            a first line such as `sep=;`. Lines above the column names that start with # are skipped.
        decimal: sign before the decimals of numbers in a CSV file. Unset: a point. If the delimiter is not a comma,
            columns such as 1,5 and 2,25 are read with a decimal comma. Ambiguous columns are errors.
        thousands: sign between the thousands of numbers in a CSV file, as in 1,000,000 and 10,00,000. If it is a point,
            `decimal` is a comma unless it is set. Unset: none.
        test_fraction: fraction of test samples, 0 < test_fraction < 1.

    Raises DataError, with the file and the column, for a file that cannot be read, missing columns, NaN, missing
    values, text between numbers, more than 100 different texts, dates, and columns without a name that are not row
    numbers. For bad values, the message contains the line and the value.

    >>> import tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "points.csv"
    >>> _ = file.write_text("x,user,y\\n" + "".join(f"{k / 10},{'ab'[k % 2]},{k}.5\\n" for k in range(10)))
    >>> train, test = fedsim.load_dataset("csv", path=str(file), ids="user", split_by="samples")
    >>> train.inputs.shape, len(test), sorted(set(train.ids["user"].tolist()))
    (torch.Size([8, 1]), 2, ['a', 'b'])
    """
    if delimiter is not None and len(delimiter) != 1:
        raise DataError(f'data.delimiter = {show(delimiter)}: must be one character, such as ";"')
    if thousands is not None and thousands == decimal:
        raise DataError(f"data.thousands = {show(thousands)}: is data.decimal too; the two signs must differ")
    signs = Signs(delimiter, decimal, thousands)
    no_inputs = [*([ids] if isinstance(ids, str) else ids or ()), split, reading().split_by]
    train_files, test_files = files_of_parts(data_path(path), test_path and data_path(test_path))
    names = natural_order(train_files)
    names += [name for name in natural_order(test_files) if name not in train_files]
    worker = {name: number for number, name in enumerate(names)} | {"": NOBODY}

    def is_target(name: str) -> bool:
        return name.casefold() in TARGETS if target is None else name == target

    def is_text(name: str) -> bool:
        if inputs is None or is_target(name):
            return name in no_inputs
        return name not in names_in(inputs)

    def read(files: Mapping[str, str], is_text: Callable[[str], bool]) -> list[DataTable]:
        ordered = [name for name in names if name in files]
        return [replace(_read(files[name], signs, is_text, is_target), worker=worker[name]) for name in ordered]

    train = read(train_files, is_text)
    texts = {name for part in train for name, values in part.columns.items() if values.dtype.kind == "O"}
    if any(part.columns[name].dtype.kind != "O" for part in train for name in texts.intersection(part.columns)):
        train = read(train_files, texts.__contains__)  # text in all files, so that 01 remains 01
    options: dict[str, Any] = {"target": target, "inputs": inputs, "ids": ids, "standardize": standardize}
    of_workers = "" not in train_files
    options |= {"split": split, "test_fraction": test_fraction, "of_workers": path * of_workers}
    first, second = train_and_test(train, read(test_files, texts.__contains__), **options)
    if not of_workers:
        return first, second
    assumed = f"each of {len(train)} files is the data of one worker, in the order of their names", *first.assumed
    return replace(first, assumed=assumed, worker_names=tuple(name for name in names if name)), second


def _read(path: str, signs: Signs, is_text: Callable[[str], bool], is_target: Callable[[str], bool]) -> DataTable:
    """Return a CSV or Parquet file as a table. Raise DataError if the file cannot be read.

    Args:
        path: the file.
        signs: parameters of a CSV file.
        is_text: function from a column's name to whether a CSV file's column, such as owners, is read as text, so that
            01 remains 01.
        is_target: function from a column's name to whether the column may contain the targets.
    """
    path = data_path(path)
    parquet = Path(path).suffix.lower() in (".parquet", ".pq")
    for key, sign in signs._asdict().items() if parquet else ():
        if sign is not None:
            raise DataError(f"data.{key} = {show(sign)}: is only used for CSV files; remove it")
    try:
        return _parquet(path) if parquet else _csv(path, signs, is_text, is_target)
    except FedsimError:
        raise
    except Exception as error:  # the errors of PyArrow have no common base class
        raise unreadable(path, error) from None


def _parquet(path: str) -> DataTable:
    module = import_extra("pyarrow.parquet", extra="tables", purpose="reading tables")
    size = module.read_metadata(path)  # equal values take almost no room in the file
    require_memory(4 * size.num_rows * size.num_columns, f"reading {path}", "a smaller file")
    content = module.read_table(path)
    described = (content.schema.pandas_metadata or {}).get("index_columns", [])
    named = [name for name in described if isinstance(name, str) and not NUMBERING.fullmatch(name)]
    return DataTable(_columns(content, path), path, named)


def _csv(path: str, signs: Signs, is_text: Callable[[str], bool], is_target: Callable[[str], bool]) -> DataTable:
    module = import_extra("pyarrow.csv", extra="tables", purpose="reading tables")
    found, names, skipped = _header(path, signs.delimiter)

    def read(texts: Collection[str], **options: Any) -> Any:
        with _opened(path) as file:
            return module.read_csv(
                file,
                read_options=module.ReadOptions(skip_rows=len(skipped)),
                parse_options=module.ParseOptions(delimiter=found, newlines_in_values=True),
                convert_options=module.ConvertOptions(
                    null_values=[""], strings_can_be_null=True, column_types=dict.fromkeys(texts, "string"), **options
                ),
            )

    try:
        content = read([name for name in names if is_text(name.strip())])
        columns = _columns(content, path)
        if any(column.type == "binary" for column in content.columns):
            raise UnicodeError
    except Exception:
        with _opened(path) as file:
            decoded(file.read())  # an error that names the line, if the file is not UTF-8
        raise
    assumed = [f"delimiter {show(found)}"] if signs.delimiter is None and found != "," else []
    if comments := [line for line in skipped if line.startswith("#")]:
        assumed.append(f"{plural(len(comments), 'line')} above the column names skipped, such as {show(comments[0])}")
    if len(columns) == 1:
        only = f"has only one column, {show(next(iter(columns)))} (delimiter {show(found)})"
        spaces = ', for example with pandas.read_csv(FILE, sep=r"\\s+").to_csv(FILE, index=False)'
        remedy = f"separate the columns by commas{spaces}" if " " in names[0].strip() else "set data.delimiter"
        raise DataError(f"{path}: {only}; {remedy}, or add columns of inputs")
    keys = "" if signs.are_set else "set {}"
    table = DataTable(columns, path, (), lambda row: f"line {_line_of(path, found, row, len(skipped))}", signs=keys)
    arrays, raw = dict(zip(columns, content.columns, strict=True)), dict(zip(columns, names, strict=True))
    of_type = {kind: [name for name in columns if str(arrays[name].type) == kind] for kind in TYPES}

    def written(chosen: Sequence[str]) -> dict[str, Any]:
        """Return columns as they are written in the file: PyArrow arrays of text."""
        again = [raw[name] for name in chosen]
        content = read(again, include_columns=again) if again else {}
        return {name: content[raw[name]] for name in chosen}

    for name, text in written([name for name in of_type["int64"] if is_target(name)]).items():
        require_one_text_per_number(table.column(name), text)
    texts = {name: arrays[name] for name in of_type["string"] if not is_text(name)}
    numbers, signed = signs.numbers(table, texts, of_type["double"], written, found)
    return replace(table, columns=columns | numbers, assumed=(*assumed, *signed))


def _header(path: str, delimiter: str | None) -> tuple[str, list[str], list[str]]:
    """Return the delimiter of a CSV file, the names of its columns, and the lines above them.

    Above the names may be empty lines, a line such as `sep=;`, and lines that start with #. The last line that starts
    with # has the names if the next line has as many columns and contains a number.
    """
    with _opened(path) as file:
        lines = file.read(SAMPLE).decode("utf-8-sig", errors="replace").splitlines()
    first = next((number for number, line in enumerate(lines) if line), 0)
    named = re.fullmatch('"?sep=(.)"?', lines[first]) if lines else None
    first += named is not None
    header = next((number for number in range(first, len(lines)) if lines[number][:1] not in ("", "#")), first)
    line = lines[header] if lines else ""
    found = delimiter or (named and named[1]) or max(DELIMITERS, key=re.sub('"[^"]*"', "", line).count)
    if header > first and lines[header - 1].count(found) == line.count(found) > 0:
        header -= any(NUMBER.fullmatch(cell.strip()) for cell in line.split(found))
    return found, next(csv.reader(lines[header : header + 1], delimiter=found), []), lines[:header]


def _columns(content: Any, path: str) -> dict[str, Any]:
    """Return the columns of a PyArrow table by name, without spaces around the names."""
    names = [name.strip() for name in content.column_names]
    require_different_names(names, path)
    return {name: column.to_numpy() for name, column in zip(names, content.columns, strict=True)}


def _opened(path: str) -> Any:
    return _Compressed(path, "rb") if path.lower().endswith(".gz") else open(path, "rb")


class _Compressed(gzip.GzipFile):
    """A compressed file. `read` raises DataError if the content is larger than the memory that was free at first."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._free = free_memory()

    def read(self, size: int | None = -1) -> bytes:
        left = self._free - self.tell()
        content = super().read(int(min(left + 1, sys.maxsize)) if size is None or size < 0 else size)
        if len(content) > left:
            raise DataError(f"{self.name}: cannot be read: its content is larger than the free memory")
        return content


def _line_of(path: str, delimiter: str, row: int, skipped: int) -> int:
    """Return the number of the last line with the sample `row` of a CSV file. The first line has number 1.

    `skipped`: number of lines above the column names.
    """
    with _opened(path) as file:
        lines = itertools.islice(io.TextIOWrapper(file, "utf-8-sig", errors="replace", newline=""), skipped, None)
        reader = csv.reader(lines, delimiter=delimiter)
        return skipped + next(itertools.islice((reader.line_num for values in reader if values), row + 1, None))
