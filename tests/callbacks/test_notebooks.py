"""What a notebook shows, also in a real kernel."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

import fedsim
from fedsim.core import notebook
from fedsim.core.notebook import in_notebook


@pytest.fixture
def shown(monkeypatch):
    """Return a list with the last HTML of each output that a notebook cell shows."""
    outputs = []

    class Handle:
        def __init__(self):
            self.place = len(outputs) - 1

        def update(self, content):
            outputs[self.place] = content

    def display(content, *, display_id):
        assert display_id
        outputs.append(content)
        return Handle()

    shell = SimpleNamespace(kernel=None)
    kernel = SimpleNamespace(get_ipython=lambda: shell, version_info=(9, 0))  # matplotlib reads the version
    assert not in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=display))
    monkeypatch.setattr(notebook, "PAUSE", 0.0)
    assert in_notebook()
    return outputs


def test_a_run_shows_what_is_run_a_curve_and_its_end(shown, tiny_experiment):
    first = []
    fedsim.run(tiny_experiment, on_round=lambda record: first.extend(shown[:1]))
    (page,) = shown
    assert "1 of 2 rounds" in first[0], "the user's callbacks run after the display"
    assert "<progress" in first[0]
    assert "<progress" not in page
    assert "<img" in page
    assert "3 workers; 2 rounds" in page
    assert "tests.components:tiny (203 train, 90 test)" in page
    assert re.search(r"final test accuracy 0\.\d{4} after 2 rounds in ", page)
    fedsim.run(tiny_experiment, progress=False)
    assert len(shown) == 1


def test_a_comparison_shows_a_bar_and_its_table(shown, tiny_experiment):
    tables = {**tiny_experiment, "local.steps": 1}
    comparison = fedsim.compare(tables, {"local.lr": [0.1, 0.01], "seed": [0, 1]}, jobs=1)
    (bar,) = shown
    assert re.search(r'<progress value="8" max="8".*4 of 4 runs', bar)
    page = comparison._repr_html_()
    assert len(re.findall("<b>", page)) == 1
    assert "<img" in page


def test_a_display_that_fails_does_not_end_the_run(shown, tiny_experiment, monkeypatch):
    """IPython is installed but cannot display anything."""
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    assert len(fedsim.run(tiny_experiment, rounds=2).history) == 2
    assert len(fedsim.compare(tiny_experiment, {"seed": [0, 1]}, rounds=1, jobs=1).runs) == 2


@pytest.mark.skipif(
    find_spec("nbclient") is None or find_spec("ipykernel") is None, reason="needs nbclient and ipykernel"
)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # raised by the kernel
def test_a_real_notebook_shows_a_run_a_comparison_and_functions_of_cells(tmp_path):
    import nbclient
    from nbformat.v4 import new_code_cell, new_notebook

    cells = ["import fedsim\n\ndef halved(updates):\n    return updates.mean(0) / 2"]
    cells += ['fedsim.run(model="logistic", rounds=1, aggregate=halved, engine="spawn", processes=2)']
    cells += ['fedsim.compare({"model": "logistic", "rounds": 1}, {"aggregate": ["mean", "median"]})']
    book = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": tmp_path}}).execute(cleanup_kc=True)
    pages = ["".join(output.get("data", {}).get("text/html", "") for output in cell["outputs"]) for cell in book.cells]
    assert pages[0] == ""
    assert all("<img" in page for page in pages[1:])


def test_a_result_is_html_in_which_every_text_is_escaped(tiny_experiment):
    result = fedsim.run(tiny_experiment, rounds=1, data={"root": "<script>"}, local={"steps": 1})
    page = result._repr_html_()
    assert "&lt;script&gt;" in page
    assert "<script>" not in page
    assert "<code>local.steps = 1</code>" in page
    assert "<img" in page
