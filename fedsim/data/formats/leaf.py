"""Data sets in the JSON format of LEAF (Caldas et al. 2018): FEMNIST, Shakespeare, CelebA, Synthetic."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data.columns import parts_of, require_finite, samples_of
from fedsim.data.pictures import pixels_of
from fedsim.data.sources import dataset
from fedsim.data.tensors import TensorData
from fedsim.errors import DataError, one_line, show
from fedsim.system.devices import free_memory
from fedsim.system.files import decoded, read_bounded, require_regular, user_path

# The characters of LEAF's data set Shakespeare, in the order of its labels.
CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"


@dataset("leaf")
def leaf(
    *, path: str, shape: list[int] | None = None, images: str | None = None, size: int = 84
) -> tuple[TensorData, TensorData]:
    """A data set that the scripts of LEAF wrote: `PATH/train/*.json` and `PATH/test/*.json`. Caldas et al. 2018.

    The partition `natural` can give each worker the samples of one user. Inputs that are text (Shakespeare) become
    int64 [n, length], the numbers of LEAF's 80 characters, and their targets (the next characters) become class labels.
    Inputs that are names of image files (CelebA) are read from the folder `images` as uint8 [n, 3, size, size].

    Args:
        path: the folder with `train` and `test`.
        shape: shape of an input, such as [1, 28, 28] for FEMNIST. Unset: the shape in the files.
        images: folder of the image files, if inputs are file names.
        size: height and width to which these images are resized.

    Raises DataError, with the file and the user, for files that cannot be read, users without data or that are listed
    twice or not at all, and inputs and targets of different lengths or shapes.

    >>> import json, tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> user_data = {"ann": {"x": [[0.0] * 784], "y": [3]}, "bob": {"x": [[0.5] * 784] * 2, "y": [1, 2]}}
    >>> for part in ("train", "test"):
    ...     (folder / part).mkdir()
    ...     content = json.dumps({"users": ["ann", "bob"], "user_data": user_data})
    ...     _ = (folder / part / "data.json").write_text(content)
    >>> train, test = fedsim.load_dataset("leaf", path=str(folder), shape=[1, 28, 28])
    >>> train.inputs.shape, train.ids["user"].tolist()
    (torch.Size([3, 1, 28, 28]), ['ann', 'bob', 'bob'])
    """
    folder, parts = user_path(path), []
    names = parts_of([entry.name for entry in folder.iterdir()] if folder.is_dir() else [], path)
    for part in (name or default for name, default in zip(names, ("train", "test"), strict=True)):
        inputs, targets, users = [], [], []
        for place, user, user_inputs, user_targets in _users(folder / part):
            is_text = images is None and any(isinstance(value, str) for value in user_inputs)
            inputs += [_as_input(value, images, size, place) for value in user_inputs]
            targets += [_as_target(value, place, is_text) for value in user_targets]
            users += [user] * len(user_inputs)
        if not inputs:
            raise DataError(f"{path}/{part}: has no samples; its files must contain users with inputs x and targets y")
        if len({np.shape(value) for value in inputs}) != 1:
            raise DataError(f"{path}/{part}: has inputs of different shapes; all inputs must have the same shape")
        array = np.array(inputs)
        array = array.astype(np.float32) if array.dtype.kind == "f" else array
        require_finite(array, f"{path}/{part}")
        if shape is not None and np.prod(shape) != array[0].size:
            raise DataError(
                f"data.shape = {shape}: must have as many elements as an input in {path}/{part}, which has "
                f"{array[0].size} values"
            )
        array = array if shape is None else array.reshape(-1, *shape)
        parts.append(samples_of(array, np.array(targets), {"user": np.array(users)}, f"{path}/{part}"))
    return parts[0], parts[1]


def _users(folder: Path) -> Iterator[tuple[str, str, list[Any], list[Any]]]:
    """Yield (location for error messages, user name, inputs, targets) for each user in the folder's files."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise DataError(f"{folder}: has no .json files; run LEAF's preprocess.sh with -t sample")
    for file in files:
        try:
            content = json.loads(decoded(read_bounded(file, free_memory())))
            users, data = content["users"], content["user_data"]
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise DataError(f"{file}: cannot be read: {one_line(error)}") from None
        except KeyError as error:
            raise DataError(f"{file}: has no key {error}, which LEAF's files must have") from None
        times = Counter(map(str, users))
        if twice := [user for user, count in times.items() if count > 1]:
            raise DataError(f"{file}: names the user {show(twice[0])} twice; each user must occur once")
        if isinstance(data, dict) and (unlisted := [user for user in data if user not in times]):
            raise DataError(
                f"{file}: has data of the user {show(unlisted[0])}, who is not in its list of users; add the "
                "user to the list, or remove the data"
            )
        for user in users:
            place = f"{file}: user {show(user)}"
            try:
                inputs, targets = data[user]["x"], data[user]["y"]
            except (KeyError, TypeError):
                raise DataError(f"{place}: must have the keys x and y below user_data") from None
            if len(inputs) != len(targets):
                raise DataError(
                    f"{place}: has {len(inputs)} inputs and {len(targets)} targets; each input needs one target"
                )
            yield place, str(user), inputs, targets


def _as_input(value: Any, images: str | None, size: int, place: str) -> Any:
    if not isinstance(value, str):
        return value
    if images is None:
        return [_number_of(character, place) for character in value]
    from PIL import Image  # a requirement of torchvision

    file = user_path(images) / value
    try:
        require_regular(file, free_memory())
        with Image.open(file) as image:
            return pixels_of(image, "RGB", size).transpose(2, 0, 1)
    except Exception as error:
        raise DataError(f"{place}: {file}: cannot be read: {one_line(error)}") from None


def _as_target(value: Any, place: str, is_text: bool) -> Any:
    """Return a number unchanged. If inputs are text, return the index of a character in LEAF's list of characters."""
    if not isinstance(value, str):
        return value
    if not is_text:
        raise DataError(f"{place}: the target {show(value)} is text, but the inputs are not; write numbers of classes")
    return _number_of(value, place)


def _number_of(character: str, place: str) -> int:
    """Return the index of a character in LEAF's list of characters."""
    if len(character) != 1 or character not in CHARACTERS:
        raise DataError(f"{place}: {show(character)} is not one of LEAF's {len(CHARACTERS)} characters")
    return CHARACTERS.index(character)
