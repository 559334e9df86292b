"""The data sets that an experiment can name; any other comes in as "package.module:function".

A source is a function `(root, *, parameters) -> (train, test)`, where root is the folder for downloaded files and
train and test are map-style data sets of (input, class) samples: TensorData, or anything `as_tensor_data` can read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedsim.data import checksums, idx
from fedsim.data.tensors import TensorData, as_tensor_data
from fedsim.errors import DataError, FedsimError, one_line, show
from fedsim.registry import Registry
from fedsim.system import vision

dataset = Registry("data set", given=("root",), accepts="a function, a class or a tuple (train, test)")

MNIST_MEAN, MNIST_STD = (0.1307,), (0.3081,)
FASHION_MNIST_MEAN, FASHION_MNIST_STD = (0.2860,), (0.3530,)

MNIST5K_FILE = Path(__file__).with_name("mnist5k.npz")  # beside it, mnist5k.txt says where the images come from
MNIST5K_TRAIN = 4000  # the first images of the file; the others are for the test


def default_root() -> Path:
    """Where data sets lie unless the experiment says otherwise: $FEDSIM_DATA, else the user's cache folder.

    The cache of a user who has no home, as in a container, is in the working folder.
    """
    if os.environ.get("FEDSIM_DATA"):
        return Path(os.environ["FEDSIM_DATA"]).expanduser()
    try:
        home = Path.home()
    except RuntimeError:
        home = Path()
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "fedsim" / "data"


def load_dataset(name: str, root: str | Path | None = None, **params: Any) -> tuple[TensorData, TensorData]:
    """The training and test samples of the data set called `name`.

    Raises DataError where its files can be neither found nor downloaded, or where it is not what a data set should be.
    """
    plug = dataset.get(name, "data.dataset")
    params = plug.check(params, "data", beside=["dataset", "root"])
    try:
        folder = Path(root).expanduser() if root else default_root()
        train, test = plug.target(**plug.given(root=folder), **params)
        train, test = (_read(part, name) for part in (train, test))
    except FedsimError:
        raise
    except Exception as error:
        raise DataError(f"data.dataset = {show(name)}: {one_line(error)}") from error
    for part, data in (("training", train), ("test", test)):
        if not len(data):
            raise DataError(f"data.dataset = {show(name)}: has no {part} samples")
        if int(data.targets.min()) < 0:
            raise DataError(f"data.dataset = {show(name)}: has a negative {part} label, {int(data.targets.min())}")
    return train, test


def _read(data: Any, name: str) -> TensorData:
    """A part of a data set as tensors; what is wrong with its samples is told with its name."""
    try:
        return as_tensor_data(data)
    except DataError as error:
        raise DataError(f"data.dataset = {show(name)}: {error}") from None


@dataset("mnist5k")
def mnist5k(root: Path) -> tuple[TensorData, TensorData]:
    """5,000 real MNIST images that come with the installation: 4,000 to train, 1,000 to test, equal classes.

    All are from MNIST's training set. Digits alternate (0, 1, ..., 9, 0, 1, ...), so that a contiguous partition is
    about as even as on MNIST itself.
    """
    with np.load(MNIST5K_FILE) as file:
        images, labels = torch.from_numpy(file["images"]).unsqueeze(1), torch.from_numpy(file["labels"]).long()
    train, test = (
        TensorData.of_images(images[part], labels[part], MNIST_MEAN, MNIST_STD)
        for part in (slice(MNIST5K_TRAIN), slice(MNIST5K_TRAIN, None))
    )
    return train, test


def lacks_files(name: str, root: str | Path) -> bool:
    """Whether the data set called `name` would download files to this folder."""
    missing = getattr(dataset.get(name, "data.dataset").target, "missing_files", None)
    return missing is not None and bool(missing(Path(os.path.expanduser(root))))


@dataset("mnist")
def mnist(root: Path, *, verify: bool = True) -> tuple[TensorData, TensorData]:
    """MNIST, 60,000 to train and 10,000 to test; downloaded through torchvision where it is missing.

    verify: refuse files that are as long as MNIST's and hold something else, which damaged ones do, but also data sets
        made to take its place. Files of any other length are read as what they say they are.
    """
    return _mnist_like(root, "mnist", "MNIST", MNIST_MEAN, MNIST_STD, checksums.MNIST if verify else {})


@dataset("fashion_mnist")
def fashion_mnist(root: Path, *, verify: bool = True) -> tuple[TensorData, TensorData]:
    """Fashion-MNIST, 60,000 to train and 10,000 to test; downloaded through torchvision where it is missing.

    verify: as of `mnist`.
    """
    known = checksums.FASHION_MNIST if verify else {}
    return _mnist_like(root, "fashion_mnist", "FashionMNIST", FASHION_MNIST_MEAN, FASHION_MNIST_STD, known)


mnist.missing_files = lambda root: idx.missing_files(root / "MNIST" / "raw")
fashion_mnist.missing_files = lambda root: idx.missing_files(root / "FashionMNIST" / "raw")


def _mnist_like(
    root: Path, name: str, class_name: str, mean: tuple[float, ...], std: tuple[float, ...], known: checksums.Known
) -> tuple[TensorData, TensorData]:
    folder = root / class_name / "raw"
    missing = idx.missing_files(folder)
    if missing:
        try:
            vision.download(class_name, root)
        except DataError as error:
            raise DataError(
                f'data.dataset = "{name}": not in {folder} (no {missing[0]}), and {error}. Set data.root or '
                f"$FEDSIM_DATA to the folder that holds {class_name}/raw, or use the embedded data set: "
                "data.dataset=mnist5k"
            ) from error
    train, test = (
        TensorData.of_images(*idx.read_images_and_labels(folder, train=train, known=known), mean, std)
        for train in (True, False)
    )
    return train, test
