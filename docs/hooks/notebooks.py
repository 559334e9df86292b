"""mkdocs hook: add a page for each notebook in docs/notebooks, with its outputs at the time of the build.

FEDSIM_DOCS_RUN=no builds the pages without running the notebooks. Outputs are cached in the same way as in blocks.py.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import blocks

NOTEBOOKS = blocks.ROOT / "docs" / "notebooks"
MOST_SECONDS = 600  # time limit of a cell

log = logging.getLogger("mkdocs.hooks.notebooks")


def executed(path: Path) -> dict[str, Any]:
    """Return a notebook with its outputs, cached while neither the notebook nor fedsim changes.

    Raises nbclient's CellExecutionError if a cell fails.
    """
    import nbclient
    import nbformat

    digest = hashlib.sha256(blocks.code_digest().encode() + path.read_bytes()).hexdigest()[:24]
    stored = blocks.CACHE / f"{digest}.ipynb"
    if not stored.is_file():
        with tempfile.TemporaryDirectory() as folder:
            book = nbformat.read(path, 4)
            nbclient.NotebookClient(book, timeout=MOST_SECONDS, resources={"metadata": {"path": folder}}).execute()
        stored.parent.mkdir(parents=True, exist_ok=True)
        stored.write_text(nbformat.writes(book), encoding="utf-8")
    return json.loads(stored.read_text(encoding="utf-8"))


def page_of(book: dict[str, Any], name: str) -> str:
    """Return the notebook as Markdown, with its outputs as HTML."""
    parts = []
    for cell in book["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text.replace(".ipynb)", ".md)"))
        else:
            parts += [f"```python\n{text}\n```", *map(_output, cell["outputs"])]
    title, *rest = parts
    return "\n\n".join([title, f"[The notebook]({name}.ipynb)", *filter(None, rest)])


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "text/html" in data:
        return f'<div class="result">\n{"".join(data["text/html"])}\n</div>'
    text = "".join(data.get("text/plain", output.get("text", "") if output.get("name") == "stdout" else ""))
    return f'<div class="result" markdown>\n\n```text\n{text.rstrip()}\n```\n\n</div>' if text.strip() else ""


def on_files(files: Any, config: Any) -> None:
    """mkdocs hook: add the pages. A failed cell is a warning, so that `--strict` fails."""
    from mkdocs.structure.files import File

    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        book = json.loads(path.read_text(encoding="utf-8"))
        if os.environ.get("FEDSIM_DOCS_RUN") != "no":
            try:
                book = executed(path)
            except Exception as error:
                log.warning("%s: %s", path.name, error)
        page = File.generated(config, f"notebooks/{path.stem}.md", content=page_of(book, path.stem))
        files.append(page)
