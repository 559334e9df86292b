"""How the programs `fedsim` and `run_experiment.py` begin.

A module beside the package, because importing the package takes a second or more, and Ctrl-C has to end a program as
quietly then as later on.
"""

from __future__ import annotations

import os
import signal
from types import ModuleType


def main() -> None:
    """The console script `fedsim`."""
    _command_line().main()


def run_main() -> None:
    """The script `run_experiment.py`: `fedsim run` without the word."""
    _command_line().run_main()


def _command_line() -> ModuleType:
    """The module `fedsim.cli`; Ctrl-C while it is imported ends the program, as nothing has begun yet."""
    _open_what_is_closed()
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler:  # somebody else looks after it, or nobody shall
        from fedsim import cli

        return cli
    signal.signal(signal.SIGINT, _end)
    try:
        from fedsim import cli
    finally:
        signal.signal(signal.SIGINT, handler)
    return cli


def _open_what_is_closed() -> None:
    """Where stdin, stdout or stderr is closed, put nothing in its place.

    Else the next file that is opened takes its number, a run's records for one, and gets what libraries write there.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one


def _end(*_: object) -> None:
    """At once: an exception might be caught, or become another one, by whatever is being imported."""
    os.write(2, b"interrupted\n")
    os._exit(130)
