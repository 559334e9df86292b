"""What shells offer at TAB: the words, and that they come without an import of PyTorch."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import fedsim
from fedsim.cli import completion
from fedsim.cli.main import app
from fedsim.config.keys import key_tables
from fedsim.config.source_catalog import source_plugs
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
        (["run", "worker_d"], ["worker_dropout=", "worker_dropout=0.0"]),
        (["run", "record"], ["records.updates=", "records.model=", "records.curve="]),
        (["compare", "clock.n"], ["clock.noise.", "clock.noise="]),
        (["compare", "local.per_no"], []),
        (["list", "krum"], ["krum"]),
        (["list", "pre-"], ["pre-aggregators"]),
        (["run", "--allow"], ["--allow-imports"]),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_words_are_completed(complete, shell, words, expected):
    found = complete(shell, *words)
    assert found[: len(expected)] == expected
    assert bool(found) == bool(expected)


def test_values_are_completed_where_a_shell_splits_words_at_the_equals_sign(complete):
    assert complete("bash", "run", "aggregate.rule", "=", "kr") == ["krum"]
    assert complete("bash", "run", "aggregate.rule", "=") == fedsim_names("rules")
    assert complete("bash", "compare", "rounds", "=", "3", "aggregate.rule", "=", "mean,kr") == ["mean,krum"]
    assert complete("bash", "run", "sync", "=", "g") == ["gradients"]


def test_values_are_completed_where_a_shell_keeps_words_whole(complete):
    assert complete("fish", "run", "aggregate.rule=kr") == ["aggregate.rule=krum"]
    assert complete("fish", "run", "attack=") == [f"attack={name}" for name in fedsim_names("attacks")]
    assert complete("fish", "compare", "aggregate.rule=mean,kr") == ["aggregate.rule=mean,krum"]
    assert '"aggregate.rule=krum"' in complete("zsh", "run", "aggregate.rule=kr")[0]


def fedsim_names(kind):
    return list(source_plugs(kind))


def test_files_and_folders_of_experiments_are_completed(complete, tmp_path):
    for name in ("mine.toml", "minor.yaml", "mine.txt"):
        (tmp_path / name).touch()
    (tmp_path / "mines").mkdir()
    assert complete("fish", "run", "min") == ["mines/", "mine.toml", "minor.yaml"]


def test_a_word_that_is_to_be_continued_is_never_the_only_one():
    """A shell would add a space after it."""
    for key in completion.known_values():
        for end in range(1, len(key) + 1):
            found = completion._keys(key[:end])
            unfinished = len(found) == 1 and found[0][-1] in ".="
            assert not unfinished or not completion.known_values()[found[0][:-1]], key[:end]


def test_every_key_is_known():
    tables = [table for table in key_tables() if "[]" not in table.path]
    assert {key.path for table in tables for key in table.keys} <= set(completion.known_values())
    assert {"aggregate.f", "attack.scale", "local.momentum", "local.schedule.step_size"} <= set(
        completion.known_values()
    )


def test_the_values_that_are_offered_are_accepted():
    for key in ("engine", "sync", "buffers", "records.curve", "rounds", "model", "aggregate.nonfinite"):
        values = completion.known_values()[key]
        assert values
        for value in set(values) - {"post_local", "distributed"}:
            fedsim.load_experiment(None, [f"{key}={value}"])


def test_completion_imports_no_heavy_package(tmp_path):
    code = (
        "import sys; sys.argv = ['fedsim']\nfrom fedsim_main import main\n"
        "try:\n    main()\n"
        "finally:\n    print(json.dumps([m for m in ('torch', 'numpy') if m in sys.modules]))"
    )
    environment = {"COMP_WORDS": "fedsim\nrun\nround", "COMP_CWORD": "2", "_FEDSIM_COMPLETE": "complete_bash"}
    process = start_python("-c", f"import json; {code}", cwd=tmp_path, **environment)
    out, error = process.communicate(timeout=60)
    assert (out.splitlines(), error) == (["rounds=", "rounds=10", "[]"], "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_for_shells_are_shown(shell, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    done = CliRunner().invoke(app, ["--show-completion", shell], prog_name="fedsim")
    assert done.exit_code == 0
    assert f"_FEDSIM_COMPLETE=complete_{shell}" in done.stdout
