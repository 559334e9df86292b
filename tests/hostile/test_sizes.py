"""Work that would fill the memory or take very long is refused in advance, with a line that states the sizes."""

from __future__ import annotations

import gzip
import json
import time

import numpy as np
import pytest

import fedsim
from fedsim.comparison import plan_comparison
from fedsim.comparison.on_paper import draw_heatmap
from fedsim.comparison.results import Comparison, read_records
from fedsim.config.components import list_module
from fedsim.errors import ExperimentError, FedsimError, RecordError
from fedsim.report.on_page import MOST_CELLS, weights_heat_map
from tests.report.folders import invent_round, invent_run

DEEP = 5_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=" + "[" * DEEP, "tables and lists must not be nested more than 16 levels deep"),
        (".".join(["a"] * DEEP) + "=1", "a key has more than 16 dotted parts"),
        (f"seed = {'9' * 5000}", "Exceeds the limit"),
        (f"seed = 0x{'f' * 50_000}", "seed: integers must have at most 64 bits, not 200000"),
        (f"{'a' * 10**6} = 1", "have at most 100 characters"),
        ('"\\u001b[2J" = 1', '"\\u001b[2J": keys must be printable and have at most 100 characters'),
        ("local = {lr = nan}", "local.lr = nan: must be a finite number"),
        ("local = {lr = 1e308}", "local.lr = 1e+308: must be at most 3.4e+38, the largest float32 number"),
        ("local = {lr = [1e308, 1.0, 1.0, 1.0]}", "local.lr = 1e+308: must be at most 3.4e+38"),
        (f"rounds = {2**63}", "rounds = 9223372036854775808: must be less than 9223372036854775808"),
        ("processes = 100000\nengine = 'processes'", "processes = 100000: must be less than or equal to 1024"),
        (
            "aggregate = {rule = 'dnc', f = 1, iterations = 1000000000}",
            "aggregate.iterations = 1000000000: must be less",
        ),
        ('"local[" = 1', "local[ = 1: unknown key"),
    ],
)
def test_values_beyond_the_limits_are_one_short_line(tmp_path, text, message):
    (tmp_path / "x.toml").write_text(text)
    started = time.perf_counter()
    with pytest.raises(ExperimentError) as caught:
        fedsim.load_experiment(tmp_path / "x.toml")
    (line,) = caught.value.lines
    assert message in line
    assert len(line) < 700
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize(
    "text",
    [
        f"aggregate = {{weights = [{'-1,' * 20_000}]}}",
        "".join(f"k{number} = 1\n" for number in range(2_000)),
        pytest.param("".join(f"k.k{number}.k = 1\n" for number in range(15_000)), marks=pytest.mark.slow),
    ],
)
def test_of_very_many_problems_the_first_are_reported(tmp_path, text):
    (tmp_path / "x.toml").write_text(text)
    started = time.perf_counter()
    with pytest.raises(ExperimentError) as caught:
        fedsim.load_experiment(tmp_path / "x.toml")
    assert len(caught.value.lines) <= 101
    assert len(str(caught.value)) < 60_000
    assert time.perf_counter() - started < 20


def test_python_that_is_nested_too_deeply_is_one_line(tmp_path):
    (tmp_path / "deep.py").write_text("x = a" + ".a" * 50_000)
    with pytest.raises(ExperimentError, match="cannot be read as Python: RecursionError|cannot be read .* MemoryError"):
        list_module(tmp_path / "deep.py")


def test_words_beyond_the_limits_are_one_short_line(cli):
    for word in ("seed=" + "9" * 5000, ".".join(["a"] * DEEP) + "=1", "a=" + "[" * DEEP, "x" * 10_000, "a\udcff=1"):
        done = cli("run", word, "--dry-run")
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
        assert len(done.stderr) < 1000


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"workers": 10**12}, "workers = 1000000000000: data about the workers of a cohort takes 100,000.0 GB"),
        ({"workers": 10**15, "cohort": 10**13}, "cohort = 10000000000000: data about the workers of a cohort takes"),
        (
            {"workers": 10**12, "cohort": 10, "attack": {"name": "sign_flipping", "fraction": 0.1}},
            "attack.fraction = 0.1: drawing from 1000000000000 workers takes 100,000.0 GB",
        ),
    ],
)
def test_lists_that_do_not_fit_into_memory_are_refused(tables, message):
    with pytest.raises(ExperimentError) as caught:
        fedsim.load_experiment(tables)
    assert any(line.startswith(message) and "GB of memory are free" in line for line in caught.value.lines)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"groups": 50_000_000}, "groups: a list of 50000000 workers takes"),
        (
            {"attack": {"name": "sign_flipping", "fraction": 0.1}},
            "attack.fraction = 0.1: drawing from 50000000 workers",
        ),
        ({"sampling": "daily"}, 'sampling.name = "daily": supports at most 10,000,000 workers, not 50,000,000'),
    ],
)
def test_lists_that_take_very_long_are_refused_at_once(changes, place, monkeypatch):
    monkeypatch.setattr("fedsim.config.validation.free_memory", lambda: 1e12)
    with pytest.raises(ExperimentError) as caught:
        fedsim.load_experiment({"workers": 50_000_000, "cohort": 10, "model": "logistic", **changes})
    assert [line.startswith(place) for line in caught.value.lines] == [True]


@pytest.mark.parametrize("users", [10**7, 2**63 - 1])
def test_a_generated_data_set_that_does_not_fit_into_memory_is_refused(users):
    with pytest.raises(ExperimentError, match=rf"memory: data.users = {users} .* free; .* or use fewer users"):
        fedsim.load_dataset("synthetic", users=users)


@pytest.mark.parametrize("hidden", [10**6, 10**9, 10**18])
def test_a_model_that_does_not_fit_into_memory_is_refused(hidden):
    with pytest.raises(
        ExperimentError, match=r'model.name = "2nn": the model (has [0-9,]+ parameters|cannot be created)'
    ) as caught:
        fedsim.run({"engine": "serial", "model": {"name": "2nn", "hidden": hidden}})
    assert len(caught.value.lines) == 1


def test_a_comparison_has_only_so_many_combinations():
    axes = {f"local.x{number}": list(range(10)) for number in range(7)}
    started = time.perf_counter()
    with pytest.raises(ExperimentError, match="10 x 10 x 10 x 10 x 10 x 10 x 10 = 10,000,000 combinations; at most"):
        plan_comparison({}, axes)
    assert time.perf_counter() - started < 5


def test_a_heat_map_of_very_many_values_is_not_drawn():
    plan = Comparison("wide", {"local.lr": [0.1, 0.2], "local.momentum": [number / 1000 for number in range(500)]}, [])
    assert draw_heatmap(plan) is None


ZEROS = np.zeros((5_000, 3))


def write_csv_gz(path):
    path.write_bytes(gzip.compress(b"a,b,label\n" + b"0,0,0\n" * len(ZEROS)))


def write_parquet(path):
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(pyarrow.table(dict(zip(["a", "b", "label"], ZEROS.T, strict=True))), path)


COMPRESSED = {
    "x.npz": lambda path: np.savez_compressed(path, inputs=ZEROS, targets=ZEROS[:, 0]),
    "x.csv.gz": write_csv_gz,
    "x.parquet": write_parquet,
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_small_file_with_more_content_than_memory_is_refused(tmp_path, name, monkeypatch):
    COMPRESSED[name](tmp_path / name)
    assert len(fedsim.load_dataset(str(tmp_path / name))[0]) > 3_000
    monkeypatch.setattr("fedsim.system.devices.free_memory", lambda: 2.5e4)
    monkeypatch.setattr("fedsim.data.formats.tables.free_memory", lambda: 2.5e4)
    with pytest.raises(FedsimError, match=rf"{name} takes .* are free; |{name}: .* its content is larger than the"):
        fedsim.load_dataset(str(tmp_path / name))


def metrics(folder, records):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_page_does_not_grow_with_phases(tmp_path):
    folder = invent_run(tmp_path / "run", [0.5])
    many = [{**invent_round(number, 0.5), "seconds": {f"p{number}": 1.0}} for number in range(1, 200)]
    with pytest.raises(
        RecordError, match="metrics.jsonl line 51: seconds: the file contains the names of more than 50 phases"
    ):
        read_records(metrics(folder, many))
    with pytest.raises(RecordError, match="seconds"):
        read_records(metrics(folder, [{**invent_round(1, 0.5), "seconds": {f"p{n}": 1.0 for n in range(99)}}]))


def test_a_page_does_not_grow_with_workers_times_rounds(tmp_path):
    workers, rounds = 30_000, 300
    folder = invent_run(tmp_path / "run", [0.5])
    shares = {"cohort": list(range(workers)), "weights": [1.0] * workers}
    alone = {"cohort": [0], "weights": [1.0]}
    records = [{**invent_round(n, 0.5), **(shares if n == 1 else alone)} for n in range(1, rounds)]
    cells = weights_heat_map(read_records(metrics(folder, records)))["data"][0]["z"]
    assert np.size(cells) <= MOST_CELLS


@pytest.mark.parametrize("name", ["environment.json", "partition.json", "comparison.json", "metrics.jsonl"])
def test_deep_json_gives_a_one_line_error(tmp_path, name):
    folder = invent_run(tmp_path / "run", [0.5])
    (folder / name).write_text('{"round": 1, "a": ' + "[" * 100_000)
    with pytest.raises(RecordError):
        read_records(folder)
