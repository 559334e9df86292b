"""CSV and Parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedsim.core.numbers import ProperFraction
from fedsim.data.columns import data_path, is_nameless, train_and_test, unreadable
from fedsim.data.sources import dataset
from fedsim.data.tensors import TensorData
from fedsim.errors import DataError, show
from fedsim.system.packages import import_extra


@dataset("csv")
@dataset("parquet")
def table(
    *,
    path: str,
    test_path: str | None = None,
    target: str | None = None,
    inputs: list[str] | None = None,
    ids: list[str] | None = None,
    test_fraction: ProperFraction = 0.2,
) -> tuple[TensorData, TensorData]:
    """Table in a CSV or Parquet file, one sample per line, read by PyArrow (`pip install pyarrow`).

    Columns of numbers are concatenated to inputs [n, features]. A single column of lists of one length is an input
    [n, length]. Targets that are text become class labels in sorted order.

    Args:
        path: file of the training samples: Parquet if its name ends in `.parquet`, tab-separated if it ends in `.tsv`,
            otherwise CSV.
        test_path: file of the test samples. Unset: a fraction `test_fraction` of the samples in `path` is drawn at
            random. The draw is the same for every seed.
        target: column of the targets. Unset: the only column called label, labels, target, targets or y.
        inputs: columns of the inputs. Unset: all columns except the target, `ids`, and the index of a data frame. In
            CSV files, an index is a column without a name, or called "Unnamed: 0", with the values 0, 1, 2, ..., or a
            column called index with these values in any order.
        ids: columns that contain the owner of each sample (such as a user), for the partition `natural`.
        test_fraction: fraction of test samples, 0 < test_fraction < 1.

    Raises DataError, with the file and the column, for a file that cannot be read, missing columns, inputs that are
    text, NaN, missing values and other columns without a name.

    >>> import tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "points.csv"
    >>> _ = file.write_text("x,user,y\\n" + "".join(f"{k / 10},{'ab'[k % 2]},{k}.5\\n" for k in range(10)))
    >>> train, test = fedsim.load_dataset("csv", path=str(file), ids=["user"])
    >>> train.inputs.shape, len(test), sorted(set(train.ids["user"].tolist()))
    (torch.Size([8, 1]), 2, ['a', 'b'])
    """
    train, index = _read(path)
    test = None if test_path is None else _read(test_path)[0]
    options: dict[str, Any] = {"target": target, "inputs": inputs, "ids": ids, "index": index}
    return train_and_test(train, test, (path, test_path or ""), test_fraction=test_fraction, **options)


def _read(path: str) -> tuple[dict[str, Any], list[str]]:
    """Return the columns of a CSV or Parquet file by name, and the names of those that were a data frame's index.

    Raises DataError if the file cannot be read.
    """
    path, suffix = data_path(path), Path(path).suffix.lower()
    parquet = suffix in (".parquet", ".pq")
    module = import_extra("pyarrow.parquet" if parquet else "pyarrow.csv", extra="tables", purpose="reading tables")
    try:
        if parquet:
            content = module.read_table(path)
        else:
            delimiter = "\t" if suffix == ".tsv" else ","
            content = module.read_csv(path, parse_options=module.ParseOptions(delimiter=delimiter))
        names = content.column_names
    except Exception as error:  # the errors of PyArrow have no common base class
        raise unreadable(path, error) from None
    if repeated := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{path}: has two columns {show(repeated[0])}; the first line must contain the column names")
    columns = {}
    for name in names:
        column = content.column(name)
        if column.null_count:
            row = int(np.flatnonzero(column.is_null())[0])
            problem, remedy = f"has no value in row {row}", "remove such rows or fill in the values"
            if is_nameless(name):
                problem, remedy = f"has no name, and no value in row {row}", "remove it, such as a comma at line ends"
            raise DataError(f"{path}: column {show(name)} {problem}; {remedy}")
        columns[name] = column.to_numpy()
    described = (content.schema.pandas_metadata or {}).get("index_columns", [])
    return columns, [name for name in described if isinstance(name, str)]
