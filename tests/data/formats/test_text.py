"""Windows of texts against their definition, and text files that cannot be used."""

from __future__ import annotations

import json
import lzma
import pickle
from collections import Counter

import numpy as np
import pytest
import torch

import fedsim
from fedsim.data.formats.text import SHAKESPEARE_FILE
from fedsim.data.subsets import split_validation, targets_of
from fedsim.errors import MissingPackageError
from fedsim.processes.shared_memory import share
from tests.data.loading import refused


@pytest.fixture(scope="module")
def plays():
    return json.loads(lzma.decompress(SHAKESPEARE_FILE.read_bytes()))


def samples_of(data, owner):
    """All samples of an owner as lists."""
    (owners, *_) = data.ids.values()
    inputs, targets = data.gather(torch.from_numpy(np.flatnonzero(owners == owner)))
    return list(zip(inputs.tolist(), targets.tolist(), strict=True))


def windows_by_hand(text, length, stride, last):
    """Windows of one part of one text, cut character by character."""
    cut = []
    start = 0
    while start + length < len(text):
        following = text[start + length] if last else text[start + 1 : start + length + 1]
        cut.append((text[start : start + length], following))
        start += stride
    return cut


def test_the_plays_have_the_roles_and_characters_that_their_source_states(plays):
    texts = [text for roles in plays.values() for text in roles.values()]
    assert (len(plays), len(texts), sum(map(len, texts))) == (37, 1385, 4040485)
    assert sum(len(text) >= 1000 for text in texts) == 622
    assert plays["macbeth"]["FIRST WITCH"].startswith(
        "When shall we three meet again?\nIn thunder, lightning, or in rain?"
    )
    assert SHAKESPEARE_FILE.stat().st_size < 2e6
    assert "public domain" in SHAKESPEARE_FILE.with_name("shakespeare.txt").read_text()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"stride": 2**63 - 1},
        {"targets": "last", "stride": 7},
        {"length": 33, "stride": 50, "test_fraction": 0.4, "min_characters": 9000},
    ],
)
def test_windows_of_each_role_are_cut_in_time(plays, params):
    length, stride = params.get("length", 80), params.get("stride", 80)
    last, fraction = params.get("targets") == "last", params.get("test_fraction", 0.2)
    alphabet = sorted({character for roles in plays.values() for text in roles.values() for character in text})
    number = {character: place for place, character in enumerate(alphabet, 1)}
    chosen = {"macbeth: MACBETH", "hamlet: Ham", "othello: IAGO"}
    found = fedsim.load_dataset("shakespeare", **params)
    for owner in chosen:
        play, role = owner.split(": ")
        tokens = [number[character] for character in plays[play][role]]
        cut = int(len(tokens) * (1 - fraction))
        for part, data in zip((tokens[:cut], tokens[cut:]), found, strict=True):
            assert samples_of(data, owner) == windows_by_hand(part, length, stride, last)
    least = params.get("min_characters", 1000)
    large = {f"{play}: {role}" for play, roles in plays.items() for role, text in roles.items() if len(text) >= least}
    assert set(found[0].ids["role"]) == set(found[1].ids["role"]) == large


def test_roles_and_plays_are_owners():
    train, _ = fedsim.load_dataset("shakespeare")
    assert len(fedsim.partition(targets_of(train), "natural", 622, ids=train.ids)) == 622
    shards = fedsim.partition(targets_of(train), "natural", 37, ids=train.ids, by="play")
    assert sum(map(len, shards)) == len(train)
    assert all(len(set(train.ids["play"][shard])) == 1 for shard in shards)
    assert fedsim.Experiment(data="shakespeare", partition={"name": "natural", "by": "play"}).workers == 37


def test_test_windows_are_spread_over_all_roles():
    whole, some = (fedsim.load_dataset("shakespeare", test_windows=most)[1] for most in (None, 900))
    assert len(some) == 900 < len(whole)
    assert set(some.rows.tolist()) < set(whole.rows.tolist())
    assert len(set(some.ids["play"])) == 37


def test_overlapping_windows_share_one_tensor_of_bytes(plays):
    """In the process, in shared memory, after a validation split and on another device."""
    train, test = fedsim.load_dataset("shakespeare", stride=1, min_characters=30000)
    characters = sum(len(text) for roles in plays.values() for text in roles.values() if len(text) >= 30000)
    tensors = [train.inputs, train.targets, test.inputs, test.targets]
    assert {tensor.dtype for tensor in tensors} == {torch.uint8}
    assert {tensor.untyped_storage().nbytes() for tensor in tensors} == {characters}
    positions = torch.arange(0, len(train), 9991)
    expected = train.gather(positions)
    rest, held_out, _ = split_validation(train, 0.25, seed=0)
    share([tensor for part in (rest, held_out, train, test) for tensor in part.tensors.values()])
    parts = (train, test, rest, held_out)
    assert len({part.inputs.untyped_storage().data_ptr() for part in parts}) == 1
    assert train.inputs.untyped_storage().nbytes() < 1.1 * (characters + 8 * sum(2 * len(part) for part in parts))
    assert all(map(torch.equal, train.gather(positions), expected))
    moved = train.to(torch.device("meta"), torch.float32)
    assert (moved.inputs.shape, moved.inputs.stride()) == (train.inputs.shape, train.inputs.stride())
    assert moved.inputs.untyped_storage().nbytes() == characters - 1  # the last one is never an input


def test_a_data_set_of_windows_is_a_data_set():
    train, _ = fedsim.load_dataset("shakespeare", targets="last", min_characters=20000)
    inputs, label = train[5]
    assert inputs.dtype == torch.int64
    assert isinstance(label, int)
    assert len(train.sample_targets) == len(train) == len(targets_of(train))
    assert label == train.sample_targets[5] == targets_of(train)[5]
    taken = train.take(np.array([5, 2]))
    assert torch.equal(taken[0][0], inputs)
    assert list(taken.ids["role"]) == list(train.ids["role"][[5, 2]])
    again = pickle.loads(pickle.dumps(taken))
    assert torch.equal(again[0][0], inputs)


@pytest.fixture
def files(tmp_path):
    """Two text files with a vocabulary of nine characters, of which the second has one that the first lacks."""
    (tmp_path / "a.txt").write_text("to be or not " * 30)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "b.txt").write_text("robot 🤖é " * 40, encoding="utf-8")
    (tmp_path / "notes.md").write_text("not a text")
    return tmp_path


def test_files_of_a_folder_are_owners(files):
    train, test = fedsim.load_dataset("text", path=str(files), length=10)
    names = [str(files / "a.txt"), str(files / "below" / "b.txt")]
    assert sorted(set(train.ids["file"])) == sorted(set(test.ids["file"])) == names
    listed, _ = fedsim.load_dataset("text", path=names[::-1], length=10)
    assert sorted(set(listed.ids["file"])) == names
    alphabet = sorted(set("to be or not robot 🤖é "))
    text = "to be or not " * 30
    expected = [alphabet.index(character) + 1 for character in text[:10]]
    assert train.gather(torch.tensor([0]))[0].tolist() == [expected]


def test_rare_characters_have_one_token(tmp_path):
    """The vocabulary is that of the training part."""
    text = "ab" * 200 + "c" + "ab" * 40 + "zz" * 60
    (tmp_path / "x.txt").write_text(text)
    train, test = fedsim.load_dataset("text", path=str(tmp_path / "x.txt"), vocabulary=3, length=5)
    tokens = {"a": 1, "b": 2}
    cut = int(len(text) * 0.8)
    for data, part in ((train, text[:cut]), (test, text[cut:])):
        expected = windows_by_hand([tokens.get(character, 0) for character in part], 5, 5, False)
        assert samples_of(data, str(tmp_path / "x.txt")) == expected
    assert train.classes == 3


def test_byte_pairs_give_the_text_again(files):
    pytest.importorskip("tokenizers")
    train, test = fedsim.load_dataset("text", path=str(files), tokens="bpe", vocabulary=270, length=4)
    assert 256 < max(train.classes, test.classes) <= 270
    assert train.inputs.dtype == torch.int16
    for name, text in ((files / "a.txt", "to be or not " * 30), (files / "below" / "b.txt", "robot 🤖é " * 40)):
        tokens = [token for inputs, _ in samples_of(train, str(name)) for token in inputs]
        assert len(tokens) < 0.7 * 0.8 * len(text.encode())
        known = Counter(tokens)
        assert len(known) < 30


@pytest.mark.parametrize(
    ("content", "params", "line"),
    [
        (None, {}, "there is no such file or folder"),
        (b"", {}, "is empty"),
        (b"good text " * 90 + b"\xff\xfe", {}, "line 1 is not UTF-8 .*; save the file as UTF-8"),
        (b"short" * 60, {}, "have 240 and 60 tokens; each needs 81 or more for one window; use a smaller data.length"),
        (b"long " * 200, {"tokens": "bpe", "vocabulary": 100}, "data.vocabulary = 100: must be at least 256"),
    ],
    ids=["missing", "empty", "no text", "short", "few tokens"],
)
def test_a_bad_file_is_one_line(content, params, line, tmp_path):
    if "tokens" in params:
        pytest.importorskip("tokenizers")
    file = tmp_path / "some.txt"
    if content is not None:
        file.write_bytes(content)
    refused("text", line if "vocabulary" in params else f'/some.txt": .*{line}', path=str(file), **params)


def test_a_folder_without_texts_and_too_many_characters_are_one_line(tmp_path):
    refused("text", r"has no files \*\.txt", path=str(tmp_path))
    line = "data.min_characters = 99999: no speaking role has that many characters"
    refused("shakespeare", line, min_characters=99999)


def test_byte_pairs_need_their_package(files, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    options = {"path": str(files), "tokens": "bpe", "length": 10}
    refused("text", "pip install tokenizers$", error=MissingPackageError, **options)


TINY = {
    "data": {"name": "shakespeare", "min_characters": 30000, "length": 25, "stride": 50, "test_windows": 50},
    "task": "next_token",
    "model": {"name": "tests.other_tasks:Bigrams", "words": 78},
    "partition": "natural",
    "rounds": 2,
    "local": {"steps": 3, "batch_size": 4, "lr": 0.5},
    "precision": "float64",
}


def test_engines_train_on_windows_alike():
    engines = {"serial": 1, "processes": 2, "batched": 1}
    serial, pooled, batched = (fedsim.run({**TINY, "engine": e, "processes": n}) for e, n in engines.items())
    assert serial.experiment.workers == 7
    assert torch.equal(serial.global_row, pooled.global_row)
    assert torch.allclose(serial.global_row, batched.global_row, rtol=0, atol=1e-9)
    last = serial.history[-1]
    assert last.test_loss == pooled.history[-1].test_loss == pytest.approx(batched.history[-1].test_loss)


def test_the_losses_and_the_perplexity_of_windows_are_per_token():
    """Also the train loss, since each window has as many tokens; it is the mean before each step."""
    local = {"steps": 1, "batch_size": 10**6, "lr": 1e-300}
    tables = {**TINY, "rounds": 1, "local": local, "metrics": ["perplexity"], "engine": "serial"}
    result = fedsim.run(tables)
    train, test = fedsim.load_dataset(**TINY["data"])
    means = []
    for data in (train, test):
        inputs, targets = data.gather(torch.arange(len(data)))
        with torch.no_grad():
            logits = result.model(inputs)
        means.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item())
    record = result.history[-1]
    assert (record.train_loss, record.test_loss) == pytest.approx(tuple(means), rel=1e-9)
    assert record.metrics["perplexity"] == pytest.approx(np.exp(means[1]), rel=1e-9)
