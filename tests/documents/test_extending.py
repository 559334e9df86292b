"""The code examples of the documents and of the README run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fedsim
from fedsim.cli.main import app
from fedsim.records.history import read_history

ROOT = Path(__file__).parents[2]


def blocks(document, language):
    return re.findall(rf"```{language}[^\n]*\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


RUN = """run model=my_models:perceptron model.inputs=64 data=my_data:digits workers=5 rounds=10 model.hidden=64
    engine=serial partition=my_partitions:by_label aggregate.rule=my_rules:clipped_mean aggregate.c=0.5
    data.augment='[{name="my_augmentations:speckled",share=0.2}]' processors='["my_processors:halved"]'
    records.figures=[] --out run"""


def test_the_components_of_the_documents_run_together_and_learn(tmp_path, monkeypatch):
    for page in (ROOT / "docs/how-to").glob("own-*.md"):
        for name, code in re.findall(r'```python title="(\w+\.py)"\n(.*?)```', page.read_text(), re.DOTALL):
            (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    done = CliRunner().invoke(app, shlex.split(RUN))
    assert done.exit_code == 0, done.output
    experiment = fedsim.load_experiment("run/experiment.toml", allow_imports=True)
    assert experiment.aggregate.params == {"c": 0.5}
    assert float(re.search(r"final test accuracy (0\.\d+)", done.stdout)[1]) > 0.5


def test_the_task_of_the_document_learns(tmp_path, monkeypatch):
    (text,) = (block for block in blocks("docs/how-to/tasks.md", "python") if "def lines" in block)
    (tmp_path / "my_tasks.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    (command,) = (block for block in blocks("docs/how-to/tasks.md", "bash") if "my_tasks" in block)
    done = CliRunner().invoke(app, [*shlex.split(command)[1:], "engine=serial", "records.figures=[]", "--out", "run"])
    assert done.exit_code == 0, done.output
    first, *_, last = read_history(Path("run"))
    assert last.test_loss < 0.9 * first.test_loss
    assert len(last.metrics) == 2


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_the_scaffold_of_the_document_is_the_built_in_one(engine, tmp_path, monkeypatch, tiny_experiment):
    """Bit-identical if rows are trained one by one, also if workers take different numbers of steps."""
    (text,) = (block for block in blocks("docs/tutorials/client-algorithm.md", "python") if "class MyScaffold" in block)
    assert len([line for line in text.splitlines() if line]) <= 25
    (tmp_path / "my_algorithms.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    tables = {**tiny_experiment, "partition": "tests.components:uneven", "workers": 5, "cohort": 3, "rounds": 4}
    tables |= {"aggregate": "mean", "engine": engine, "processes": 1, "precision": "float64"}
    theirs, ours = (
        fedsim.run({**tables, "model": "logistic", "local": {"algorithm": algorithm, "lr": 0.1, "batch_size": 16}})
        for algorithm in ("my_algorithms:MyScaffold", "scaffold")
    )
    if engine == "serial":
        assert torch.equal(theirs.global_row, ours.global_row)
    assert torch.allclose(theirs.global_row, ours.global_row, rtol=0, atol=1e-9)
    assert theirs.history[-1]["bytes_up"] == ours.history[-1]["bytes_up"] == 3 * 2 * 7850 * 8


def test_the_document_on_asynchronous_runs_lists_every_policy_topology_slowdown_and_noise():
    text = (ROOT / "docs/explanation/asynchronous.md").read_text()
    kinds = "policies", "topologies", "slowdowns", "noises"
    assert all(f"`{name}`" in text for kind in kinds for name in fedsim.components(kind))
