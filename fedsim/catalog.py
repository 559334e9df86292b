"""The experiments that come with fedsim: files that can be named without their folder and suffix."""

from __future__ import annotations

from pathlib import Path

from fedsim.errors import nearest
from fedsim.system.files import is_file
from fedsim.wrapping import hang

WIDTH = 20  # of the column of names
PACKAGE = Path(__file__).parent
FOLDERS = (PACKAGE / "experiments", PACKAGE.parent / "experiments")  # of an installed wheel; of a checkout


def experiments() -> dict[str, Path]:
    """The files of all experiments that come with fedsim, by name, in alphabetical order."""
    folder = next(filter(Path.is_dir, FOLDERS), FOLDERS[0])
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_experiment(source: str | Path) -> Path:
    """The path of an experiment file: `source`, or the experiment of that name if there is no such file."""
    path = Path(source)
    return path if is_file(path) else experiments().get(str(source), path)


def hint(path: Path) -> str:
    """What may have been meant by a file that does not exist."""
    known = experiments()
    if path.stem in known or path.name == path.stem == str(path):
        return f"; {nearest(path.stem, known)}"
    return ""


def list_experiments(columns: int | None = None) -> str:
    """A line for each experiment: its name, the command that runs it, and the first line of its file.

    Lines are broken so as not to need more than so many columns.
    """
    lines = ["experiments (fedsim run NAME, fedsim compare NAME)"]
    for name, path in experiments().items():
        text = path.read_text(encoding="utf-8")
        command = "compare" if "\n[grid]" in text else "run"
        summary = text.partition("\n")[0].removeprefix("# ")
        lines.append(hang(f"  {name:<{WIDTH}} ", f"{command}: {summary}", columns))
    return "\n".join(lines)
