"""Texts as windows of tokens: the plays of Shakespeare by role, and text files.

All training and test samples are views of one tensor of tokens, which has the smallest possible integer type. Batches
are converted to int64.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch

from fedsim.core.numbers import Limits, PositiveInt, ProperFraction
from fedsim.data.sources import dataset
from fedsim.data.tensors import TensorData
from fedsim.errors import DataError, show
from fedsim.system.devices import free_memory
from fedsim.system.files import decoded, read_bounded, user_path
from fedsim.system.packages import import_extra

SHAKESPEARE_FILE = Path(__file__).parents[1] / "shakespeare.json.xz"  # shakespeare.txt says where the texts come from
UNKNOWN = 0  # token of all characters outside the vocabulary
TYPES = torch.uint8, torch.int16, torch.int32

Targets = Literal["all", "last"]
Tokens = np.ndarray  # integers [tokens]


@dataset("shakespeare")
def shakespeare(
    *,
    length: PositiveInt = 80,
    stride: PositiveInt | None = None,
    targets: Targets = "all",
    min_characters: PositiveInt = 1000,
    test_fraction: ProperFraction = 0.2,
    test_windows: PositiveInt | None = None,
) -> tuple[TensorData, TensorData]:
    """The 37 plays of Shakespeare, which come with fedsim: windows of characters, for the task next_token.

    Each role of a play is an owner, so `partition = "natural"` makes 622 workers, and `partition = {name = "natural",
    by = "play"}` makes 37. The first 80 percent of the characters of each role are training data, and the rest are test
    data. No window contains characters of both parts. Inputs are [n, length]. There are 78 tokens: 0 is unused, and 1
    to 77 are the characters that occur, in the order of their code points. McMahan et al. 2017, Caldas et al. 2018
    (LEAF).

    Args:
        length: characters in a window.
        stride: distance between the starts of two consecutive windows of a role. Unset: `length`, so that windows do
            not overlap.
        targets: "all": the next character at each position, [n, length] (McMahan et al.). "last": only the character
            after the window, [n], for the task classification and `model.last_only` (LEAF, with stride = 1).
        min_characters: roles with fewer characters are left out. With 1, all 1,385 roles are kept, and roles without a
            whole window have no samples.
        test_fraction: fraction of each role's characters for tests, between 0 and 1.
        test_windows: maximum number of test windows, which are taken at equal distances. A small number makes tests
            faster. Unset: all windows.

    Raises DataError if no role is left. Cost: half a second, 4 MB for the characters, and 8 bytes per window.

    >>> train, test = fedsim.load_dataset("shakespeare")
    >>> inputs, targets = train.gather(torch.arange(2))
    >>> inputs.shape, torch.equal(inputs[0, 1:], targets[0, :-1]), train.classes
    (torch.Size([2, 80]), True, 78)
    """
    plays: dict[str, dict[str, str]] = json.loads(lzma.decompress(SHAKESPEARE_FILE.read_bytes()))
    everything = "".join(text for roles in plays.values() for text in roles.values())
    alphabet = np.flatnonzero(np.bincount(_code_points(everything)))  # sorted
    owners = [
        ({"role": f"{play}: {role}", "play": play}, text)
        for play, roles in plays.items()
        for role, text in roles.items()
        if len(text) >= min_characters
    ]
    if not owners:
        raise DataError(
            f"data.min_characters = {min_characters}: no speaking role has that many characters of text; use a "
            "smaller number"
        )
    parts = [_split(_as_tokens(_code_points(text), alphabet), test_fraction) for _, text in owners]
    names = [name for name, _ in owners]
    return windows(names, parts, length=length, stride=stride, targets=targets, test_windows=test_windows)


@dataset("text")
def text(
    *,
    path: str | list[str],
    tokens: Literal["characters", "bpe"] = "characters",
    vocabulary: Annotated[int, Limits(ge=2)] = 512,
    length: PositiveInt = 80,
    stride: PositiveInt | None = None,
    targets: Targets = "all",
    test_fraction: ProperFraction = 0.2,
    test_windows: PositiveInt | None = None,
) -> tuple[TensorData, TensorData]:
    """Text files in UTF-8: windows of characters or byte-pair tokens, for the task next_token.

    For the partition `natural`, each file is the owner of its samples (column "file"). The last part of each file is
    test data. The vocabulary comes from the training parts: the most frequent characters, where token 0 stands for all
    others, or byte-pair tokens of bytes (Sennrich et al. 2016), trained with the package `tokenizers`
    (`pip install tokenizers`).

    Args:
        path: a file, a folder with files *.txt (also in subfolders), or a list of files and folders.
        tokens: "characters" or "bpe".
        vocabulary: maximum number of tokens, at least 2, and at least 256 with "bpe".
        length: tokens in a window.
        stride: distance in tokens between the starts of two consecutive windows. Unset: `length`.
        targets: "all": the next token at each position, [n, length]. "last": only the token after the window, [n].
        test_fraction: fraction of each file's text for tests, between 0 and 1.
        test_windows: maximum number of test windows, which are taken at equal distances. Unset: all windows.

    Raises DataError for a path without files, and for a file that is empty, too short for one window in each part, or
    not UTF-8. Cost: up to 5 bytes of memory per character while reading, then 1 to 4 bytes per token and 8 bytes per
    window.

    >>> train, test = fedsim.load_dataset("text", path="play.txt", length=32)  # doctest: +SKIP
    """
    files = [file for name in ([path] if isinstance(path, str) else path) for file in _files_of(name)]
    if len(set(files)) < len(files):
        twice = next(file for file in files if files.count(file) > 1)
        raise DataError(f"data.path: {show(str(twice))} is named twice; name each file once")
    parts = [_split(_read(file), test_fraction) for file in files]
    if tokens == "bpe":
        encoded = _byte_pairs(parts, vocabulary)
    else:
        characters, counts = np.unique(np.concatenate([_code_points(train) for train, _ in parts]), return_counts=True)
        alphabet = np.sort(characters[np.argsort(-counts, kind="stable")[: vocabulary - 1]])
        encoded = [tuple(_as_tokens(_code_points(part), alphabet) for part in pair) for pair in parts]
    for file, pair in zip(files, encoded, strict=True):
        if min(map(len, pair)) <= length:
            raise DataError(
                f"data.path = {show(str(file))}: its parts for training and tests have {len(pair[0])} and "
                f"{len(pair[1])} tokens; each needs {length + 1} or more for one window; use a smaller data.length"
            )
    names = [{"file": str(file)} for file in files]
    train, test = windows(names, encoded, length=length, stride=stride, targets=targets, test_windows=test_windows)
    return replace(train, assumed=(f"the last {test_fraction:.0%} of each file are test data",)), test


def windows(
    owners: Sequence[Mapping[str, str]],
    parts: Sequence[tuple[Any, ...]],
    *,
    length: int,
    stride: int | None = None,
    targets: Targets = "all",
    test_windows: int | None = None,
) -> tuple[TensorData, TensorData]:
    """Return training and test samples: windows of the tokens of several owners.

    Args:
        owners: names of each owner, by the column of `ids` that contains the name, such as {"file": "a.txt"}.
        parts: two integer arrays for each owner: the tokens for training, and the tokens for tests.
        length: tokens in a window.
        stride: distance in tokens between the starts of two consecutive windows. None: `length`.
        targets: "all": the next token at each position. "last": only the token after the window.
        test_windows: maximum number of test windows, which are taken at equal distances. None: all windows.

    >>> names, parts = [{"file": "a"}], [(np.arange(7), np.arange(5))]
    >>> train, test = fedsim.data.formats.text.windows(names, parts, length=3)
    >>> train.gather(torch.arange(2))
    (tensor([[0, 1, 2],
            [3, 4, 5]]), tensor([[1, 2, 3],
            [4, 5, 6]]))
    """
    arrays = [tokens for pair in parts for tokens in pair]
    joined = np.concatenate(arrays)
    kind = next(each for each in TYPES if joined.max() <= torch.iinfo(each).max)
    stream = torch.from_numpy(joined).to(kind)
    if len(stream) <= length:
        raise DataError(f"data.length = {length}: must be less than {len(stream)}, the number of tokens")
    inputs = stream.unfold(0, length, 1)[:-1]
    following = stream[1:].unfold(0, length, 1) if targets == "all" else stream[length:]
    ends = np.cumsum([len(tokens) for tokens in arrays])
    steps = [min(stride or length, max(1, len(tokens))) for tokens in arrays]  # a larger stride could overflow
    starts = [
        np.arange(end - len(tokens), end - length, step) for end, tokens, step in zip(ends, arrays, steps, strict=True)
    ]

    def part(which: int, most: int | None = None) -> TensorData:
        rows = starts[which::2]
        columns = {
            name: np.repeat(np.array([owner[name] for owner in owners], dtype=object), list(map(len, rows)))
            for name in owners[0]
        }
        position = torch.from_numpy(np.concatenate(rows))
        data = TensorData(inputs, following, dtype=torch.int64, ids=columns, rows=position)
        return data if most is None or most >= len(data) else data.take(np.arange(most) * len(data) // most)

    return part(0), part(1, test_windows)


def _split(values: Any, test_fraction: float) -> tuple[Any, Any]:
    """Split a text, or its tokens, into the first part (for training) and the rest (for tests)."""
    cut = int(len(values) * (1 - test_fraction))
    return values[:cut], values[cut:]


def _code_points(text: str) -> Tokens:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _as_tokens(characters: Tokens, alphabet: Tokens) -> Tokens:
    """Return the token of each code point: its position in the sorted `alphabet`, from 1, or UNKNOWN if absent."""
    token_of = np.full(max(alphabet.max(initial=0), characters.max(initial=0)) + 1, UNKNOWN, np.int64)
    token_of[alphabet] = np.arange(1, len(alphabet) + 1)
    return token_of[characters]


def _byte_pairs(parts: Sequence[tuple[str, str]], vocabulary: int) -> list[tuple[Tokens, ...]]:
    """Train a byte-pair tokenizer on the training parts, and return the tokens of all training and test parts."""
    tokenizers = import_extra("tokenizers", extra="text", purpose='data.tokens = "bpe"')
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    if vocabulary < len(letters):
        raise DataError(
            f"data.vocabulary = {vocabulary}: must be at least {len(letters)} (one token per byte) with data.tokens = "
            '"bpe"'
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([train for train, _ in parts], trainer)
    return [tuple(np.array(tokenizer.encode(part).ids, dtype=np.int64) for part in pair) for pair in parts]


def _files_of(name: str) -> list[Path]:
    """Return [path] for a file, or a folder's files *.txt (also in subfolders). Raises DataError if there are none.

    Hidden files are left out. The ending may be in upper case.
    """
    path = user_path(name)
    files = [path]
    if path.is_dir():
        visible = (file for file in path.rglob("*") if not any(p.startswith(".") for p in file.relative_to(path).parts))
        files = sorted(file for file in visible if file.suffix.lower() == ".txt")
    if not files or not files[0].is_file():
        problem = "has no files *.txt" if path.is_dir() else "there is no such file or folder"
        raise DataError(f"data.path = {show(name)}: {problem}")
    return files


def _read(file: Path) -> str:
    """Return the text of a file. Raises DataError if the file cannot be read, is empty, or is not UTF-8."""
    try:
        text = decoded(read_bounded(file, free_memory() / 5)).replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise DataError(f"data.path = {show(str(file))}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"data.path = {show(str(file))}: {error}") from None
    if not text:
        raise DataError(f"data.path = {show(str(file))}: the file is empty")
    return text
