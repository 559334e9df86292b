"""Entry points: `python -m fedsim`, the console script `fedsim`, and `run_experiment.py`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the program `fedsim`."""
    _start("main")


def run_main() -> None:
    """Run the script `run_experiment.py`, which does the same as `fedsim run`."""
    _start("run_main")


def _start(entry_point: str) -> None:
    """Call a function of `fedsim.cli.main`. A missing package is one line, and Ctrl-C ends the program at once."""
    _open_closed_streams()
    try:
        from fedsim.system.interrupts import install_exit_on_interrupt

        install_exit_on_interrupt()  # before the imports that take seconds
        from fedsim.cli import main as cli

        getattr(cli, entry_point)()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "fedsim":
            raise
        sys.exit(
            f"error: the Python module {error.name}, which fedsim needs, is not installed; python -m pip install . in "
            "the folder of fedsim installs all that it needs"
        )


def _open_closed_streams() -> None:
    """Open the null device for closed standard streams (`>&-`): otherwise the next file would get their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


if __name__ == "__main__":
    main()
