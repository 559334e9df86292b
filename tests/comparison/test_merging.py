"""A comparison that is cut into parts comes to the same as one that is not."""

from __future__ import annotations

import csv

import pytest

import fedsim
from fedsim.comparison import load_grid
from fedsim.comparison.folder import Shard
from fedsim.comparison.merging import merge

WORDS = ["rounds=1", "engine=serial", "data=tests.plugs:tiny", "model=logistic", "local.batch_size=16"]
AXES = ["aggregate.rule=mean,median,krum", "workers=4,5", "seed=0,1"]


def figures(path):
    with path.open() as file:
        return [{key: row[key] for key in row if not key.startswith("seconds")} for row in csv.DictReader(file)]


@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_parts_are_the_whole_and_have_nothing_in_common(count):
    grid = load_grid(None, words=[*WORDS, *AXES])
    parts = [Shard(index, count).of(grid) for index in range(count)]
    assert sorted(run.id for part in parts for run in part) == sorted(run.id for run in grid.runs)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert parts[0][0] is grid.runs[0]


def test_parts_put_together_are_what_one_comparison_gives(cli, tmp_path):
    for part in ("1/2", "0/2"):
        result = cli("compare", *WORDS, *AXES, "--shard", part, "--out", "sweep", "--jobs", 1, "-q")
        assert result.exit_code == 0, result.stderr
        assert result.stdout.split() == [f"sweep/shards/{part[0]}-of-2"]
    assert not (tmp_path / "sweep" / "results.csv").exists()
    result = cli("compare", "sweep", "--allow-imports")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.rstrip().endswith("\nsweep")
    assert cli("compare", *WORDS, *AXES, "--out", "whole", "--jobs", 1, "-q").exit_code == 0
    for name in ("results.csv", "summary.csv"):
        assert figures(tmp_path / "sweep" / name) == figures(tmp_path / "whole" / name)
    again = cli("compare", *WORDS, *AXES, "--out", "sweep", "--jobs", 1, "-q")  # finds nothing to do
    assert (again.exit_code, again.stdout.split()) == (0, ["sweep"])
    elsewhere = cli("compare", "sweep/shards/0-of-2", "sweep/shards/1-of-2", "--out", "other", "-q", "--allow-imports")
    assert elsewhere.exit_code == 0, elsewhere.stderr
    assert figures(tmp_path / "other" / "results.csv") == figures(tmp_path / "whole" / "results.csv")


def test_variants_and_the_accuracy_asked_for_are_those_of_the_parts(cli, tmp_path):
    lines = [
        *(
            "rounds = 2",
            'engine = "serial"',
            'data = "tests.plugs:tiny"',
            'model = "logistic"',
            "[grid]",
            "target = 0.2",
        ),
        *("seed = [0, 1]", "variant = [", '  { label = "plain" },', '  { label = "m", aggregate = "median" },', "]"),
    ]
    (tmp_path / "grid.toml").write_text("\n".join(lines))
    for part in ("0/2", "1/2"):
        assert cli("compare", "grid.toml", "--shard", part, "--out", "sweep", "-q", "--allow-imports").exit_code == 0
    assert cli("compare", "grid.toml", "--out", "whole", "-q", "--allow-imports").exit_code == 0
    result = cli("compare", "sweep", "--allow-imports")
    assert result.exit_code == 0, result.stderr
    assert "20 percent" in result.stdout
    assert figures(tmp_path / "sweep" / "results.csv") == figures(tmp_path / "whole" / "results.csv")


def test_what_no_part_has_finished_counts_as_failed_until_it_is_done(cli, tmp_path):
    words = [*WORDS, "seed=0,1"]
    assert cli("compare", *words, "--shard", "0/2", "--out", "sweep", "-q").exit_code == 0
    result = cli("compare", "sweep", "-q", "--allow-imports")
    assert result.exit_code == 1
    assert result.stderr == "error: seed1: its records are not complete\n"
    assert cli("compare", *words, "--shard", "1/2", "--out", "sweep", "-q").exit_code == 0
    assert cli("compare", "sweep", "-q", "--allow-imports").exit_code == 0


def test_parts_of_different_grids_are_not_put_together(cli, tmp_path):
    for folder, rounds in (("a", 1), ("b", 2)):
        words = [*WORDS, f"rounds={rounds}", "seed=0,1"]
        assert cli("compare", *words, "--shard", "0/2", "--out", folder, "-q").exit_code == 0
    with pytest.raises(fedsim.RecordError, match="holds another grid than .*\nrounds: 1 there, 2 here"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    with pytest.raises(fedsim.RecordError, match="is no folder of a comparison"):
        merge([tmp_path], tmp_path / "c")


@pytest.mark.parametrize("text", ["2/2", "1", "a/b", "-1/2"])
def test_a_part_that_does_not_exist_is_refused(cli, text):
    result = cli("compare", *WORDS, "seed=0,1", "--out", "x", f"--shard={text}")
    assert result.exit_code == 2
    assert "must be i/n, from 0/n to n-1/n" in result.stderr


def test_a_part_needs_a_folder_and_a_comparison_has_no_ranks(cli):
    assert "needs --out FOLDER" in cli("compare", *WORDS, "seed=0,1", "--shard", "0/2").stderr
    assert "--shard i/n" in cli("compare", *WORDS, "engine=distributed", "seed=0,1").stderr
