"""Text from untrusted files is printed without control characters and in lines of bounded length."""

from __future__ import annotations

import contextlib
import json
import shutil

import pytest
import tomli_w

import fedsim
from fedsim.errors import FedsimError
from fedsim.records import checkpoints
from tests.hostile.mutations import LONGEST_LINE

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066\r\n" + "long" * 2000
TABLES = {
    "rounds": 2,
    "workers": 2,
    "engine": "serial",
    "model": "logistic",
    "local": {"steps": 1},
    "records": {"updates": [1], "curve": False, "figures": []},
    "checkpoint": {"every": 1},
}
COMMANDS = {
    "run": [["run", "--resume", "run"], ["report", "run"], ["plot", "run"], ["replay", "run"]],
    "comparison": [
        ["compare", "comparison"],
        ["report", "comparison"],
        ["plot", "comparison", "--metric", "metrics.drift"],
    ],
}


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """Return a folder with a run and a comparison whose files contain strings wherever possible."""
    folder = tmp_path_factory.mktemp("clean")
    fedsim.run(TABLES, folder / "run")
    axes = {"aggregate.rule": ["mean", "median"], "seed": [0, 1]}
    fedsim.compare({**TABLES, "name": "x"}, axes, folder / "comparison", jobs=1)
    for metrics in folder.rglob("metrics.jsonl"):
        records = [json.loads(line) | {"metrics": {"drift": 1.0}} for line in metrics.read_text().splitlines()]
        metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "run" / "events.jsonl").write_text('{"event": "stopped", "round": 2, "reason": "enough"}\n')
    (folder / "comparison" / "runs" / "median-seed1" / "error.txt").write_text("it failed\nbelow")
    return folder


def spoiled(tree, key=""):
    """Yield (dotted key, copy of the tree with EVIL in that place) for each key and value of the tree."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            place = f"{key}.{name}".lstrip(".")
            yield place, {name + EVIL if other == name else other: each for other, each in tree.items()}
            yield from ((deeper, {**tree, name: each}) for deeper, each in spoiled(value, place))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from ((place, [*tree[:index], each, *tree[index + 1 :]]) for place, each in spoiled(value, key))
    else:
        yield key, tree + EVIL if isinstance(tree, str) else EVIL


def contents(path, places=None):
    """Return the file's contents with EVIL in one place, for each place, or only for the keys in `places`."""
    text = path.read_text()
    if path.suffix == ".txt":
        return [EVIL + text]
    *rest, last = text.splitlines(keepends=True) if path.suffix == ".jsonl" else [text]
    tree = {"name": "x", "seed": 0, "local": {"lr": 0.1}} if path.suffix == ".toml" else json.loads(last)
    trees = [changed for key, changed in spoiled(tree) if places is None or key in places]
    if path.suffix == ".toml":
        return list(map(tomli_w.dumps, trees))
    if path.parent.name == checkpoints.FOLDER:
        heads = [{key: value for key, value in head.items() if key != "checksum"} for head in trees]
        trees += [{**head, "checksum": checkpoints._checksum_of(head)} for head in heads]
    return ["".join([*rest, json.dumps(each), "\n"]) for each in trees]


def assert_harmless(text):
    for line in text.split("\n"):
        assert line.isprintable(), ascii(line)[:LONGEST_LINE]
        assert len(line) < LONGEST_LINE


FILES = {  # files, and the keys whose values some command prints
    "run/experiment.toml": ["name"],
    "run/environment.json": ["fedsim", "packages.torch"],
    "run/metrics.jsonl": ["metrics.drift"],
    "run/events.jsonl": ["reason"],
    "run/partition.json": ["byzantine"],
    "run/checkpoints/round-00002.json": ["format"],
    "comparison/comparison.json": ["name"],
    "comparison/runs/median-seed1/error.txt": None,
    "comparison/runs/mean-seed0/metrics.jsonl": ["metrics.drift"],
}


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("every_place", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize("name", FILES)
def test_no_text_of_a_folder_reaches_the_terminal_raw(clean, cli, tmp_path, name, every_place):
    kind = name.partition("/")[0]
    for content in contents(clean / name, None if every_place else FILES[name]):
        for words in COMMANDS[kind]:
            shutil.rmtree(kind, ignore_errors=True)
            shutil.copytree(clean / kind, kind)
            (tmp_path / name).write_text(content, encoding="utf-8", newline="")
            done = cli(*words)
            assert done.exception is None or isinstance(done.exception, SystemExit), (words, done.exception)
            assert_harmless(done.stdout + done.stderr)
        if kind == "comparison":
            with contextlib.suppress(FedsimError):
                assert_harmless(fedsim.load_comparison(kind).table)


def test_the_list_of_a_python_file_is_harmless(cli, tmp_path):
    (tmp_path / "own.py").write_text(f"def rule():\n    {EVIL!a}\n")
    done = cli("list", "own.py")
    assert "own:rule" in done.stdout
    assert_harmless(done.stdout)
