"""Shell completion (what a shell offers at TAB)."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from fedsim.cli.main import app


@pytest.fixture
def complete(tmp_path, monkeypatch):
    """Return a function that returns the words that a shell offers, called in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def completed(*words):
        bash = {"COMP_WORDS": "\n".join(("fedsim", *words)), "COMP_CWORD": str(len(words))}
        environment = {"_FEDSIM_COMPLETE": "complete_bash", **bash}
        done = CliRunner().invoke(app, [], env=environment, prog_name="fedsim")
        assert done.exit_code == 0, done.output
        return [line.partition("\t")[0] for line in done.stdout.splitlines() if line]

    return completed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ru"], ["run"]),
        (["run", "mnist_sync_s"], ["mnist_sync_sgd"]),
        (["compare", "min"], ["mine.toml", "mines/", "minor.yaml"]),
        (["run", "rounds=", "xyz"], []),
        (["compare", "--metric", "worker_"], ["worker_accuracy", "worker_loss"]),
        (["plot", "--metric", "worker_l"], ["worker_loss"]),
    ],
)
def test_words_are_completed(complete, tmp_path, words, expected):
    for name in ("mine.toml", "minor.yaml", "mine.txt"):
        (tmp_path / name).touch()
    (tmp_path / "mines").mkdir()
    assert complete(*words) == expected
