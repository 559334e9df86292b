"""The command `fedsim doctor`."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import typer

from fedsim.cli.program import FAILED, errors_as_lines
from fedsim.core.text_wrapping import hang, terminal_columns
from fedsim.errors import one_line
from fedsim.system.packages import EXTRAS
from fedsim.version import __version__

COLUMNS = 16


def doctor() -> None:
    """Show what fedsim finds on this machine, what each engine would do here, and problems with what to do."""
    with errors_as_lines(quick=True):
        problems, fatal = list[tuple[str, str]](), False
        for about, found in _versions():
            _print(about, found)
        try:
            from fedsim.runs.checkup import findings

            print("", flush=True)
            for finding in findings():
                _print(finding.about, finding.found)
                problems += finding.problems
                fatal |= finding.fatal
        except (ImportError, OSError) as error:  # a library of PyTorch is missing, for example
            problems.append((f"fedsim cannot be imported: {one_line(error)}", "install PyTorch and fedsim again"))
            fatal = True
        print()
        for problem, do in problems:
            print(f"problem: {problem}\n     do: {do}")
        if not problems:
            print("no problems found")
        if fatal:
            raise typer.Exit(FAILED)


def _print(about: str, found: str) -> None:
    print(hang(f"{about:<{COLUMNS}}", found, terminal_columns()), flush=True)


def _versions() -> Iterator[tuple[str, str]]:
    """The versions of what fedsim needs and may use, found without an import."""
    yield "fedsim", f"{__version__}, on Python {platform.python_version()}, {platform.platform(terse=True)}"
    yield "packages", ", ".join(f"{name} {_version(name) or 'missing'}" for name in ("torch", "torchvision", "numpy"))
    for missing, about in ((False, "extras"), (True, "not installed")):
        extras = [name for name, packages in EXTRAS.items() if missing != all(map(_version, packages))]
        how = ": pip install 'fedsim-sgd[NAME]'" if missing else ""
        if extras:
            yield about, ", ".join(extras) + how


def _version(package: str) -> str | None:
    from importlib import metadata  # here, so that `fedsim --help` is fast

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
