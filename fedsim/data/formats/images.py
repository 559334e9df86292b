"""Images of torchvision's data sets, stored as uint8 [n, channels, height, width] and normalised per channel.

Files in the format of MNIST are read without torchvision, whose import takes a second.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.core.numbers import PositiveFloat, PositiveInt
from fedsim.data.pictures import pixels_of
from fedsim.data.shapes import SampleShape
from fedsim.data.sources import MNIST_STATISTICS, dataset
from fedsim.data.tensors import TensorData
from fedsim.errors import DataError, FedsimError, MissingPackageError, one_line, show
from fedsim.hints.names import closest
from fedsim.system import packages
from fedsim.system.devices import require_memory
from fedsim.system.files import is_file, user_path

CLASS_NAMES = {  # in torchvision
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
    "kmnist": "KMNIST",
    "emnist": "EMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "svhn": "SVHN",
}
EMNIST_CLASSES = {"balanced": 47, "byclass": 62, "bymerge": 47, "digits": 10, "letters": 26, "mnist": 10}
KINDS = "images-idx3", "labels-idx1"
MNIST_FILES = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in KINDS]
FILES = {  # below the root
    **{name: [f"{name}/raw/{file}" for file in MNIST_FILES] for name in ("MNIST", "FashionMNIST", "KMNIST")},
    "CIFAR10": [
        f"cifar-10-batches-py/{file}"
        for file in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta")
    ],
    "CIFAR100": ["cifar-100-python/train", "cifar-100-python/test", "cifar-100-python/meta"],
    "SVHN": ["train_32x32.mat", "test_32x32.mat"],
}
STATISTICS = {  # published mean and standard deviation of the training pixels per channel; others are computed
    "MNIST": MNIST_STATISTICS,
    "FashionMNIST": ((0.2860,), (0.3530,)),
    "CIFAR10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "CIFAR100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "SVHN": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
}
TEST_SPLITS = dict.fromkeys(("CLEVRClassification", "ImageNet", "Imagenette", "Places365"), "val")  # others: "test"
WITHOUT_LABELS = "CelebA", "Cityscapes", "Kitti", "LFWPairs", "WIDERFace"  # one integer label per image
SET_BY_FEDSIM = "root", "download", "loader", "transform", "target_transform", "transforms"
PARAMETERS_OF_READING = "size", "mean", "std"  # of `read_images`, not of torchvision's classes

Parts = tuple[dict[str, Any], dict[str, Any]]  # arguments of a torchvision class for the training and the test images


def lacks_files(name: str, root: str | Path, **params: Any) -> bool:
    """Whether the data set called `name` would download files to this folder."""
    class_name = CLASS_NAMES.get(name, name.removeprefix("torchvision:"))
    if class_name == name:
        lacks = getattr(dataset.get(name).target, "lacks_files", None) if name in dataset.names() else None
        return lacks is not None and lacks(Path(root), **params)
    root = user_path(root)
    arguments = {key: value for key, value in params.items() if key not in PARAMETERS_OF_READING}
    if files := _files(class_name, **arguments):
        return not all(is_file(root / file) for file in files)
    try:
        _make(class_name, root, arguments)
    except Exception:  # torchvision has a different one for each data set
        return True
    return False


@dataset("mnist", declared=lambda: SampleShape((1, 28, 28), 10))
def mnist(root: Path) -> tuple[TensorData, TensorData]:
    """MNIST: 60,000 images to train and 10,000 to test. Torchvision downloads missing files.

    Images are uint8 [n, 1, 28, 28]. LeCun et al. 1998.

    Args:
        root: the folder that holds MNIST/raw, as in torchvision.

    Raises DataError if a file can be neither found nor downloaded, or is damaged.

    >>> train, test = fedsim.load_dataset("mnist", "~/data")  # doctest: +SKIP
    """
    return read_images("MNIST", root)


@dataset("fashion_mnist", declared=lambda: SampleShape((1, 28, 28), 10))
def fashion_mnist(root: Path) -> tuple[TensorData, TensorData]:
    """Fashion-MNIST: 60,000 images to train and 10,000 to test. Torchvision downloads missing files.

    Images are uint8 [n, 1, 28, 28]. Arguments and errors are those of `mnist`. Xiao et al. 2017.

    >>> train, test = fedsim.load_dataset("fashion_mnist", "~/data")  # doctest: +SKIP
    """
    return read_images("FashionMNIST", root)


@dataset("kmnist", declared=lambda: SampleShape((1, 28, 28), 10))
def kmnist(root: Path) -> tuple[TensorData, TensorData]:
    """Kuzushiji-MNIST: 60,000 images of cursive Japanese characters to train and 10,000 to test, 10 classes.

    Images are uint8 [n, 1, 28, 28]. Arguments and errors are those of `mnist`. Clanuwat et al. 2018.

    >>> train, test = fedsim.load_dataset("kmnist", "~/data")  # doctest: +SKIP
    """
    return read_images("KMNIST", root)


@dataset("emnist", declared=lambda split: SampleShape((1, 28, 28), EMNIST_CLASSES[split]))
def emnist(
    root: Path, *, split: Literal["balanced", "byclass", "bymerge", "digits", "letters", "mnist"] = "balanced"
) -> tuple[TensorData, TensorData]:
    """EMNIST: handwritten letters and digits, 131,600 to 814,255 images by split. Torchvision downloads missing files.

    Images are uint8 [n, 1, 28, 28], transposed as in the files. Errors are those of `mnist`. Cohen et al. 2017.

    Args:
        root: the folder that holds EMNIST/raw, as in torchvision.
        split: "byclass" has 62 classes, "bymerge" and "balanced" 47, "letters" 26, "digits" and "mnist" 10. The labels
            of "letters" are 1 to 26 in the files, and 0 to 25 here.

    >>> train, test = fedsim.load_dataset("emnist", "~/data", split="letters")  # doctest: +SKIP
    """
    return read_images("EMNIST", root, split=split)


@dataset("cifar10", declared=lambda: SampleShape((3, 32, 32), 10))
def cifar10(root: Path) -> tuple[TensorData, TensorData]:
    """CIFAR-10: 50,000 colour images to train and 10,000 to test, 10 classes. Torchvision downloads missing files.

    Images are uint8 [n, 3, 32, 32]. Krizhevsky 2009.

    Args:
        root: the folder that holds cifar-10-batches-py, as in torchvision.

    Raises DataError if a file can be neither found nor downloaded, or its checksum is wrong.

    >>> train, test = fedsim.load_dataset("cifar10", "~/data")  # doctest: +SKIP
    """
    return read_images("CIFAR10", root)


@dataset("cifar100", declared=lambda: SampleShape((3, 32, 32), 100))
def cifar100(root: Path) -> tuple[TensorData, TensorData]:
    """CIFAR-100: 50,000 colour images to train and 10,000 to test, 100 classes. Torchvision downloads missing files.

    Images are uint8 [n, 3, 32, 32]. Errors are those of `cifar10`. Krizhevsky 2009.

    Args:
        root: the folder that holds cifar-100-python, as in torchvision.

    >>> train, test = fedsim.load_dataset("cifar100", "~/data")  # doctest: +SKIP
    """
    return read_images("CIFAR100", root)


@dataset("svhn", declared=lambda: SampleShape((3, 32, 32), 10))
def svhn(root: Path) -> tuple[TensorData, TensorData]:
    """SVHN: 73,257 colour images of house numbers to train and 26,032 to test, 10 classes. Needs SciPy.

    Images are uint8 [n, 3, 32, 32]. The digit 0 has label 10 in the files, and 0 here. Errors are those of `cifar10`.
    Netzer et al. 2011.

    Args:
        root: the folder that holds train_32x32.mat, as in torchvision, which downloads missing files.

    >>> train, test = fedsim.load_dataset("svhn", "~/data")  # doctest: +SKIP
    """
    return read_images("SVHN", root)


@dataset.family("torchvision")
def torchvision_class(name: str) -> Any:
    """Data set of torchvision.datasets that has one label per image, training and test images, such as Flowers102.

    The arguments of the torchvision class are parameters of the data set. `size` scales and crops images to squares.
    `mean` and `std` replace the default values for normalisation (published, or of the training images). An argument of
    the class with one of these names, such as Imagenette's size, keeps its default.
    """
    _, parameters, parts = _described(name)
    excluded = {*SET_BY_FEDSIM, *PARAMETERS_OF_READING, *parts[0]}
    theirs = [p.replace(kind=p.KEYWORD_ONLY) for key, p in parameters.items() if key not in excluded]
    function: Any = functools.partial(read_images, name)
    ours = list(inspect.signature(function, eval_str=True).parameters.values())[:-1]
    function.__signature__ = inspect.Signature([*ours, *theirs])
    function.__doc__ = torchvision_class.__doc__
    return function


def read_images(
    class_name: str,
    root: Path,
    *,
    size: PositiveInt | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[PositiveFloat] | None = None,
    **arguments: Any,
) -> tuple[TensorData, TensorData]:
    """Return the training and test images of a class of torchvision.datasets. Missing files are downloaded.

    Args:
        class_name: name of the class.
        root: folder of data sets.
        size: height and width to which images are scaled and cropped. None: all images must have one size.
        mean, std: mean and standard deviation of the pixels in [0, 1], one value per channel. None: the published
            values of the data set if fedsim knows them, otherwise those of the training images.
        arguments: further arguments of the class.

    Raises DataError if files are missing or damaged, if images have different sizes, or if labels are not integers.

    Cost: reading the files, and one copy in memory if torchvision does not return uint8 [n, channels, height, width].
    """
    files = _files(class_name, **arguments)
    if missing := [root / file for file in files if not is_file(root / file)]:
        embedded = ", or use the embedded data set: data.name=mnist5k" if class_name == "MNIST" else ""
        _download(class_name, root, arguments, f"{missing[0]} is missing", f"that holds {files[0]}{embedded}")
    if files and "idx" in files[0] and size is None:
        parts = [_read_pair(root / images, root / labels) for images, labels in (files[:2], files[2:])]
    else:
        parts = [_tensors(part, size) for part in _opened(class_name, root, arguments, files)]
    if arguments.get("split") == "letters" and class_name == "EMNIST":
        parts = [(images, labels - 1) for images, labels in parts]
    channels, known = parts[0][0].shape[1], STATISTICS.get(class_name) or _mean_and_std(parts[0][0])
    for key, values in (("mean", mean), ("std", std)):
        if values and len(values) != channels:
            raise DataError(f"data.{key} = {list(values)}: must have {channels} numbers, one per channel")
    mean, std = mean or known[0], std or known[1]
    train, test = (TensorData.of_images(images, labels, mean, std) for images, labels in parts)
    return train, test


def _files(class_name: str, *, split: str = "balanced", **arguments: Any) -> list[str]:
    """Return the paths of a data set's files relative to the root, or [] if fedsim does not know the files."""
    if class_name == "EMNIST":
        return [f"EMNIST/raw/emnist-{split}-{part}-{kind}-ubyte" for part in ("train", "test") for kind in KINDS]
    return FILES.get(class_name, [])


def _described(name: str) -> tuple[Any, dict[str, inspect.Parameter], Parts]:
    """Return a torchvision class, its parameters, and the arguments that select the training and the test images."""
    datasets = packages.import_torchvision().datasets
    classes = {key: value for key in datasets.__all__ if isinstance(value := getattr(datasets, key), type)}
    if name not in classes:
        hints = [f"; did you mean {show(key)}?" for key in closest(name, classes)]
        raise LookupError("no such class in torchvision.datasets" + "".join(hints[:1]))
    class_, parameters = classes[name], dict[str, inspect.Parameter]()
    for base in class_.__mro__[:-1]:
        theirs = inspect.signature(base, eval_str=True).parameters
        parameters = {**{key: p for key, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD}, **parameters}
        if all(p.kind is not p.VAR_KEYWORD for p in theirs.values()):
            break
    instead = "pass a pair instead, as in fedsim.run(data=(train, test))"
    if "target_transform" not in parameters or name in WITHOUT_LABELS:
        raise LookupError(f"its samples are not pairs of an image and one class label; {instead}")
    if "train" in parameters:
        return class_, parameters, ({"train": True}, {"train": False})
    default = parameters["split"].default if "split" in parameters else None
    if not isinstance(default, str):
        raise LookupError(f"the data set has no training and test parts; {instead}")
    train = "train" if name == "LFWPeople" else default
    return class_, parameters, ({"split": train}, {"split": TEST_SPLITS.get(name, "test")})


def _make(class_name: str, root: Path, arguments: Mapping[str, Any]) -> list[Any]:
    class_, _, parts = _described(class_name)
    try:
        return [class_(root, **part, **arguments) for part in parts]
    except ModuleNotFoundError as error:
        place = f"torchvision.datasets.{class_name}"
        raise MissingPackageError(f"{place} needs the package {error.name}: pip install {error.name}") from None


def _opened(class_name: str, root: Path, arguments: Mapping[str, Any], files: Sequence[str]) -> list[Any]:
    """Return torchvision's data sets of training and test images.

    If torchvision cannot read them, the data set is downloaded, unless fedsim knows its `files` (then DataError).
    """
    try:
        return _make(class_name, root, arguments)
    except FedsimError:
        raise
    except Exception as error:
        if files:
            place = _damaged(class_name, root, files) or root
            raise DataError(f"{place}: cannot be read: {one_line(error)}; remove it to download it again") from error
        problem = f"{root} lacks files of {class_name} ({one_line(error)})"
        _download(class_name, root, arguments, problem, "that holds them")
    return _make(class_name, root, arguments)


def _damaged(class_name: str, root: Path, files: Sequence[str]) -> Path | None:
    """Return the first file that fails torchvision's checksum test, or None."""
    class_ = _described(class_name)[0]
    lists = (getattr(class_, name, ()) for name in ("train_list", "test_list"))
    entries = [*itertools.chain(*lists), *getattr(class_, "split_list", {}).values()]
    sums = {name: checksum for *_, name, checksum in entries}
    check = packages.import_torchvision().datasets.utils.check_integrity
    return next((root / file for file in files if not check(root / file, sums.get(Path(file).name))), None)


def _download(class_name: str, root: Path, arguments: Mapping[str, Any], problem: str, folder: str) -> None:
    """Download a data set. On failure, raise a DataError whose message starts with `problem` and names `folder`."""
    _, parameters, parts = _described(class_name)
    try:
        if "download" not in parameters:
            raise DataError("torchvision cannot download this data set")
        packages.download(class_name, root, [{**part, **arguments} for part in parts])
    except DataError as error:
        raise DataError(
            f"data.name: {problem}, and {error}. Put the files there, or set data.root or $FEDSIM_DATA to the folder "
            f"{folder}"
        ) from error


def _read_pair(images: Path, labels: Path) -> tuple[Tensor, Tensor]:
    pixels, classes = _read_idx(images), _read_idx(labels)
    if pixels.ndim != 3 or classes.shape != pixels.shape[:1]:
        shapes = f"the labels have shape {list(classes.shape)}, but the images have shape {list(pixels.shape)}"
        raise DataError(f"{labels}: cannot be read: {shapes}; remove it to download it again")
    return pixels[:, None], classes.long()


def _read_idx(path: Path) -> Tensor:
    """Return the numbers in a file of MNIST: uint8 of any shape."""
    try:
        content = np.fromfile(path, np.uint8)
        if content[:3].tolist() != [0, 0, 8]:  # 8: uint8
            raise ValueError("it is not in the format of MNIST")
        start = 4 + 4 * int(content[3])
        return torch.from_numpy(content[start:].reshape(content[4:start].view(">u4").tolist()))
    except Exception as error:
        raise DataError(f"{path}: cannot be read: {one_line(error)}; remove it to download it again") from error


def _tensors(part: Any, size: int | None) -> tuple[Tensor, Tensor]:
    """Return the images, uint8 [n, channels, height, width], and the labels [n] of a torchvision data set.

    `size` is the height and width to which the images are cropped and resized. None: they keep their size.
    """
    data, targets = getattr(part, "data", None), getattr(part, "targets", getattr(part, "labels", ()))
    if size is not None or not isinstance(data, (np.ndarray, Tensor)) or np.ndim(targets) != 1:
        return _read_samples(part, size)
    images, labels = torch.as_tensor(data), torch.as_tensor(targets).long()
    if images.ndim == 3:
        images = images[:, None]
    elif images.shape[3] in (1, 3) and images.shape[1] not in (1, 3):
        images = images.permute(0, 3, 1, 2)
    return images.contiguous(), labels


def _read_samples(part: Any, size: int | None) -> tuple[Tensor, Tensor]:
    """Return the result of `_tensors` by reading the samples of a torchvision data set one by one."""
    pixels, labels = torch.empty(0), torch.zeros(len(part), dtype=torch.int64)
    for index in range(len(part)):
        place = f"image {index}{_file_of(part, index)}"
        try:
            image, label = part[index]
            array = pixels_of(image, "L" if image.mode == "L" else "RGB", size, crop=True)
            sample = torch.from_numpy(array.copy()).permute(2, 0, 1)
        except Exception as error:
            raise DataError(f"{place}: cannot be read: {one_line(error)}") from error
        if not isinstance(label, (int, np.integer)):
            raise DataError(f"{place}: must have an integer class label, not {type(label).__name__}")
        if not index:
            require_memory(len(part) * sample.numel(), "the images", "a smaller data.size")
            pixels = torch.empty(len(part), *sample.shape, dtype=torch.uint8)
        if sample.shape != pixels.shape[1:]:
            shapes = f"{list(sample.shape)}, but image 0 has {list(pixels.shape[1:])}"
            raise DataError(f"{place}: has shape {shapes}; set data.size to scale all images to one size")
        pixels[index], labels[index] = sample, int(label)
    return pixels, labels


def _file_of(part: Any, index: int) -> str:
    """Return the path of an image as " (PATH)" for an error message. Return "" if the path is unknown."""
    for name in ("_image_files", "_samples", "samples", "imgs", "data", "_images"):
        if isinstance(entries := getattr(part, name, None), (list, tuple)):
            path = entries[index][0] if isinstance(entries[index], (list, tuple)) else entries[index]
            return f" ({path})" if isinstance(path, (str, os.PathLike)) else ""
    return ""


def _mean_and_std(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation of each channel's pixels in [0, 1]. A constant channel has deviation 1.

    >>> _mean_and_std(torch.tensor([[[[0, 255]], [[51, 51]]]], dtype=torch.uint8))
    ((0.5, 0.2), (0.5, 1.0))
    """
    counts = sum(
        torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in chunk.unbind(1)])
        for chunk in images.split(1024)  # few, because bincount converts them to int64
    )
    assert isinstance(counts, Tensor)
    levels, shares = torch.arange(256).double() / 255, counts.double() / counts.sum(1, keepdim=True)
    means = shares @ levels
    deviations = (shares @ levels**2 - means**2).clamp(min=0).sqrt()
    return tuple(means.tolist()), tuple(deviation or 1.0 for deviation in deviations.tolist())
