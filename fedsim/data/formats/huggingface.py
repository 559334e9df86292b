"""Data sets of Hugging Face, from the hub or from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedsim.core.numbers import ProperFraction
from fedsim.data.columns import data_path, parts_of, warn_of_unused
from fedsim.data.encoding import InputNames, Names, table_of, train_and_test
from fedsim.data.sources import dataset
from fedsim.data.tensors import TensorData
from fedsim.errors import DataError, one_line, show
from fedsim.system.files import user_path
from fedsim.system.packages import import_extra


def _lacks_files(root: Path, *, path: str, **params: Any) -> bool:
    """Whether the data set would be downloaded from the hub."""
    return not user_path(path).is_dir()


@dataset("huggingface", lacks_files=_lacks_files)
def huggingface(
    root: Path,
    *,
    path: str,
    config: str | None = None,
    train: str | None = None,
    test: str | None = None,
    target: str | None = None,
    inputs: InputNames | None = None,
    ids: Names | None = None,
    standardize: bool = False,
    split: str | None = None,
    test_fraction: ProperFraction = 0.2,
) -> tuple[TensorData, TensorData]:
    """A Hugging Face data set, from the hub or from a folder that `save_to_disk` wrote (needs the extra `huggingface`).

    Columns are used as in the data set `csv`: numbers and one-hot text are concatenated to inputs [n, features]. A
    single column of lists of one length is an input [n, length], and a column of images is an input uint8
    [n, channels, height, width]. Text targets become class labels in sorted order.

    Args:
        root: folder for files that are downloaded from the hub.
        path: name on the hub, such as `flwrlabs/femnist`, or a folder.
        config: configuration of the data set on the hub.
        train: name of the split with the training samples. Unset: the split called train or training.
        test: name of the split with the test samples. Unset: the split called test, testing, validation, valid or val,
            or without such a split, a fraction `test_fraction` of the training samples that is drawn at random. The
            draw is the same for every seed.
        target: column of the targets. Unset: the only column called label, labels, target, targets or y.
        inputs: columns of the inputs, or those of several inputs by name, such as {"input_ids": "input_ids",
            "attention_mask": "attention_mask"}. Unset: all columns except the target and `ids`.
        ids: columns that contain the owner of each sample, for the partition `natural`.
        split: column with the part of each sample (train, test, ...), if there is no other test part. Unset: the column
            called split, if all of its values are names of parts.
        standardize: whether to scale each column of numbers to mean 0 and standard deviation 1, as in `csv`.
        test_fraction: fraction of test samples, 0 < test_fraction < 1.

    Raises DataError, which names the data set and the column, if the data set cannot be read, for missing columns and
    values, for images beside other inputs, and for columns of more than 100 different texts.

    >>> train, test = fedsim.load_dataset(  # doctest: +SKIP
    ...     "huggingface", path="flwrlabs/femnist", inputs=["image"], target="character", ids=["writer_id"])
    """
    path = data_path(path)
    datasets = import_extra("datasets", extra="huggingface", purpose="the data set huggingface")
    try:
        if Path(path).is_dir() and list(Path(path).glob("dataset_*.json")):
            splits = datasets.load_from_disk(path)
        else:
            splits = datasets.load_dataset(path, config, cache_dir=str(root / "huggingface"))
    except Exception as error:
        raise DataError(
            f"{path}: cannot be read: {one_line(error)}; on a computer without network access, use a local folder"
        ) from None
    if not hasattr(splits, "keys"):
        splits = {train or "train": splits}
    known = parts_of(list(splits), path) if train is None or test is None else (None, None)
    train, test = train or known[0] or "train", test or known[1]
    for key, name in (("train", train), ("test", test)):
        if name is not None and name not in splits:
            raise DataError(f"data.{key} = {show(name)}: no such split; {path} has {', '.join(splits)}")
    warn_of_unused(list(splits), (train, test), path)
    first, second = ([table_of(splits[name], f"{path}, split {name}")] if name else [] for name in (train, test))
    options: dict[str, Any] = {"target": target, "inputs": inputs, "ids": ids, "standardize": standardize}
    return train_and_test(first, second, split=split, test_fraction=test_fraction, **options)
