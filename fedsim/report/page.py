"""One HTML file that holds all it needs: texts, tables, numbers, scripts and plotly.js.

What comes from a run's files is never trusted. Jinja escapes it in the page; the numbers for the charts travel as JSON
with every `<` escaped, so that no text can close their element; and the page's Content-Security-Policy admits nothing
but the scripts that were put into it here, known by their hashes, and no connection to anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

from fedsim.intervals import fixed
from fedsim.report.grid_page import grid_context
from fedsim.report.reading import Run, read_records
from fedsim.report.run_page import run_context
from fedsim.system.extras import import_extra
from fedsim.system.files import write_whole
from fedsim.version import __version__

PAGE = "report.html"
STYLE = "page.css"
SCRIPTS = ("charts.js", "curves.js", "pictures.js", "page.js")  # in the order in which they build on each other


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page about a run or a grid, and say where it is.

    Args:
        folder: that of a run, or of a grid of runs; unfinished ones are shown as far as they are.
        out: the HTML file; `report.html` in the folder where left out. It is replaced if it is there already.

    Raises:
        RecordError: the folder is neither, holds no finished round or something damaged, or the file cannot be written.
        MissingPackageError: plotly is not installed.
    """
    folder = Path(folder)
    html = render(folder)
    path = Path(out) if out is not None else folder / PAGE
    # A name may hold halves of surrogate pairs, which UTF-8 has no bytes for.
    write_whole(path, html.encode("utf-8", errors="replace"))
    return path


def render(folder: Path) -> str:
    """The page about a run or a grid, as text."""
    plotly = import_extra("plotly.offline", extra="report", purpose="a report")
    jinja2 = import_extra("jinja2", extra="report", purpose="a report")
    records = read_records(folder)
    context, data = run_context(records) if isinstance(records, Run) else grid_context(records)
    scripts = [plotly.get_plotlyjs(), *map(_asset, SCRIPTS)]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedsim.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["fixed"] = fixed
    template = environment.get_template("run.html" if isinstance(records, Run) else "grid.html")
    markup = environment.filters["safe"]
    return template.render(
        **context,
        version=__version__,
        style=markup(_asset(STYLE)),
        scripts=[markup(script) for script in scripts],
        script_hashes=[markup(_content_hash(script)) for script in scripts],
        data=markup(to_script_json(data)),
    )


def to_script_json(data: Any) -> str:
    """JSON that can stand in a <script> element: it holds no `<`, so it can neither end it nor open another."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _content_hash(script: str) -> str:
    """A script as a Content-Security-Policy names it."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"


def _asset(name: str) -> str:
    return resources.files("fedsim.report").joinpath("assets", name).read_text(encoding="utf-8")
