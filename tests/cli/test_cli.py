from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

import fedsim
from fedsim.config.components import COMPONENTS, registry_of
from tests.commands import (
    ROOT,
    assert_none_left,
    ended,
    processes_of_group,
    read_until,
    run_on_a_terminal,
    start,
    start_python,
)

QUICK = ["engine=serial", "model=2nn", "data=tests.components:tiny", "rounds=2", "records.curve=false"]


def test_run_prints_a_line_per_round_the_accuracy_and_the_folder(cli):
    done = cli("run", *QUICK)
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    folder = Path(lines[-1])
    assert folder.parent == Path("runs")
    assert (folder / "metrics.jsonl").is_file()
    assert [line.split()[0] for line in lines[3:5]] == ["1", "2"]
    assert lines[2].split()[0] == "round"
    assert re.match(r"final test accuracy 0\.\d{4} after 2 rounds in \d", lines[-2])
    assert "tests.components:tiny (203 train, 90 test), 2nn (784 inputs, 10 classes, 199,210 parameters)" in lines[1]
    quiet = cli("run", *QUICK, "--quiet", "--out", "here")
    assert (quiet.stdout, quiet.stderr) == ("here\n", "")


QUICKLY = {  # command-line words, exit code and expected output
    "--help": (0, "Usage: "),
    "--version": (0, f"fedsim {fedsim.__version__}"),
    "list experiments": (0, "mnist_sync_sgd"),
    "new my_study": (0, "next: cd my_study"),
    "list my_study/my_study.py": (0, "softmedian"),
    "": (0, "mnist_sync_sgd\n"),  # shell completion
    "run --resume absent": (2, "not a run folder"),
}


def test_quick_commands_import_no_heavy_package(tmp_path):
    code = f"""
import sys
from typer.testing import CliRunner
from fedsim.cli.main import app
tab = {{"COMP_WORDS": "fedsim\\nrun\\nmnist_sync_s", "COMP_CWORD": "2", "_FEDSIM_COMPLETE": "complete_bash"}}
for words, (code, part) in {QUICKLY}.items():
    done = CliRunner().invoke(app, words.split(), env={{}} if words else tab, prog_name="fedsim")
    heavy = [name for name in ("torch", "matplotlib", "numpy") if name in sys.modules]
    if done.exit_code != code or part not in done.output or heavy:
        print(words, done.exit_code, done.output, heavy)
"""
    out, error = start_python("-c", code, cwd=tmp_path).communicate(timeout=60)
    assert (out, error) == ("", "")


def test_commands_import_pytorch_in_one_place_and_only_the_modules_that_they_need(tmp_path):
    code = """
import sys
from fedsim.cli import main, program
def start(module, do=program._import):
    print(module, "torch" in sys.modules)
    do(module)
program._import = start
main.app(["run", "model=logistic", "rounds=2", "--dry-run"], standalone_mode=False)
print("fedsim.comparison" in sys.modules)
"""
    out, error = start_python("-c", code, cwd=tmp_path).communicate(timeout=60)
    assert (out.splitlines()[0], out.splitlines()[-1], error) == ("fedsim.runs.setup False", "False", "")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["local.algorithm=fedrep", 'local.personal=["fc2.*"]', "local.head_epochs=1"], "local.head_epochs"),
        (["data.validation_fraction=0.00001"], "data.validation_fraction"),
        ([*QUICK, "workers=5000"], "workers"),
    ],
)
def test_a_dry_run_finds_errors_that_need_the_model_or_the_data(words, key, cli):
    done = cli("run", *words, "--dry-run")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {key} = ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.filterwarnings("always")
def test_a_dry_run_warns_of_a_key_without_effect(cli):
    done = cli("run", "engine=serial", "process_timeout=5", "--dry-run")
    assert (done.exit_code, done.stderr) == (0, "warning: process_timeout has no effect with engine=serial; omit it\n")


def test_a_dry_run_prints_the_resolved_experiment_and_leaves_nothing(cli, tmp_path):
    done = cli("run", "rounds=3", "--dry-run")
    assert done.exit_code == 0
    (tmp_path / "printed.toml").write_text(done.stdout)
    assert fedsim.load_experiment(tmp_path / "printed.toml") == fedsim.Experiment(rounds=3)
    assert not (tmp_path / "runs").exists()


def test_a_failed_worker_is_exit_code_1_with_its_traceback(cli):
    done = cli("run", *QUICK, "model=tests.models:Fails", "--out", "x")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: worker 0 in round 1 failed: ZeroDivisionError: this model divides by zero")
    files = re.findall(r'^  File "(.+)", line', done.stderr, re.M)
    assert files
    assert all(file.endswith("/tests/models.py") for file in files), "frames of fedsim and PyTorch are omitted"


@pytest.mark.parametrize("words", ["aggregate=mine:fail", "attack=mine:fail attack.workers=[0]", "partition=mine:fail"])
def test_an_error_in_a_users_function_shows_the_users_lines_alone(cli, tmp_path, monkeypatch, words):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text("def fail():\n    return inner()\n\n\ndef inner():\n    raise KeyError('x')\n")
    done = cli("run", *QUICK, *words.split())
    assert done.exit_code == 1
    first, *lines = done.stderr.splitlines()
    assert first.startswith("error: ")
    assert first.endswith("KeyError: 'x'")
    assert [line.split()[3] for line in lines if line.startswith("  File")] == ["2,", "6,"]
    assert lines[-1].startswith("KeyError") or lines[-2].startswith("KeyError")


def test_list_has_a_line_for_each_kind_with_its_names(cli):
    lines = cli("list").stdout.splitlines()
    for kind in COMPONENTS:
        (line,) = [line for line in lines if line.startswith(f"{kind} ")]
        assert sorted(line.removeprefix(kind).strip().split(", ")) == sorted(registry_of(kind).names())
    assert any(line.startswith("experiments ") and "which_rule" in line for line in lines)
    assert cli("list", "which_rule").stdout == (ROOT / "experiments" / "which_rule.toml").read_text()
    assert len(lines) <= len(COMPONENTS) + 3


def test_list_shows_every_component_of_a_kind_with_parameters_and_description(cli):
    for kind, (key, _) in COMPONENTS.items():
        done = cli("list", kind)
        assert done.exit_code == 0
        assert f"{kind} ({key})" in done.stdout
        for registration in registry_of(kind):
            assert registration.summary, f"{registration.name} has no description"
            assert re.search(
                rf"^  {re.escape(registration.name)} +{re.escape(registration.summary)}$", done.stdout, re.M
            )
            for parameter in registration.parameters.model_fields:
                assert re.search(rf"^ +{parameter}( = | \(required\)| \(from the data\))", done.stdout, re.M)


def test_list_takes_one_component_and_shows_its_parameters_and_all_of_its_docstring(cli):
    done = cli("list", "krum")
    assert done.stdout.startswith("krum (aggregate.rule)\n  f (required)\n\n  Select the update with")
    assert "f: number of Byzantine workers, n >= 2f + 3." in done.stdout
    both = cli("list", "adam").stdout
    assert "adam (local.algorithm)" in both
    assert "adam (server.name)" in both
    unknown = cli("list", "xyzxyz").stderr
    assert "policies" in unknown
    assert "krum" not in unknown, "a list of all components would not help"


def test_list_imports_a_component_by_its_path(cli):
    done = cli("list", "tests.components:tiny")
    assert done.exit_code == 0
    assert done.stdout.startswith("tests.components:tiny(root, *, train=")
    missing = cli("list", "tests.components:absent")
    assert missing.exit_code == 2
    assert missing.stderr.startswith('error: "tests.components:absent": cannot be imported: ')


def test_list_searches_names_and_documentation(cli):
    done = cli("list", "--search", "median CLIPPED").stdout
    assert "signguard" in done
    assert "krum" not in done
    assert "partitions" not in done, "kinds without a match are omitted"
    lines = cli("list", "--search", "counts as lost").stdout.splitlines()
    assert any(line.startswith("  process_timeout = ") for line in lines)
    assert cli("list", "attacks", "--search", "median").stdout.startswith("attacks (attack.name)")
    assert "  staleness " in cli("list", "experiments", "--search", "staleness").stdout


@pytest.mark.parametrize(
    ("search", "name", "other"),
    [
        ("rop", "", "dropout"),  # the middle of a word
        ("aggreg", "aggregate.rule", "aggregate.rule"),
        ("metrics", "worker_evaluation.every", "cohort"),
        ("per-client test set", "data.local_test_fraction", "data.test_fraction"),
        ("per-worker test set", "data.local_test_fraction", "data.test_fraction"),
        ("local test", "data.local_test_fraction", "data.test_fraction"),
        ("number of clients", "workers", "rounds"),
    ],
)
def test_a_search_compares_beginnings_of_words_and_synonyms(cli, search, name, other):
    done = cli("list", "keys", "--search", search)
    listed = [line.split(" = ")[0].strip() for line in done.stdout.splitlines() if " = " in line]
    assert (name in listed) == bool(name)
    assert (other in listed) == (other == name)


def test_hints_about_lists_name_the_right_command(cli):
    assert cli("list", "--search", "per", "client", "test").stderr.endswith('write --search "per client test"\n')
    assert cli("list", "rules", "krum").stderr == 'error: "krum": is a second name; write fedsim list krum\n'
    for name in ("fedavg", "fedadam", "lenet", "femnist"):
        hint = cli("run", f"strategy={name}").stderr.partition("; ")[2]
        assert cli("list", name).stderr == f'error: "{name}": no such kind or component; {hint}'


@pytest.mark.parametrize("words", [["--search", "xyzxyz"], ["krum", "--search", "mean"], ["absent.py"], ["broken.py"]])
def test_a_list_that_has_nothing_to_show_gives_a_one_line_error(cli, tmp_path, words):
    (tmp_path / "broken.py").write_text("def (:\n")
    done = cli("list", *words)
    assert (done.exit_code in (1, 2), done.stdout, done.stderr.count("\n")) == (True, "", 1)
    assert any(word in done.stderr for word in words[:2])


def test_list_shows_the_functions_and_classes_of_a_file_without_running_it(cli, tmp_path):
    text = 'raise SystemExit\ndef rule(x):\n    """One.\n\n    More."""\nclass Attack: pass\ndef _own(): pass\n'
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "components.py").write_text(text)
    expected = ["mine/components.py", "  mine.components:rule   One.", "  mine.components:Attack no docstring"]
    expected.append("  The file was not run. To check a component: fedsim run KEY=mine.components:NAME --dry-run")
    assert cli("list", "mine/components.py").stdout.splitlines() == expected


def test_every_command_has_a_short_option_for_help(cli):
    for command in ("", "run", "compare", "replay", "report", "plot", "privacy", "list", "doctor", "new"):
        short, long = cli(*command.split(), "-h"), cli(*command.split(), "--help")
        assert (short.exit_code, short.stdout) == (0, long.stdout)
        assert "Usage:" in short.stdout


def test_all_entry_points_are_one_program(tmp_path):
    installed = tmp_path / "fedsim"  # the script in the form that pip writes
    installed.write_text("from fedsim.__main__ import main\nmain()\n")
    doors = [ROOT / "run_experiment.py"], ["-m", "fedsim", "run"], [installed, "run"]
    codes, outs, errors = ended([start(*door, "rounds=3", "--dry-run", cwd=tmp_path) for door in doors])
    assert (codes, errors) == ([0, 0, 0], ["", "", ""])
    assert len(set(outs)) == 1


def test_on_a_terminal_a_bar_shows_rounds_accuracy_and_time_left(tmp_path):
    words = [*QUICK, "model=logistic", "rounds=40", "records.curve=false"]
    out, shown = run_on_a_terminal(str(ROOT / "run_experiment.py"), *words, cwd=tmp_path)
    assert len(out.splitlines()) == 3 + 40 + 2, "stdout has the whole table"
    assert re.search(r"\d+ of 40 rounds, \d\d:\d\d left, accuracy 0\.\d{4}", shown)


def test_ctrl_c_during_imports_prints_one_word(tmp_path):
    process = start_python(str(ROOT / "run_experiment.py"), "rounds=100000", cwd=tmp_path)
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=20)
    assert (process.returncode, out, error) == (130, "", "interrupted\n")


@pytest.mark.parametrize("words", [["run", *QUICK], ["--version"]], ids=" ".join)
def test_a_stdout_that_cannot_be_written_gives_a_one_line_error(words, tmp_path):
    with Path("/dev/full").open("w") as full:
        process = start("-m", "fedsim", *words, cwd=tmp_path, stdout=full)
    _, error = process.communicate(timeout=60)
    assert re.fullmatch("error: .*No space left on device.*\n", error)
    assert process.returncode == 1
    assert_none_left(process.pid)


ENDLESS = [
    str(ROOT / "run_experiment.py"),
    "engine=processes",
    "processes=2",
    "data=tests.components:tiny",
    "model=logistic",
]
ENDLESS += ["rounds=100000", "--out", "x"]


def test_a_closed_pipe_ends_the_program_without_a_message(tmp_path):
    process = start(*ENDLESS, cwd=tmp_path)
    read_until(process, "    1")
    process.stdout.close()
    assert process.wait(timeout=20) == 1
    assert process.stderr.read() == ""
    process.stderr.close()
    assert_none_left(process.pid)


def test_ctrl_c_while_processes_start_leaves_none(tmp_path):
    process = start_python(*ENDLESS, cwd=tmp_path)
    while len(processes_of_group(process.pid)) < 3:  # the parent, and children that import PyTorch
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=20)
    assert (process.returncode, error.strip()) == (130, "interrupted")
    assert_none_left(process.pid)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("number", "begin", "outcome"),
    [
        (signal.SIGINT, start, (130, "interrupted")),
        (signal.SIGTERM, start, (143, "terminated")),
        (signal.SIGKILL, start_python, (-9, "")),
    ],
)
def test_a_killed_program_leaves_no_process_and_nothing_in_the_temporary_folder(number, begin, outcome, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = begin(*ENDLESS, cwd=tmp_path, TMPDIR=str(temporary))
    read_until(process, "    3")
    if number == signal.SIGINT:  # a terminal sends SIGINT to the whole group
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    out, error = process.communicate(timeout=20)
    assert (process.returncode, error.strip()) == outcome
    if number != signal.SIGKILL:
        assert re.search(r"\d+ of 100000 rounds are in x; .* with --resume x\n$", out)
    assert_none_left(process.pid)
    assert list(temporary.iterdir()) == []


def test_a_suspended_program_with_spawned_processes_continues(tmp_path):
    process = start(*ENDLESS, "rounds=30", "process_timeout=0.5", "sync=gradients", "workers=3", cwd=tmp_path)
    read_until(process, "    2")
    os.killpg(process.pid, signal.SIGSTOP)
    time.sleep(0.8)
    os.killpg(process.pid, signal.SIGCONT)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "")
    assert out.endswith("x\n")


def test_a_missing_package_is_one_line_that_names_it(tmp_path):
    code = (
        "import sys\n"
        "sys.modules['tomli_w'] = None  # as if it were not installed\n"
        "from fedsim.__main__ import run_main\n"
        "run_main()"
    )
    process = start_python("-c", code, "rounds=1", "--dry-run", cwd=tmp_path)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert error.startswith("error: the Python module tomli_w, which fedsim needs, is not installed; ")
    assert error.count("\n") == 1
