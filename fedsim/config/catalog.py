"""The experiments that come with fedsim: files that can be named without folder and suffix."""

from __future__ import annotations

from pathlib import Path

from fedsim.core.suggestions import has_words, nearest
from fedsim.core.text_wrapping import hang
from fedsim.system.files import is_file

NAME_COLUMNS = 20
PACKAGE = Path(__file__).parent.parent
FOLDERS = (PACKAGE / "experiments", PACKAGE.parent / "experiments")  # of an installed wheel; of a checkout


def experiments() -> dict[str, Path]:
    """The files of all experiments that come with fedsim, by name, in alphabetical order."""
    folder = next(filter(Path.is_dir, FOLDERS), FOLDERS[0])
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_experiment(source: str | Path) -> Path:
    """The path of an experiment file: `source` if there is such a file, else the experiment of that name."""
    path = Path(source)
    return path if is_file(path) else experiments().get(str(source), path)


def hint(path: Path) -> str:
    """The hint for a file that does not exist: the nearest name of an experiment."""
    known = experiments()
    if path.stem in known or path.name == path.stem == str(path):
        return f"; {nearest(path.stem, known)}"
    return ""


def list_experiments(columns: int | None = None, search: str = "") -> str:
    """For each experiment its name, the command that runs it and the first line of its file, wrapped to `columns`.

    Only those that have all words of `search` in their name or file; "" if there are none.
    """
    lines = ["experiments (fedsim run NAME, fedsim compare NAME)"]
    for name, path in experiments().items():
        text = path.read_text(encoding="utf-8")
        if not has_words(search, name, text):
            continue
        command = "compare" if "\n[grid]" in text else "run"
        summary = text.partition("\n")[0].removeprefix("# ")
        lines.append(hang(f"  {name:<{NAME_COLUMNS}} ", f"{command}: {summary}", columns))
    return "\n".join(lines) if len(lines) > 1 else ""
