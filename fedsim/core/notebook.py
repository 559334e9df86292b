"""HTML outputs of a Jupyter notebook."""

from __future__ import annotations

import base64
import html
import sys
import time
from typing import TYPE_CHECKING, Any

from fedsim.core.plotting import encode

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
        """Replace the previous output by the HTML `content`."""
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
