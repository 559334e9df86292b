"""Files with any content load quickly, raise at worst a FedsimError, and import nothing.

`pytest -m slow tests/hostile` tries 11,000 inputs, the default suite a few hundred.
"""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

import pytest
import tomli_w
import torch
from hypothesis import strategies as st
from safetensors.torch import save

import fedsim
from fedsim import delays
from fedsim.asynchronous.race.log import read_log
from fedsim.cli.rule_replay import load_round, replay, replay_json, replay_table
from fedsim.comparison import plan_comparison
from fedsim.comparison.folder import ComparisonFolder
from fedsim.comparison.results import read_records
from fedsim.comparison.runner import merge
from fedsim.config.experiment import Experiment
from fedsim.config.files import to_toml
from fedsim.config.load import load_experiment
from fedsim.config.tables import _owners
from fedsim.errors import FedsimError
from fedsim.records.history import RACE_LOG, read_history
from fedsim.records.reader import Run
from fedsim.report.comparison_page import comparison_page
from fedsim.report.page import to_script_json
from fedsim.report.run_page import run_page
from tests.data.test_sources import write_mnist
from tests.hostile.mutations import DEEP, EXTREMES, edited, edits, fuzz, mutated, mutations, without
from tests.report.folders import invent_round, on_the_clock

KEYS = sorted({*Experiment.model_fields, *_owners(Experiment), "comparison", "label", "variant"})
NAMES = [
    registration
    for kind in ("rules", "pre-aggregators", "attacks", "partitions", "policies")
    for registration in fedsim.components(kind)
]
TABLES = [
    {"rounds": 2, "workers": 5, "model": {"name": "2nn", "hidden": 8}, "local": {"lr": 0.1, "steps": 3}},
    {"aggregate": {"rule": ["nnm", {"rule": "multi_krum", "m": 2}], "f": 1}, "workers": 6, "server": {"name": "adam"}},
    {
        "attack": {"name": "alie", "workers": [0, 1]},
        "workers": 7,
        "aggregate": "krum",
        "partition": {"name": "dirichlet"},
    },
    {
        "mode": "clock",
        "policy": {"name": "ssp", "s": 3},
        "clock": {"slowdown": "geometric", "noise": {"name": "trace", "path": "t"}},
    },
    {"mode": "race", "policy": "hogwild", "engine": "processes", "processes": 2, "race": {"runs": 2}},
    {"data": {"name": "mnist", "root": "data", "augment": ["flip", {"name": "shift"}]}, "sync": "gradients"},
    {
        "engine": "distributed",
        "distributed": {"trainer": "batched", "init_method": "env://"},
        "batched": {"stack_size": 4},
    },
    {"clock": {"departures": {"1": 3.0}, "replay_log": "x"}, "mode": "clock", "policy": "asgd", "workers": 3},
]
COMPARISONS = [
    {**TABLES[0], "comparison": {"seed": [0, 1], "aggregate.rule": ["mean", "median", ["nnm", "mean"]], "target": 0.9}},
    {
        "comparison": {
            "variant": [{"label": "a"}, {"label": "b", "local": {"steps": 5}}],
            "local": [{"lr": 0.1}, {"lr": 0.2}],
        }
    },
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Return a folder for files, in a working directory with a module that must not be imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "canary.py").write_text("def boom(**anything): raise SystemExit('imported')\n")
    (tmp_path / "sub").mkdir()
    return tmp_path / "sub"


def toml_of(tree) -> bytes:
    if not isinstance(tree, dict):
        return json_of(tree)
    try:
        return tomli_w.dumps(without(tree, type(None))).encode("utf-8", errors="surrogatepass")
    except (TypeError, ValueError, RecursionError):
        return b"x = 1"


names_and_values = [*EXTREMES, *NAMES]
settings_of_a_file = st.sampled_from([*TABLES, *COMPARISONS]), mutations(names_and_values, KEYS)
keys = st.sampled_from([f"{key}.{name}" for key in KEYS for name in ("name", "lr", "rule")] + KEYS)
values = st.lists(st.sampled_from([str(value) for value in EXTREMES] + NAMES), min_size=1, max_size=3).map(",".join)
words_of_a_command = st.lists(
    st.tuples(keys | st.text(max_size=9), values | st.text(max_size=20)).map("=".join) | st.text(max_size=12),
    max_size=4,
).map(lambda words: [word for word in words if ":" not in word])  # words with a colon would be imported, as intended


def test_experiment_files_and_words(here, examples):
    def check(example):
        tree, changes, cuts, words = example
        (here / "x.toml").write_bytes(edited(toml_of(mutated(tree, changes)), cuts))
        if "comparison" in tree:
            plan_comparison(here / "x.toml", words=words)
        else:
            experiment = load_experiment(here / "x.toml", words)
            (here / "again.toml").write_text(to_toml(experiment), encoding="utf-8")
            assert load_experiment(here / "again.toml") == experiment

    nothing = st.just([])
    fuzz(st.tuples(*settings_of_a_file, nothing | edits, nothing | words_of_a_command), check, 2 * examples)


def page_of(folder: Path) -> None:
    """Return the parts of a report that differ between reports."""
    records = read_records(folder)
    context, data = run_page(records) if isinstance(records, Run) else comparison_page(records)
    assert len(to_script_json(data)) < 3_000_000
    assert len(repr(context)) < 3_000_000


def round_of(number: int) -> dict:
    record = {**invent_round(number, 0.5), "weights": [0.5, 0.5], "excluded": [1], "attack_success": 0.5}
    race = {"runs": 2, "test_accuracies": [0.5, 0.5], "samples_per_second": [1.0, 2.0], "lost_fraction": 0.1}
    return {**record, **on_the_clock(2.0)({"round": number}), "race": race}


FILES = {
    "metrics.jsonl": [round_of(1), round_of(2), round_of(3)],
    "partition.json": {
        "counts": [[1, 2], [3, 4]],
        "byzantine": [1],
        "workers": [0, 1],
        "population": 9,
        "names": ["a", None],
    },
    "environment.json": {"device": "cpu", "packages": {"torch": "2"}, "command": ["fedsim", "run"]},
    "experiment.toml": {
        "rounds": 3,
        "workers": 2,
        "sync": "gradients",
        "local": {"epochs": 1, "batch_size": 4},
        "name": "x",
    },
}


def write_file(folder: Path, name: str, tree, cuts) -> None:
    if name.endswith(".toml"):
        content = toml_of(tree)
    elif name.endswith(".jsonl") and isinstance(tree, list):
        content = b"".join(json_of(line) + b"\n" for line in tree)
    else:
        content = json_of(tree)
    (folder / name).write_bytes(edited(content, cuts))


def json_of(tree) -> bytes:
    with contextlib.suppress(ValueError):  # a number with too many digits
        return json.dumps(tree, ensure_ascii=False).encode("utf-8", errors="surrogatepass")
    return b"{}"


file_of_a_run = st.sampled_from(sorted(FILES)).flatmap(
    lambda name: st.tuples(st.just(name), mutations([*EXTREMES, [1e308] * 3, 1e308], ["round", "seconds", "counts"]))
)


def test_reports_of_run_folders(tmp_path, examples):
    for name, tree in FILES.items():
        write_file(tmp_path, name, tree, [])
    page_of(tmp_path)

    def check(example):
        (name, changes), cuts = example
        try:
            write_file(tmp_path, name, mutated(FILES[name], changes), cuts)
            read_history(tmp_path)
            page_of(tmp_path)
        finally:
            write_file(tmp_path, name, FILES[name], [])

    fuzz(st.tuples(file_of_a_run, st.just([]) | edits), check, examples)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Return the folder of a finished comparison."""
    folder = tmp_path_factory.mktemp("compared")
    tables = {"rounds": 2, "workers": 2, "engine": "serial", "model": "logistic", "local": {"steps": 1}}
    plan = plan_comparison(tables, {"aggregate.rule": ["mean", "median"], "seed": [0, 1]})
    with ComparisonFolder(folder, plan) as held:
        for run in plan.runs:
            held.run_folder(run).mkdir(parents=True)
            (held.run_folder(run) / "experiment.toml").write_text(to_toml(run.experiment))
            write_file(held.run_folder(run), "metrics.jsonl", [round_of(1), round_of(2)], [])
    return folder


def test_comparisons_reported_and_put_together(here, compared, examples, monkeypatch):
    monkeypatch.setattr("fedsim.comparison.runner._write", lambda *_: None)  # writes the same for all inputs
    whole = json.loads((compared / "comparison.json").read_text())
    metrics = next((compared / "runs").glob("*")) / "metrics.jsonl"
    lines = metrics.read_text()
    outside = here.parent / "outside"
    counter = iter(range(10**9))

    def check(example):
        of_comparison, of_metrics = example
        tree = mutated(whole, of_comparison) if of_comparison else whole
        (compared / "comparison.json").write_bytes(json_of(tree))
        write_file(metrics.parent, metrics.name, mutated([*map(json.loads, lines.splitlines())], of_metrics), [])
        with contextlib.suppress(FedsimError):
            page_of(compared)
        comparison = merge([compared], here / str(next(counter)))
        assert comparison.table

    keys = ["id", "folder", "point", "axes", "base", "seed"]
    odd = [*EXTREMES, *NAMES, "../../outside", str(outside), {"rule": "canary:boom"}, DEEP, math.nan, "/etc"]
    try:
        strategy = st.tuples(st.just([]) | mutations(odd, keys), mutations(EXTREMES, ["round"], most=2))
        fuzz(strategy, check, min(examples, 600))
        assert not outside.exists()
    finally:
        (compared / "comparison.json").write_text(json.dumps(whole))
        metrics.write_text(lines)


ENTRIES = [[1, 1, 0, 0, 0, 0, 1, 0, 0], [1, 1, 0, 1, 0, 2, 3, 0, 1], [2, 1, 2, 1, 0, 0, 4, 1, 1]]
LOGGED = {"rounds": 1, "workers": 2, "policy": {"name": "asgd"}}


def test_logs_of_races(tmp_path, examples):
    def log_of(head, entries):
        rows = "\n".join(",".join(map(str, row)) if isinstance(row, list) else str(row) for row in entries)
        columns = "run,round,kind,worker,steps,begun,taken,read,applied"
        return b"# fedsim race " + json_of(head) + f"\n{columns}\n{rows}\n".encode("utf-8", errors="surrogatepass")

    def check(example):
        of_head, of_entries, cuts = example
        head = mutated(LOGGED, of_head) if of_head else LOGGED
        entries = mutated(ENTRIES, of_entries) if of_entries else ENTRIES
        (tmp_path / RACE_LOG).write_bytes(
            edited(log_of(head, entries if isinstance(entries, list) else [entries]), cuts)
        )
        read_log(str(tmp_path), LOGGED)

    changes = st.just([]) | mutations([value for value in EXTREMES if value != 10**400], KEYS)
    fuzz(st.tuples(changes, changes, st.just([]) | edits), check, examples)


KEPT = {
    "updates": torch.arange(15.0).reshape(5, 3),
    "workers": torch.arange(5),
    "samples": torch.full((5,), 10),
    "byzantine": torch.tensor([True, False, False, False, False]),
}
SHAPES = [(0,), (5, 0), (0, 3), (), (7,)]
DTYPES = [torch.int8, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.float64]
ODD_TENSORS = [
    *map(torch.zeros, SHAPES),
    *(torch.full((5, 3), value) for value in (math.nan, math.inf, 3e38)),
    *(torch.zeros(shape, dtype=dtype) for shape in [(5, 3), (5,)] for dtype in DTYPES),
    *(torch.arange(5) - 2, torch.arange(5) * 10**15),
]


def test_kept_updates(tmp_path, examples):
    (tmp_path / "experiment.toml").write_text('workers = 5\nattack = {name = "sign_flipping", workers = [0]}')

    def check(example):
        changes, header, cuts = example
        tensors = {**KEPT, **dict(changes)}
        content = save({name: tensor.clone() for name, tensor in tensors.items() if tensor is not None})
        size = int.from_bytes(content[:8], "little")
        if header:
            table = json_of(mutated(json.loads(content[8 : 8 + size]), header))
            content = len(table).to_bytes(8, "little") + table + content[8 + size :]
        (tmp_path / "updates-00001.safetensors").write_bytes(edited(content, cuts))
        stored = load_round(tmp_path)
        results = replay(stored, ["mean", "median", "krum", ["nnm", "trimmed_mean"], "geometric_median"])
        replay_table(stored, results)
        replay_json(stored, results)

    names = st.sampled_from([*KEPT, "root", "losses", "x"])
    tensors = st.lists(st.tuples(names, st.none() | st.sampled_from(ODD_TENSORS)), max_size=2)
    headers = st.just([]) | mutations(
        [*EXTREMES, [10**12, 10**12], "F64", [0, 10**15]], ["shape", "dtype", "data_offsets"]
    )
    fuzz(st.tuples(tensors, headers, st.just([]) | edits), check, examples)


def test_images(tmp_path, examples):
    path = write_mnist(tmp_path) / "train-images-idx3-ubyte"
    images = path.read_bytes()

    def check(cuts):
        path.write_bytes(edited(images, cuts))
        fedsim.load_dataset("mnist", tmp_path)

    fuzz(edits, check, examples)


def read_experiment(path):
    load_experiment(path)
    plan_comparison(path)


def read_trace(path):
    delays.Trace(str(path))(3, 0, 0, 2)


@pytest.mark.parametrize("read", [read_experiment, read_trace])
def test_files_of_any_bytes(here, read, examples):
    def check(content):
        (here / "x.toml").write_bytes(content)
        read(here / "x.toml")

    pieces = [*'=.[]{}",# \n', "'''", "\n[comparison]\n", "1", "0.5", "nan", "1e400", "-1"]
    texts = st.lists(st.sampled_from([*KEYS, *NAMES, *pieces]), max_size=30).map(lambda parts: "".join(parts).encode())
    fuzz(st.binary(max_size=300) | texts, check, examples)
