"""Image files in folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from fedsim.core.numbers import PositiveInt, ProperFraction
from fedsim.data.columns import TRAIN_PARTS, part_like, parts_of, warn, warn_of_unused
from fedsim.data.drawn_tests import split_test
from fedsim.data.pictures import pixels_of
from fedsim.data.sources import dataset
from fedsim.data.tensors import TensorData
from fedsim.errors import DataError, cut, one_line
from fedsim.system.files import user_path

Images = Mapping[Path, Sequence[str]]  # names of the class, of the owner if there is one, and of the file, by file
SUFFIXES = ".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff"


@dataset("image_folder")
def image_folder(
    *, path: str, size: PositiveInt | None = None, grey: bool = False, test_fraction: ProperFraction = 0.2
) -> tuple[TensorData, TensorData]:
    """Image files `PATH/train/CLASS/IMAGE` and `PATH/test/CLASS/IMAGE`, or `PATH/CLASS/IMAGE` without a test part.

    Classes are numbered in sorted order. For the partition `natural`, the owner of the images `CLASS/OWNER/IMAGE`, and
    also of `PATH/OWNER/train/CLASS/IMAGE` and `PATH/OWNER/test/CLASS/IMAGE`, is OWNER. Pixels are uint8 [n, channels,
    height, width], divided by 255 when a batch is made. Images are rotated as their EXIF data say. `train` may also be
    called training, and `test` testing, validation, valid or val, in upper or lower case. Other files and folders are
    not read, and are named in a warning.

    Args:
        path: the folder.
        size: height and width to which all images are resized. Unset: all images must have one size.
        grey: whether to convert the images to one channel.
        test_fraction: fraction of the samples that is drawn at random for tests if there is no test part. The draw is
            the same for every seed.

    Raises DataError, with the file, for images that cannot be read, have different sizes or no class, and for images
    without an owner beside images with an owner. Folders such as train_images and test_images, which may be parts or
    classes, are errors.

    >>> import tempfile, pathlib
    >>> from PIL import Image
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ("oak", "ash"):
    ...     (folder / name).mkdir()
    ...     for number in range(5):
    ...         Image.new("RGB", (80, 60)).save(folder / name / f"{number}.png")
    >>> train, test = fedsim.load_dataset("image_folder", path=str(folder), size=64)
    >>> train.inputs.shape, len(test)
    (torch.Size([8, 3, 64, 64]), 2)
    """
    folder = user_path(path)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    entries = [entry for entry in sorted(folder.iterdir()) if not entry.name.startswith(".")]
    train_part, test_part = parts_of([entry.name for entry in entries if entry.is_dir()], str(folder))
    below = {sub.name for entry in entries if entry.is_dir() for sub in entry.iterdir() if sub.is_dir()}
    of_owners = train_part is None and test_part is None and any(name.casefold() in TRAIN_PARTS for name in below)
    train_folder = folder if train_part is None else folder / train_part
    if train_part is None and test_part is not None:
        raise DataError(f"{folder}: has a folder {test_part}, but no folder train; put the classes into train")
    if of_owners:
        images, tested = _parts_of_owners(folder, *parts_of(below, str(folder)))
    else:
        if train_part is not None:
            warn_of_unused([entry.name for entry in entries], (train_part, test_part), str(folder))
        images = _images(train_folder)
        tested = {} if test_part is None else _images(folder / test_part)
    classes = sorted({names[0] for names in images.values() if len(names) > 1})
    if train_part is None and not of_owners:
        _refuse_parts_as_classes(folder, classes)
    train = _read(train_folder, images, classes, size, grey)
    if not tested:
        return split_test(train, test_fraction, path, are_classes=True)
    return train, _read(folder, tested, classes, size, grey)


def _images(folder: Path) -> Images:
    """Return the images below a folder, in sorted order, with the names (CLASS, OWNER, IMAGE) or (CLASS, IMAGE)."""
    return {file: file.relative_to(folder).parts for file in _files(folder)}


def _parts_of_owners(folder: Path, train: str | None, test: str | None) -> tuple[Images, Images]:
    """Return the images `folder`/OWNER/`train`/CLASS/IMAGE and `folder`/OWNER/`test`/CLASS/IMAGE, as `_images` does."""
    parts: dict[str | None, dict[Path, Sequence[str]]] = {}
    for file, (owner, *below) in _images(folder).items():
        if len(below) < 3:
            raise DataError(
                f"{file}: is not at {folder}/OWNER/{train}/CLASS/IMAGE, as other images are; move the file, or, for "
                f"images without owners, move all images to {folder}/{train}/CLASS/IMAGE"
            )
        parts.setdefault(below[0], {})[file] = below[1], owner, file.name
    warn_of_unused([str(part) for part in parts], (train, test), str(folder))
    if train not in parts:
        raise DataError(f"{folder}: no folder OWNER/{train} has images; there must be training images")
    return parts[train], parts.get(test, {})


def _refuse_parts_as_classes(folder: Path, classes: Sequence[str]) -> None:
    """Raise DataError if folders that would be classes are probably parts, such as train_images and test_images.

    A single folder that is probably a training part or a test part is also an error.
    """
    train, test = part_like(classes)
    if (train and test) or (len(classes) == 1 and (train or test)):
        raise DataError(
            f"{folder}: folders such as {' and '.join(filter(None, (train, test)))} may be classes, or a training part "
            "and a test part; for parts, use the names train (or training) and test (or testing, validation, valid, "
            "val); for classes, move all folders into a folder train"
        )


def _files(folder: Path) -> list[Path]:
    """Return the image files below a folder in sorted order. A warning names other files and folders without images."""
    images, others = _listed(folder)
    if not images:
        suffixes = ", ".join(SUFFIXES)
        raise DataError(f"{folder}: has no images ({suffixes}); it must have one folder of images per class")
    filled = {file.relative_to(folder).parts[0] for file in images}
    others += [entry for entry in folder.iterdir() if entry.is_dir() and entry.name not in filled]
    endings = sorted({entry.suffix.lower() or "without an ending" for entry in others if entry.is_file()})
    kinds = [f"files ({cut(', '.join(endings))})"] * bool(endings) + ["folders without images"]
    if shown := sorted(entry for entry in others if not entry.name.startswith(".")):
        first = cut(str(shown[0].relative_to(folder)))
        warn(f"{folder}: {' and '.join(kinds)} are ignored, such as {first} ({len(shown)} in total)")
    return images


def _listed(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the image files and the other files below a folder, each in sorted order, without hidden ones."""
    files = sorted(
        file
        for top in folder.iterdir()  # rglob follows links only at its start
        for file in (top, *top.rglob("*"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    images = [file for file in files if file.suffix.lower() in SUFFIXES]
    return images, [file for file in files if file.suffix.lower() not in SUFFIXES]


def _read(folder: Path, files: Images, classes: Sequence[str], size: int | None, grey: bool) -> TensorData:
    """Return a data set of the images in `files`, in the same order.

    Args:
        folder: folder that contains the files.
        files: the image files with their names (see `_images`).
        classes: names of the classes, whose indices are the labels.
        size: height and width to which images are resized. None: all images must have one size.
        grey: whether to convert the images to one channel.
    """
    from PIL import Image  # a requirement of torchvision

    images, labels, owners, first = list[np.ndarray](), list[int](), list[str](), next(iter(files))
    for file, (name, *below) in files.items():
        if name not in classes or not below:
            allowed = ", ".join(classes[:10]) + ", ..." * (len(classes) > 10)
            raise DataError(f"{file}: must be in the folder of one of the classes {allowed}")
        try:
            with Image.open(file) as image:
                pixels = pixels_of(image, "L" if grey else "RGB", size)
        except Exception as error:
            raise DataError(f"{file}: cannot be read: {one_line(error)}") from None
        if images and pixels.shape != images[0].shape:
            raise DataError(
                f"{file}: has {pixels.shape[1]} x {pixels.shape[0]} pixels, but {first.name} has "
                f"{images[0].shape[1]} x {images[0].shape[0]}; set data.size to resize all images"
            )
        images.append(pixels)
        labels.append(classes.index(name))
        owners.append(below[0] if len(below) > 1 else "")
    if any(owners) and not all(owners):
        with_owner = next(file for file, owner in zip(files, owners, strict=True) if owner)
        raise DataError(
            f"{[*files][owners.index('')]}: is not in an owner's folder, but {with_owner.relative_to(folder)} is; "
            "move the file into the folder of its owner, or remove it"
        )
    inputs = torch.from_numpy(np.stack(images).transpose(0, 3, 1, 2).copy())
    ids = {"owner": np.array(owners)} if all(owners) else {}
    return TensorData(inputs, torch.tensor(labels), scale=1 / 255, ids=ids)
