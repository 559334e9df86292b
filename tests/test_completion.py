"""What shells offer at TAB: the words, and that they come without an import of PyTorch."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import fedsim
from fedsim.cli import completion
from fedsim.cli.main import app
from fedsim.config.plugs import PLUGS, registry_of
from tests.commands import start_python


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache folder that is full."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        completion.vocabulary()
    return folder


@pytest.fixture
def complete(cache, tmp_path, monkeypatch):
    """The words that a shell is offered, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def completed(shell, *words):
        line = " ".join(("fedsim", *words))
        bash = {"COMP_WORDS": "\n".join(("fedsim", *words)), "COMP_CWORD": str(len(words))}
        others = {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        environment = {"XDG_CACHE_HOME": str(cache), "_FEDSIM_COMPLETE": f"complete_{shell}", **bash, **others}
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
    return registry_of(kind).names()


def test_files_and_folders_of_experiments_are_completed(complete, tmp_path):
    for name in ("mine.toml", "minor.yaml", "mine.txt"):
        (tmp_path / name).touch()
    (tmp_path / "mines").mkdir()
    assert complete("fish", "run", "min") == ["mines/", "mine.toml", "minor.yaml"]


def test_a_word_that_is_to_be_continued_is_never_the_only_one(cache, monkeypatch):
    """A shell would add a space after it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    known = completion.vocabulary()
    for key in known["keys"]:
        for end in range(1, len(key) + 1):
            found = completion._keys(known, key[:end])
            unfinished = len(found) == 1 and found[0][0][-1] in ".="
            assert not unfinished or not known["values"].get(found[0][0][:-1]), key[:end]


def test_every_plug_and_every_key_is_known(cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    known = completion.vocabulary()
    assert {plug.name for kind in PLUGS for plug in registry_of(kind)} == set(known["plugs"])
    for key in fedsim.Experiment.model_fields:
        assert any(each.partition(".")[0] == key for each in known["keys"]), key
    assert {"aggregate.f", "attack.scale", "local.momentum", "local.schedule.step_size"} <= set(known["keys"])


def test_the_values_that_are_offered_are_accepted(cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    for key in ("engine", "sync", "buffers", "precision", "records.curve", "rounds", "model", "aggregate.nonfinite"):
        for value in set(completion.vocabulary()["values"][key]) - {"post_local", "distributed", "bf16", "tf32"}:
            fedsim.load_experiment(None, [f"{key}={value}"])


def test_the_words_are_collected_again_only_after_a_change(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(completion, "collect", lambda: calls.append(1) or {"keys": {}, "values": {}, "plugs": {}})
    for _ in range(2):
        completion.vocabulary()
    assert len(calls) == 1
    monkeypatch.setattr(completion, "_fingerprint", lambda: "of other files")
    completion.vocabulary()
    assert len(calls) == 2
    (tmp_path / "fedsim" / "completion.json").write_text("[]")
    completion.vocabulary()
    assert len(calls) == 3
    assert [path.name for path in (tmp_path / "fedsim").iterdir()] == ["completion.json"]


def test_a_change_of_a_source_file_changes_the_fingerprint(tmp_path, monkeypatch):
    (tmp_path / "rules").mkdir()
    source = tmp_path / "rules" / "new.py"
    monkeypatch.setattr(completion, "PACKAGE", tmp_path)
    seen = {completion._fingerprint()}
    for text in ("a", "ab"):
        source.write_text(text)
        seen.add(completion._fingerprint())
    assert len(seen) == 3


def test_without_a_cache_folder_or_pytorch_completion_still_works(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "rounds" in completion.vocabulary()["keys"]

    def fail():
        raise ImportError

    monkeypatch.setattr(completion, "collect", fail)
    assert completion.vocabulary()["keys"] == {}


def test_completion_imports_no_heavy_package(cache, tmp_path):
    code = (
        "import sys; sys.argv = ['fedsim']\nfrom fedsim_main import main\n"
        "try:\n    main()\n"
        "finally:\n    print(json.dumps([m for m in ('torch', 'numpy') if m in sys.modules]))"
    )
    environment = {"COMP_WORDS": "fedsim\nrun\nround", "COMP_CWORD": "2", "_FEDSIM_COMPLETE": "complete_bash"}
    process = start_python("-c", f"import json; {code}", cwd=tmp_path, XDG_CACHE_HOME=str(cache), **environment)
    out, error = process.communicate(timeout=60)
    assert (out.splitlines(), error) == (["rounds=", "rounds=10", "[]"], "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_for_shells_are_shown(shell, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    done = CliRunner().invoke(app, ["--show-completion", shell], prog_name="fedsim")
    assert done.exit_code == 0
    assert f"_FEDSIM_COMPLETE=complete_{shell}" in done.stdout
