"""The class of all matplotlib figures. Importing this module imports matplotlib, which takes half a second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedsim.core.plotting import encode
from fedsim.errors import ExperimentError, one_line

try:
    from matplotlib.figure import Figure as MatplotlibFigure
except ValueError as error:  # an environment variable such as MPLBACKEND
    raise ExperimentError(f"matplotlib cannot be imported: {one_line(error)}") from None

if TYPE_CHECKING:
    from matplotlib.text import Text


class Figure(MatplotlibFigure):
    """Figure that notebooks show. It does not use pyplot, which has global state and may need a display."""

    def suptitle(self, t: str, **kwargs: Any) -> Text:
        """Show a title, with line breaks where it is wider than the figure."""
        return super().suptitle(t, **{"wrap": True, **kwargs})

    def _repr_png_(self) -> bytes:
        """Return the figure as the content of a PNG file, which a notebook shows."""
        return encode(self, "png")
