"""How the programs `fedsim` and `run_experiment.py` begin.

A module beside the package, so that what has to come before any import of the package comes before it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType


def main() -> None:
    """The console script `fedsim`."""
    with _missing_module_as_line():
        _command_line().main()


def run_main() -> None:
    """The script `run_experiment.py`: `fedsim run` without the word."""
    with _missing_module_as_line():
        _command_line().run_main()


def _command_line() -> ModuleType:
    """The module `fedsim.cli.main`; until a command begins, and after it has ended, Ctrl-C ends the program at once."""
    _open_what_is_closed()
    from fedsim.system.interrupts import install_exit_on_interrupt

    install_exit_on_interrupt()
    from fedsim.cli import main as cli

    return cli


@contextlib.contextmanager
def _missing_module_as_line() -> Iterator[None]:
    """Where a package that fedsim needs is not installed, end the program with one line that names its module."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "fedsim":
            raise
        sys.exit(
            f"error: the Python module {error.name}, which fedsim needs, is not installed; python -m pip install . in "
            "the folder of fedsim installs all that it needs"
        )


def _open_what_is_closed() -> None:
    """Where stdin, stdout or stderr is closed, put nothing in its place.

    Else the next file that is opened takes its number, a run's records for one, and gets what libraries write there.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
