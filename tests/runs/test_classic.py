"""The classic program in experiments/ and its Hogwild sister: one process per worker, written with public functions."""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import importlib
import inspect
import json
import os
import re
import signal
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
import torch.multiprocessing as mp

import fedsim
from experiments import classic, classic_hogwild
from fedsim.core.randomness import batch_order
from tests.commands import ROOT, assert_none_left, processes_of_group, read_until, start_python
from tests.documents.test_documentation import DOCS, blocks
from tests.documents.test_readme import TEXT as README

SCRIPTS = {name: ROOT / "experiments" / f"{name}.py" for name in ("classic", "classic_hogwild")}
SOURCES = {name: path.read_text() for name, path in SCRIPTS.items()}
NOTEBOOK = json.loads((DOCS / "tutorials" / "classic.ipynb").read_text())
USED = {  # public names of fedsim that the classic program uses
    node.attr
    for node in ast.walk(ast.parse(SOURCES["classic"]))
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "fedsim" and node.attr != "models"
}
IN_A_RUN = re.compile(r"In a run: `(?P<path>fedsim[\w.]+)` (?:calls `(?P<called>[\w.]+)`)?")


def options(**changed):
    return argparse.Namespace(**{"workers": 2, "rounds": 2, "device": "cpu", "rule": "mean", **changed})


@pytest.fixture
def printed(monkeypatch, tmp_path):
    """Return the file that receives the output of the scripts' processes.

    They are forked from the test server, which has imported PyTorch, instead of spawned.
    """
    path = tmp_path / "printed.txt"

    def spawn(function, args, nprocs, daemon):
        mp.start_processes(_print_to, (path, function, *args), nprocs, daemon=daemon, start_method="forkserver")

    monkeypatch.setattr(mp, "spawn", spawn)
    return path


def _print_to(worker, path, function, *args):
    with path.open("a") as sys.stdout:
        function(worker, *args)


def accuracies(printed):
    return [float(word) for word in re.findall(r"round \d+: test accuracy (\S+),", printed.read_text())]


@pytest.mark.parametrize(("workers", "rounds", "rule"), [(4, 2, "mean"), (3, 1, "median")])
def test_the_classic_program_equals_the_engine_spawn(workers, rounds, rule, printed, tmp_path, monkeypatch):
    """In float64, because a ReLU can amplify the rounding of float32 to any size."""
    (tmp_path / "classic_in_float64.py").write_text(SOURCES["classic"].replace("torch.float32", "torch.float64"))
    monkeypatch.syspath_prepend(tmp_path)
    row = importlib.import_module("classic_in_float64").main(options(workers=workers, rounds=rounds, rule=rule))
    tables = {"model": "2nn", "workers": workers, "rounds": rounds, "aggregate": rule, "precision": "float64"}
    result = fedsim.run(tables, engine="processes", processes=2)
    assert row.dtype == torch.float64
    assert torch.allclose(row, result.global_row, rtol=0, atol=1e-9)
    assert accuracies(printed) == [record["test_accuracy"] for record in result.history]


def test_draws_shuffle_samples_as_a_run_does():
    for epoch in range(3):
        order = fedsim.Draws.of("batches", 2, 5, seed=7).steps()(epoch).permutation(101)
        assert torch.equal(order, batch_order(7, 2, 5, epoch, 101))
    assert torch.equal(fedsim.Draws.of("batches", 2, 5, seed=7).permutation(101), batch_order(7, 2, 5, 0, 101))


def test_the_classic_program_prints_what_the_readme_shows(printed):
    classic.main(options(workers=4, rounds=3))
    (block,) = (block for block in blocks.blocks_of(README) if block.code == "python experiments/classic.py\n")
    assert blocks.difference(block.output, printed.read_text()) is None
    assert accuracies(printed)[-1] > 0.85


def test_the_notebook_contains_the_classic_program_and_no_outputs():
    codes = {cell["id"]: cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"}
    assert "".join(codes["program"]["source"]) == f"%%writefile classic.py\n{SOURCES['classic'].rstrip()}"
    assert "".join(next(iter(codes.values()))["source"]).splitlines()[-1].startswith("%pip install")
    assert not any(cell["outputs"] or cell["execution_count"] for cell in codes.values())


@pytest.mark.skipif(
    find_spec("nbclient") is None or find_spec("ipykernel") is None, reason="needs nbclient and ipykernel"
)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # raised by the kernel
def test_the_notebook_runs(tmp_path, monkeypatch):
    import nbclient
    import nbformat

    monkeypatch.setenv("PATH", os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    book = nbformat.reads(json.dumps(NOTEBOOK), 4)
    book.cells = [cell for cell in book.cells if cell.cell_type == "code" and cell.id != "install"]
    nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": tmp_path}}).execute(cleanup_kc=True)
    _, run, simulate = book.cells
    (block,) = (block for block in blocks.blocks_of(README) if block.code == "python experiments/classic.py\n")
    printed = "".join(output.text for output in run.outputs).replace("\r", "")
    assert blocks.difference(block.output, printed) is None
    assert "<img" in simulate.outputs[-1].data["text/html"]


def test_its_hogwild_sister_trains_one_shared_model(printed, capsys):
    row = classic_hogwild.main(options())
    assert len(accuracies(printed)) == 2
    _, test = fedsim.load_dataset("mnist5k")
    model = fedsim.models.two_nn()
    fedsim.bind(model, row)
    accuracy = fedsim.test(model, fedsim.CustomSubset(test, range(len(test))).batches(100)).accuracy
    assert capsys.readouterr().out == f"test accuracy when all workers have finished: {accuracy:.4f}\n"
    assert accuracy > 0.85


def killed(updates):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("printed")
def test_a_killed_process_ends_the_classic_program():
    """The other processes wait at the second barrier."""
    with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
        classic.main(options(workers=3, rule=killed))


@pytest.mark.usefixtures("printed")
@pytest.mark.parametrize("script", [classic, classic_hogwild])
def test_a_failed_process_ends_the_program(script, monkeypatch):
    """The other processes wait at the first barrier, or train."""
    shards = [torch.arange(100), torch.tensor([10**6])]
    monkeypatch.setattr(fedsim, "partition", lambda *args, **options: shards)
    with pytest.raises(mp.ProcessRaisedException, match="Process 1 (.|\n)*IndexError"):
        script.main(options(rounds=10_000))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(("victim", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGINT)])
def test_the_program_ends_when_the_main_process_or_a_worker_ends(name, victim, number, tmp_path):
    program = start_python(SCRIPTS[name], "--rounds", "100000", "--workers", "3", cwd=tmp_path)
    read_until(program, "round 1")
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes_of_group(program.pid)}
    workers = [pid for pid, command in commands.items() if b"spawn_main" in command]
    os.kill([program.pid, workers[0]][victim], number)
    _, error = program.communicate(timeout=60)
    assert_none_left(program.pid)
    assert victim == 0 or f"terminated with signal {number.name}" in error


def test_the_scripts_are_short_and_differ_in_ten_lines():
    assert len(SOURCES["classic"].splitlines()) <= 50
    lines = [source.splitlines() for source in SOURCES.values()]
    changes = difflib.SequenceMatcher(None, *lines, autojunk=False).get_opcodes()
    assert sum(max(b - a, d - c) for kind, a, b, c, d in changes if kind != "equal") <= 10


def test_the_tutorial_shows_the_scripts():
    page = blocks.blocks_of((DOCS / "tutorials" / "classic.md").read_text())
    assert [block.code for block in page if block.attributes.get("title") == "classic.py"] == [SOURCES["classic"]]
    (excerpt,) = [block.code for block in page if "excerpt" in block.attributes.get("run", "")]
    assert textwrap.indent(excerpt, "    ") in SOURCES["classic_hogwild"]


@pytest.mark.parametrize("name", sorted(USED))
def test_a_docstring_names_the_place_where_a_run_uses_the_name(name):
    """The named function exists, a run executes it, and it calls what the docstring says."""
    target = getattr(fedsim, name)
    match = IN_A_RUN.search(" ".join(inspect.getdoc(target).split()))
    place = inspect.unwrap(resolve_name(match["path"]))
    if called := match["called"]:
        assert called.split(".")[-1] in names_in(place)
        first = called.split(".")[0]
        assert first in (name, *names_in(target))
    assert place.__code__ in executed()


def names_in(function):
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))))
    return {node.id for node in nodes if isinstance(node, ast.Name)} | {
        node.attr for node in nodes if isinstance(node, ast.Attribute)
    }


@functools.cache
def executed():
    """Return the code objects that one round executes."""
    codes = set()
    sys.setprofile(lambda frame, event, argument: codes.add(frame.f_code))
    try:
        fedsim.run(model="logistic", rounds=1, workers=2, data="tests.components:tiny", engine="serial")
    finally:
        sys.setprofile(None)
    return codes
