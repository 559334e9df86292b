"""What a notebook shows, in a real kernel, and the notebooks of the documentation."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import fedsim
from fedsim.callbacks.notebook import in_notebook

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))
needs_kernel = pytest.mark.skipif(
    find_spec("nbclient") is None or find_spec("ipykernel") is None, reason="needs fedsim-sgd[notebook]"
)
# of the kernel: ports without encryption, and files that it leaves open
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


def executed(book, folder):
    """The notebook with its outputs. Raises if a cell fails."""
    import nbclient

    client = nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": str(folder)}})
    return client.execute(cleanup_kc=True)


def html_of(cell):
    return [output.data["text/html"] for output in cell.outputs if "text/html" in output.get("data", {})]


@needs_kernel
def test_a_run_and_a_comparison_show_bars_a_curve_and_their_results(tmp_path):
    import nbformat

    cells = [
        "import fedsim\nfrom torch import nn",
        "def model():\n    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))\n"
        "def rule(updates):\n    return updates.mean(0)\n"
        "settings = {'model': model, 'aggregate.rule': rule, 'rounds': 2, 'local.steps': 1}",
        "result = fedsim.run(settings, engine='serial')\nresult",
        "silent = fedsim.run(settings, engine='serial', progress=False)",
        "fedsim.compare(settings, {'local.lr': [0.1, 0.01], 'seed': [0, 1]}, jobs=1)",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    *_, run, silent, comparison = executed(book, tmp_path).cells
    shown, result = html_of(run)
    assert "<img" in shown
    assert "after 2 rounds" in shown
    assert "<code>local.steps = 1</code>" in result
    assert "<img" in result
    assert silent.outputs == []
    bar, table = html_of(comparison)
    assert re.search(r'<progress value="8" max="8".*4 of 4 runs', bar)
    assert len(re.findall("<b>", table)) == 1
    assert "<img" in table


@needs_kernel
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(path, tmp_path):
    import nbformat

    book = executed(nbformat.read(path, 4), tmp_path)
    assert any(html_of(cell) for cell in book.cells if cell.cell_type == "code")


def test_the_notebooks_are_stored_without_outputs():
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        assert '"output_type"' not in path.read_text()
        assert '"execution_count": null' in path.read_text()


def test_a_result_is_html_in_which_every_text_is_escaped(tiny_experiment):
    result = fedsim.run(tiny_experiment, rounds=1, partition={"strategy": "iid"}, data={"root": "<script>"})
    page = result._repr_html_()
    assert "&lt;script&gt;" in page
    assert "<script>" not in page


def test_a_display_that_fails_does_not_end_the_run(tiny_experiment, monkeypatch):
    """IPython is there, but cannot show anything."""

    class Broken:
        @staticmethod
        def get_ipython():
            return type("Shell", (), {"kernel": None})()

    assert not in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", Broken)
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    assert in_notebook()
    assert len(fedsim.run(tiny_experiment, rounds=2).history) == 2
    assert len(fedsim.compare(tiny_experiment, {"seed": [0, 1]}, rounds=1, jobs=1).runs) == 2
