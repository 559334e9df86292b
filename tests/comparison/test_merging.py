"""A comparison that is split into shards has the results of an unsplit one."""

from __future__ import annotations

import csv
import json
import shutil

import pytest

import fedsim
from fedsim.comparison.runner import merge

WORDS = ["rounds=1", "engine=serial", "data=tests.components:tiny", "model=logistic", "local.batch_size=16"]
COMPARISON = """
    [data]
    validation_fraction = 0.2
    [attack]
    name = "sign_flipping"
    workers = [0]
    [comparison]
    target = 0.2
    tune = "variant"
    heatmap = "workers, local.lr"
    skip_invalid = true
    "aggregate.rule" = ["mean", "krum"]
    workers = [4, 5]
    local.lr = [0.1, 0.2]
    variant = [{ label = "plain" }, { label = "m", local.momentum = 0.5 }]
"""


LOOKS = [["--worst", "attack.name"], ["--target", "0.5"], ["--metric", "test_loss"], ["--tune", "local.lr"]]


def rows(path):
    with path.open() as file:
        return [{key: row[key] for key in row if not key.startswith("seconds")} for row in csv.DictReader(file)]


def test_the_keys_of_a_table_that_an_axis_does_not_set_are_merged_too(cli, tmp_path):
    (tmp_path / "comparison.toml").write_text(
        "[attack]\nfraction = 0.3\n[comparison]\n"
        'attack = ["none", { name = "sign_flipping", scale = 3 }, { name = "ipm", eps = 0.5 }]\n'
        'partition = ["dirichlet"]\nlocal = [{ lr = 0.1 }, { lr = 0.2 }]\n'
    )
    compare = ("compare", "comparison.toml", *WORDS, "--allow-imports", "-q", "--jobs", 1, "--out")
    assert cli(*compare, "whole").exit_code == 0
    result = cli("compare", "whole", "--out", "merged", "--worst", "attack", "--allow-imports")
    assert result.exit_code == 0, result.stderr
    assert rows(tmp_path / "merged" / "results.csv") == rows(tmp_path / "whole" / "results.csv")
    assert result_of_base(tmp_path / "merged") == result_of_base(tmp_path / "whole")


def result_of_base(folder):
    base = json.loads((folder / "comparison.json").read_text())["base"]
    assert base["attack"]["fraction"] == 0.3
    assert base["local"]["batch_size"] == 16
    assert "lr" not in base["local"]
    assert "alpha" not in base.get("partition", {})
    return base


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_other_settings_change_what_is_printed_and_no_file(cli, tmp_path):
    words = [*WORDS, "attack.f=1", "aggregate.rule=mean,median", "attack.name=none,ipm", "local.lr=0.1,0.2"]
    result = cli("compare", *words, "data.validation_fraction=0.2", "-q", "--jobs", 1, "--out", "x")
    assert result.exit_code == 0, result.stderr
    files = contents(tmp_path)
    before = cli("compare", "x", "--allow-imports").stdout
    for look in LOOKS:
        result = cli("compare", "x", *look, "--allow-imports")
        assert result.exit_code == 0, result.stderr
        assert "the files keep their settings; to change them, add --out x\n" in result.stdout
        assert result.stdout.partition("the files keep")[0] != before.rpartition("x\n")[0]
    assert cli("compare", "x", "--table", "latex", "--label", "mean=Mean", "--allow-imports").exit_code == 0
    assert cli("compare", "x", "--allow-imports").stdout == before
    assert contents(tmp_path) == files
    refused = cli("compare", "x", "--heatmap", "attack.name,local.lr", "--allow-imports")
    assert (refused.exit_code, refused.stderr) == (
        2,
        "error: --heatmap: draws figures, so it needs an output folder; add --out x\n",
    )
    assert cli("compare", "x", "--heatmap", "attack.name,local.lr", "--allow-imports", "--out", "x").exit_code == 0
    assert (tmp_path / "x" / "heatmap.csv").is_file()
    assert cli("compare", "x", "--worst", "attack.name", "--allow-imports").exit_code == 0, "which is in the heat map"
    assert cli("compare", "x", "--target", "0.5", "--allow-imports", "--out", "y").exit_code == 0
    assert "50 percent" in cli("compare", "y", "--allow-imports").stdout


@pytest.mark.usefixtures("pictures")
def test_merged_shards_have_the_results_and_the_settings_of_one_comparison(cli, tmp_path):
    (tmp_path / "comparison.toml").write_text(COMPARISON)
    compare = ("compare", "comparison.toml", *WORDS, "--allow-imports", "-q", "--jobs", 1, "--out")
    for part in ("1/2", "0/2"):
        result = cli(*compare, "sweep", "--shard", part)
        assert result.exit_code == 0, result.stderr
        assert result.stdout.split() == [f"sweep/shards/{part[0]}-of-2"]
    assert not (tmp_path / "sweep" / "results.csv").exists()
    result = cli("compare", "sweep", "--allow-imports")
    assert result.exit_code == 0, result.stderr
    for text in ("20 percent", "tuned variant", "left out: aggregate.rule=krum workers=4"):
        assert text in result.stdout
    assert result.stdout.rstrip().endswith("\nsweep")
    assert cli(*compare, "whole", "records.figures=[]").exit_code == 0
    shards = ("sweep/shards/0-of-2", "sweep/shards/1-of-2")
    assert cli("compare", *shards, "--out", "other", "-q", "--allow-imports").exit_code == 0
    for name in ("results.csv", "summary.csv", "tuning.csv", "heatmap.csv"):
        for merged in ("sweep", "other"):
            assert rows(tmp_path / merged / name) == rows(tmp_path / "whole" / name)
    assert {"tuning.png", "heatmap.png"} <= {path.name for path in (tmp_path / "sweep").iterdir()}
    stored = json.loads((tmp_path / "sweep" / "comparison.json").read_text())
    settings = {"target": 0.2, "skip_invalid": True, "tune": "variant", "heatmap": "workers,local.lr"}
    assert settings.items() <= stored.items()
    places = [(row["workers"], row["local.lr"]) for row in rows(tmp_path / "sweep" / "heatmap.csv")]
    assert places == [("4", "0.1"), ("4", "0.2"), ("5", "0.1"), ("5", "0.2")]
    assert cli("report", "sweep").exit_code == 0
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert "tuned variant" in page
    assert "Best rule by workers and learning rate" in page
    again = cli(*compare, "sweep")  # all runs are finished already
    assert (again.exit_code, again.stdout.split()) == (0, ["sweep"])


def test_a_run_that_no_shard_has_finished_counts_as_failed(cli, tmp_path):
    words = [*WORDS, "seed=0,1"]
    assert cli("compare", *words, "--shard", "0/2", "--out", "sweep", "-q").exit_code == 0
    result = cli("compare", "sweep", "-q", "--allow-imports")
    assert (result.exit_code, result.stderr) == (1, "error: seed1: the records of the run are not complete\n")
    assert cli("compare", *words, "--shard", "1/2", "--out", "sweep", "-q").exit_code == 0
    assert cli("compare", "sweep", "-q", "--allow-imports").exit_code == 0


def test_shards_of_different_comparisons_are_not_merged(cli, tmp_path):
    for folder, rounds in (("a", 1), ("b", 2)):
        words = [*WORDS, f"rounds={rounds}", "seed=0,1"]
        assert cli("compare", *words, "--shard", "0/2", "--out", folder, "-q").exit_code == 0
    with pytest.raises(fedsim.RecordError, match="holds a different comparison than .*\nrounds: 1 there, 2 here"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    with pytest.raises(fedsim.RecordError, match="is not the folder of a comparison"):
        merge([tmp_path], tmp_path / "c")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *(
            (["--out", "x", f"--shard={text}"], "must be i/n (part i of n parts, counted from 0)")
            for text in ("2/2", "1", "a/b", "-1/2", f"0/{'9' * 5000}")
        ),
        (["--shard", "0/2"], "needs --out FOLDER"),
        (["--tune", "="], '--tune "=": must be a key and its values'),
        (["--tune", ""], '--tune "": must be a key and its values'),
        (["engine=distributed"], "--shard i/n"),
    ],
)
def test_a_wrong_shard_or_option_or_a_group_of_ranks_is_refused(cli, words, message):
    result = cli("compare", *WORDS, "seed=0,1", *words)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("order", [1, -1])
def test_a_finished_run_is_preferred_to_a_failed_one(order, serial, tmp_path):
    fedsim.compare({**serial, "rounds": 1}, {"seed": [0, 1]}, tmp_path / "finished", jobs=1)
    shutil.copytree(tmp_path / "finished", tmp_path / "failed")
    for folder in (tmp_path / "failed" / "runs").iterdir():
        (folder / "error.txt").write_text("no")
    merged = merge([tmp_path / "failed", tmp_path / "finished"][::order], tmp_path / "merged", allow_imports=True)
    assert [run.error for run in merged.runs] == [None, None]
