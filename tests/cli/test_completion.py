"""What shells offer at TAB: the words, and that they come without an import of PyTorch."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from fedsim.cli.main import app
from tests.commands import start_python


@pytest.fixture
def complete(tmp_path, monkeypatch):
    """The words that a shell is offered, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def completed(shell, *words):
        line = " ".join(("fedsim", *words))
        bash = {"COMP_WORDS": "\n".join(("fedsim", *words)), "COMP_CWORD": str(len(words))}
        others = {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        environment = {"_FEDSIM_COMPLETE": f"complete_{shell}", **bash, **others}
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
    ],
)
@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_words_are_completed(complete, tmp_path, shell, words, expected):
    for name in ("mine.toml", "minor.yaml", "mine.txt"):
        (tmp_path / name).touch()
    (tmp_path / "mines").mkdir()
    assert complete(shell, *words) == expected


def test_completion_imports_no_heavy_package(tmp_path):
    code = (
        "import sys; sys.argv = ['fedsim']\nfrom fedsim_main import main\n"
        "try:\n    main()\n"
        "finally:\n    print(json.dumps([m for m in ('torch', 'numpy') if m in sys.modules]))"
    )
    environment = {"COMP_WORDS": "fedsim\nrun\nmnist_sync_s", "COMP_CWORD": "2", "_FEDSIM_COMPLETE": "complete_bash"}
    process = start_python("-c", f"import json; {code}", cwd=tmp_path, **environment)
    out, error = process.communicate(timeout=60)
    assert (out.splitlines(), error) == (["mnist_sync_sgd", "[]"], "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_for_shells_are_shown(shell, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    done = CliRunner().invoke(app, ["--show-completion", shell], prog_name="fedsim")
    assert done.exit_code == 0
    assert f"_FEDSIM_COMPLETE=complete_{shell}" in done.stdout
