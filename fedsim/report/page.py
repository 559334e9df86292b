"""Write a report as one HTML file that contains texts, tables, figures, scripts and plotly.js.

The files of a run are not trusted. Jinja escapes their texts. Figures are JSON in which every `<` is escaped, so that
no text can close the <script> element. The Content-Security-Policy of the page forbids connections, and allows only the
scripts of this module, identified by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

from fedsim.comparison.results import read_records
from fedsim.errors import ExperimentError, show
from fedsim.records.reader import Run
from fedsim.report.comparison_page import comparison_page
from fedsim.report.on_page import CONFIG, TEMPLATES
from fedsim.report.run_page import run_page
from fedsim.system.files import user_path, write_atomically
from fedsim.system.packages import import_extra
from fedsim.version import __version__

PAGE = "report.html"


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write an HTML report of a run or a comparison, and return the path of the file.

    Args:
        folder: folder of a run or of a comparison. Unfinished runs are shown with the rounds so far.
        out: HTML file to write. An existing file is overwritten. Default: `report.html` in the folder.

    Raises:
        ExperimentError: the name of the report has the ending of a figure, such as .png.
        RecordError: the folder holds no finished round or a damaged file, or the report cannot be written.
        MissingPackageError: plotly or jinja2 is not installed.

    >>> import fedsim, tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "run"
    >>> _ = fedsim.run({"model": "logistic", "engine": "serial", "rounds": 1, "workers": 2}, folder)
    >>> write_report(folder).name
    'report.html'
    """
    folder = user_path(folder)
    path = user_path(out) if out is not None else folder / PAGE
    if path.suffix.lower() in (".pdf", ".png", ".svg"):
        raise ExperimentError(f"out = {show(str(path))}: must end in .html; fedsim plot writes figures")
    html = render(folder)
    # Names may contain lone surrogates, which UTF-8 cannot encode.
    write_atomically(path, html.encode("utf-8", errors="replace"))
    return path


def render(folder: Path) -> str:
    """Return the report of a run or a comparison as HTML text."""
    plotly = import_extra("plotly.offline", extra="report", purpose="a report")
    jinja2 = import_extra("jinja2", extra="report", purpose="a report")
    records = read_records(folder)
    context, charts = run_page(records) if isinstance(records, Run) else comparison_page(records)
    scripts = [plotly.get_plotlyjs(), _asset("page.js")]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedsim.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    safe = environment.filters["safe"]
    return environment.get_template("run.html" if isinstance(records, Run) else "comparison.html").render(
        **context,
        charts=charts,
        version=__version__,
        style=safe(_asset("page.css")),
        scripts=[safe(script) for script in scripts],
        script_hashes=[safe(_content_hash(script)) for script in scripts],
        data=safe(to_script_json({"charts": charts, "templates": TEMPLATES, "config": CONFIG})),
    )


def to_script_json(data: Any) -> str:
    """Return `data` as JSON text that can be used safely inside a <script> element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _content_hash(script: str) -> str:
    """Return the hash by which a Content-Security-Policy allows a script."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"


def _asset(name: str) -> str:
    return (resources.files("fedsim.report") / "assets" / name).read_text(encoding="utf-8")
