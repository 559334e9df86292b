"""The class of all matplotlib figures. Importing this module imports matplotlib, which takes half a second."""

from __future__ import annotations

from matplotlib.figure import Figure as MatplotlibFigure

from fedsim.core.plotting import encode


class Figure(MatplotlibFigure):
    """Figure that notebooks show. It does not use pyplot, which has global state and may need a display."""

    def _repr_png_(self) -> bytes:
        """Return the figure as the content of a PNG file, which a notebook shows."""
        return encode(self, "png")
