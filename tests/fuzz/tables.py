"""Data sets of owners whose names, and whose classes and files, are written in several ways.

The functions write small files and read them as fedsim reads a user's files. Sorted as text, and then as numbers, the
names of all `NAMINGS` have the same order, so the same owner is the same worker.
"""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

import fedsim
from fedsim.data import TensorData

SIZES = [5, 7, 4, 6, 8, 6]  # number of training samples of each owner; half as many for tests


class Naming(NamedTuple):
    owners: list[str]
    classes: list[str]
    file: str  # format of a file's number


NAMINGS = {
    "plain": Naming([*"abcdef"], [*"abc"], "{}"),
    "numbers": Naming([*"123456"], [*"012"], "{}"),
    "padded": Naming(["01", "02", "03", "04", "05", "06"], ["00", "01", "02"], "{:04}"),
    "zeros": Naming(["001", "01", "1", "1.0", "1e0", "1e3"], ["0", "1", "2"], "{:02}"),
    "exponents": Naming(["1000", "10e2", "1e3", "2000", "20e2", "2e3"], ["a", "b", "c"], "{:03}"),
    "hospitals": Naming(["Aachen", "Klinik, Nord", 'St. "Mary"', "St. Mary", "ulm", "Örebro"], ["a", "b", "ü"], "{}"),
    "words": Naming(["False", "Inf", "NaN", "None", "True", "inf"], ["No", "Yes", "null"], "{}"),
}  # fmt: skip


class Samples(NamedTuple):
    """Samples of one part: inputs [n, 16], and the name of each sample's class and owner."""

    inputs: np.ndarray
    classes: list[str]
    owners: list[str]


def _part(sizes: list[int], naming: Naming, start: float) -> Samples:
    owner_of = np.repeat(np.arange(len(sizes)), sizes)
    inputs = np.sin(np.arange(16.0 * len(owner_of)) + start).reshape(-1, 16).round(3)
    classes = [naming.classes[k % 3] for k in range(len(owner_of))]
    return Samples(inputs, classes, [naming.owners[owner] for owner in owner_of])


def _csv(folder: Path, train: Samples, test: Samples, naming: Naming) -> dict[str, str]:
    for name, part, quoting in (("train", train, csv.QUOTE_MINIMAL), ("test", test, csv.QUOTE_ALL)):
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, quoting=quoting)
            writer.writerow([*(f"x{k}" for k in range(16)), "owner", "label"])
            writer.writerows([*row, *names] for row, *names in zip(part.inputs, part.owners, part.classes, strict=True))
    return {"name": "csv", "path": str(folder / "train.csv"), "test_path": str(folder / "test.csv"), "ids": "owner"}


def _parquet(folder: Path, train: Samples, test: Samples, naming: Naming) -> dict[str, str]:
    import pyarrow
    from pyarrow import parquet

    for name, part in (("train", train), ("test", test)):
        columns = {f"x{k}": column for k, column in enumerate(part.inputs.T)}
        table = pyarrow.table({**columns, "owner": part.owners, "label": part.classes})
        parquet.write_table(table, folder / f"{name}.parquet")
    files = {"path": str(folder / "train.parquet"), "test_path": str(folder / "test.parquet")}
    return {"name": "parquet", **files, "ids": "owner"}


def _npz(folder: Path, train: Samples, test: Samples, naming: Naming) -> dict[str, str]:
    arrays = {"inputs": train.inputs, "targets": np.array(train.classes), "owner": np.array(train.owners)}
    np.savez(folder / "all.npz", **arrays, test_inputs=test.inputs, test_targets=np.array(test.classes))
    return {"name": "npz", "path": str(folder / "all.npz")}


def _leaf(folder: Path, train: Samples, test: Samples, naming: Naming) -> dict[str, str]:
    for name, part in (("train", train), ("test", test)):
        users: dict[str, dict[str, list]] = {}
        for row, label, owner in zip(part.inputs.tolist(), part.classes, part.owners, strict=True):
            user = users.setdefault(owner, {"x": [], "y": []})
            user["x"].append(row)
            user["y"].append(naming.classes.index(label))
        (folder / name).mkdir()
        (folder / name / "all.json").write_text(json.dumps({"users": [*users], "user_data": users}))
    return {"name": "leaf", "path": str(folder)}


def _images(folder: Path, train: Samples, test: Samples, naming: Naming) -> dict[str, str]:
    from PIL import Image

    for name, part in (("train", train), ("test", test)):
        for number, (row, label, owner) in enumerate(zip(*part, strict=True)):
            file = folder / name / label / owner / f"{naming.file.format(number + 1000)}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((row.reshape(4, 4) * 100 + 127).astype("uint8")).save(file)
    return {"name": "image_folder", "path": str(folder)}


FORMS: dict[str, Callable[[Path, Samples, Samples, Naming], dict[str, str]]] = {
    **{"csv": _csv, "parquet": _parquet, "npz": _npz, "leaf": _leaf, "images": _images}
}


def owners(
    root: object,
    *,
    form: Literal[tuple(FORMS)] = "csv",  # type: ignore[valid-type]
    naming: Literal[tuple(NAMINGS)] = "plain",  # type: ignore[valid-type]
) -> tuple[TensorData, TensorData]:
    """Samples of 6 owners and 3 classes, which fedsim reads from files."""
    return _read(form, naming)


@cache
def _read(form: str, naming: str) -> tuple[TensorData, TensorData]:
    names = NAMINGS[naming]
    train, test = _part(SIZES, names, 0.0), _part([(size + 1) // 2 for size in SIZES], names, 0.5)
    with tempfile.TemporaryDirectory() as folder:
        return fedsim.load_dataset(**FORMS[form](Path(folder), train, test, names))
