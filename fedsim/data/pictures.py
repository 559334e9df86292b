"""Pixels of PIL images. PIL is imported on first use, because only some data sets need it."""

from __future__ import annotations

from typing import Any

import numpy as np

WITHOUT_VALUES = {"1": "L", "P": "RGB", "PA": "RGBA"}  # modes whose numbers are bits or positions in a palette
MORE_BITS = "the image has the mode {} of PIL; convert it to 8 bits per channel"


def upright(picture: Any) -> Any:
    """Return a PIL image, rotated and mirrored as its EXIF orientation says."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(picture)


def raw_pixels_of(picture: Any) -> np.ndarray:
    """Return the pixels of a PIL image, [height, width] or [height, width, channels]. Palettes are resolved.

    Raises ValueError for integers of more than 8 bits, which would be taken for tokens.
    """
    if picture.mode.startswith("I"):
        raise ValueError(MORE_BITS.format(picture.mode))
    picture = upright(picture)
    return np.array(picture.convert(WITHOUT_VALUES.get(picture.mode, picture.mode)))


def pixels_of(picture: Any, mode: str, size: int | None = None, *, crop: bool = False) -> np.ndarray:
    """Return the pixels of a PIL image, uint8 [height, width, channels].

    Args:
        picture: PIL image.
        mode: mode of PIL to which the image is converted, "L" or "RGB".
        size: height and width to which the image is resized. None: the image keeps its size.
        crop: whether to cut off the longer sides before resizing, instead of distorting the image.

    Raises ValueError for more than 8 bits per channel, which PIL would not scale but cut off.
    """
    from PIL import ImageOps

    if picture.mode.startswith(("I", "F")):
        raise ValueError(MORE_BITS.format(picture.mode))
    picture = upright(picture).convert(mode)
    if size is not None:
        picture = ImageOps.fit(picture, (size, size)) if crop else picture.resize((size, size))
    return np.atleast_3d(picture)
