"""Jupyter notebook display of a run: a progress bar and a growing curve, and the view of a result."""

from __future__ import annotations

import base64
import html
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.callbacks.callback import CurrentRun
from fedsim.callbacks.display import Display, columns_of, table_cell
from fedsim.callbacks.records import draw_curve
from fedsim.config.experiment import Experiment
from fedsim.core.input_limits import leaves_of
from fedsim.core.plotting import encode
from fedsim.errors import plural, show
from fedsim.records.formatting import score_text
from fedsim.records.record import RoundRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedsim.runs.result import Result

PAUSE = 1.0  # minimum seconds between two updates; drawing a curve takes about 0.1 seconds
PLAIN = "font-family:monospace;white-space:pre;overflow-x:auto;margin:0.3em 0"  # CSS style of text
SHARPNESS = 2  # image pixels per CSS pixel


def in_notebook() -> bool:
    """Whether the program runs in a Jupyter notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def text_html(text: str) -> str:
    """Return HTML that shows a text with its line breaks and spaces."""
    return f'<pre style="{PLAIN}">{html.escape(text)}</pre>'


def progress_html(done: int, total: int, text: str) -> str:
    """Return an HTML progress bar (`done` of `total`), followed by a text."""
    label = html.escape(text)
    return f'<div><progress value="{done}" max="{total}" aria-label="{label}"></progress> {label}</div>'


def figure_html(figure: Figure, description: str) -> str:
    """Return a figure as an HTML image. `description` is its alternative text."""
    data = base64.b64encode(encode(figure, "png", dpi=96 * SHARPNESS)).decode()
    width = round(figure.get_figwidth() * 96)
    return f'<img src="data:image/png;base64,{data}" width="{width}" alt="{html.escape(description)}">'


class CellOutput:
    """An output of a notebook cell that can be replaced. Errors are ignored, so that they never end a run."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown_at = float("-inf")
        self._works = True

    @property
    def due(self) -> bool:
        """Whether enough time has passed to update the output again."""
        return self._works and time.monotonic() - self._shown_at >= PAUSE

    def show(self, content: str) -> None:
        """Replace the previous output by this HTML."""
        if not self._works:
            return
        try:
            from IPython.display import HTML, display

            if self._handle is None:
                self._handle = display(HTML(content), display_id=True)
            else:
                self._handle.update(HTML(content))
        except Exception:
            self._works = False
        self._shown_at = time.monotonic()


class NotebookDisplay(Display):
    """Shows a run in a notebook: a description, a progress bar and a curve.

    Use it as a context manager around the run.
    """

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment, None, quiet=True)
        self._cell, self._step = CellOutput(), ""
        self._history: list[RoundRecord] = []  # records of this session
        self._lines: list[str] = []

    def on_setup(self, step: str) -> None:
        self._step = step
        self._cell.show(self._page())

    def on_start(self, run: CurrentRun) -> None:
        super().on_start(run)
        self._step = ""
        self._cell.show(self._page())

    def _print(self, line: str) -> None:
        self._lines.append(line)

    def _show_round(self, record: RoundRecord) -> None:
        self._history.append(record)
        if self._cell.due:
            self._cell.show(self._page(curve=True))

    def _page(self, *, curve: bool = False, bar: bool = True) -> str:
        score = f", {score_text(self._history[-1])}" if self._history else ""
        text = self._step or f"{self._done} of {plural(self._experiment.rounds, 'round')}{score}"
        parts = [text_html("\n".join(self._lines))] if self._lines else []
        parts += [progress_html(self._done, self._experiment.rounds, text)] if bar else []
        parts += [figure_html(draw_curve(self._history, self._experiment.name), "curves of the run")] if curve else []
        return "".join(parts)

    def __exit__(self, kind: object, *_: object) -> None:
        super().__exit__(kind)
        if self._last is not None or kind is not None:
            self._cell.show(self._page(curve=bool(self._history), bar=kind is not None))


def display_of(experiment: Experiment, folder: Path | None, progress: bool | None) -> Display:
    """Return the object that shows the progress of a run.

    Args:
        experiment: the experiment of the run.
        folder: folder of the run, or None.
        progress: True prints lines, False prints nothing, and None shows a bar and a curve in notebooks only.
    """
    if progress is None and in_notebook():
        return NotebookDisplay(experiment)
    return Display(experiment, folder, quiet=not progress)


def result_html(result: Result) -> str:
    """Return the result of a run as HTML for a notebook: its name, settings, last round and curve."""
    last = result.history[-1]
    parts = [f"<h4>{html.escape(result.experiment.name)}: {html.escape(score_text(last))}</h4>"]
    if result.stopped:
        parts.append(f"<p>Stopped after round {last.round}: {html.escape(result.stopped)}</p>")
    defaults = dict(leaves_of(Experiment().resolved()))
    settings = leaves_of(result.experiment.resolved())
    changed = [f"{key} = {show(value)}" for key, value in settings if key != "name" and defaults.get(key) != value]
    if changed:
        items = ", ".join(f"<code>{html.escape(line)}</code>" for line in changed)
        parts.append(f"<p>Settings: {items}</p>")
    curve = figure_html(draw_curve(result.history, result.experiment.name), "curves of the run")
    return "".join([*parts, _last_round(last), curve])


def _last_round(record: RoundRecord) -> str:
    columns = [column for column in columns_of(record) if column.path[0] != "seconds"]
    heads = "".join(f"<th>{html.escape(column.column)}</th>" for column in columns)
    cells = "".join(f"<td>{html.escape(table_cell(column, record))}</td>" for column in columns)
    return f"<table><thead><tr>{heads}</tr></thead><tbody><tr>{cells}</tr></tbody></table>"
