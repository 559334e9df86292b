"""Image files in folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from pydantic import PositiveInt

from fedsim.data.columns import Fraction, pixels_of, split_test
from fedsim.data.sources import dataset
from fedsim.data.tensors import TensorData
from fedsim.errors import DataError, one_line

SUFFIXES = ".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff"
TEST_FOLDERS = "test", "val", "valid"


@dataset("image_folder")
def image_folder(
    *,
    path: str,
    size: PositiveInt | None = None,
    grey: bool = False,
    test_fraction: Fraction = 0.2,
) -> tuple[TensorData, TensorData]:
    """Image files `PATH/train/CLASS/IMAGE` and `PATH/test/CLASS/IMAGE`, or `PATH/CLASS/IMAGE` without a test part.

    Classes are numbered in sorted order. Images `CLASS/OWNER/IMAGE` belong to the owner OWNER, for the partition
    `natural`. Pixels are uint8 [n, channels, height, width], divided by 255 when a batch is made.

    Args:
        path: the folder.
        size: height and width to which all images are resized. Unset: all images must have one size.
        grey: whether to convert the images to one channel.
        test_fraction: fraction of the samples that is drawn at random for tests if there is no test part. The draw is
            the same for every seed.

    Raises DataError, with the file, for images that cannot be read or have different sizes, and for unknown classes.

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
    folder = Path(path).expanduser()
    train_folder = folder / "train" if (folder / "train").is_dir() else folder
    if not train_folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    test_folder = next((folder / name for name in TEST_FOLDERS if (folder / name).is_dir()), None)
    if train_folder == folder and test_folder is not None:
        raise DataError(f"{folder}: has a folder {test_folder.name}, but no folder train; put the classes into train")
    classes = sorted(e.name for e in train_folder.iterdir() if e.is_dir() and not e.name.startswith("."))
    train = _read(train_folder, classes, size, grey)
    if test_folder is None:
        return split_test(train, test_fraction, path, are_classes=True)
    return train, _read(test_folder, classes, size, grey)


def _read(folder: Path, classes: list[str], size: int | None, grey: bool) -> TensorData:
    """Return the images in `folder`/CLASS as a data set, in the sorted order of their paths."""
    from PIL import Image  # a requirement of torchvision

    files = sorted(
        file
        for top in folder.iterdir()  # rglob follows links only at its start
        for file in (top, *top.rglob("*"))
        if file.suffix.lower() in SUFFIXES and not any(p.startswith(".") for p in file.relative_to(folder).parts)
    )
    images, labels, owners = list[np.ndarray](), list[int](), list[str]()
    for file in files:
        name, *below = file.relative_to(folder).parts
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
                f"{file}: has {pixels.shape[1]} x {pixels.shape[0]} pixels, but {files[0].name} has "
                f"{images[0].shape[1]} x {images[0].shape[0]}; set `size` to resize all images"
            )
        images.append(pixels)
        labels.append(classes.index(name))
        owners.append(below[0] if len(below) > 1 else "")
    if not images:
        suffixes = ", ".join(SUFFIXES)
        raise DataError(f"{folder}: has no images ({suffixes}); it must have one folder of images per class")
    inputs = torch.from_numpy(np.stack(images).transpose(0, 3, 1, 2).copy())
    ids = {"owner": np.array(owners)} if all(owners) else {}
    return TensorData(inputs, torch.tensor(labels), scale=1 / 255, ids=ids)
