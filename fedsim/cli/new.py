"""The command `fedsim new`: copy the folder `project_template`, which is a working project, under another name."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedsim.cli.program import errors_as_lines
from fedsim.errors import ExperimentError, show

TEMPLATE_NAME = "my_project"
PACKAGE = Path(__file__).parent.parent
FOLDERS = (PACKAGE / "project_template", PACKAGE.parent / "project_template")  # of an installed wheel; of a checkout


def new(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="Name of the folder, and of the Python module in it.")],
) -> None:
    """Make a folder with an experiment, plugs of your own, their tests, and a README that explains them."""
    with errors_as_lines(quick=True):
        folder = make_project(name)
        print("\n".join(str(folder / path.name) for path in sorted(folder.iterdir())))
        print(f"next: cd {folder} && fedsim run experiment.toml")


def make_project(path: Path) -> Path:
    """Make the folder of a new project, and return it: `path`, with a last part that is the name of a Python module.

    Raises ExperimentError if there is such a file or folder, or if the name cannot be that of a module.
    """
    name = re.sub(r"[\s.-]", "_", path.name)
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ExperimentError(
            f"{show(path.name)}: is no name of a Python module; use letters, digits and _, as in my_study"
        )
    folder = path.with_name(name)
    if folder.exists():
        raise ExperimentError(f"{folder}: exists already; choose another name")
    if name != TEMPLATE_NAME and (name in sys.modules or importlib.util.find_spec(name)):
        raise ExperimentError(f"{show(name)}: is the name of an installed Python module; choose another name")
    folder.mkdir(parents=True)
    for file in next(filter(Path.is_dir, FOLDERS)).glob("*.*"):
        text = file.read_text(encoding="utf-8").replace(TEMPLATE_NAME, name)
        (folder / file.name.replace(TEMPLATE_NAME, name)).write_text(text, encoding="utf-8")
    return folder
