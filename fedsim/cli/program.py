"""Run a command as a program: print errors as lines on stderr, and set the exit code."""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import importlib
import io
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import typer

from fedsim.core.status_line import status_line
from fedsim.errors import FedsimError, WorkerError, printable, show_warnings_as_lines
from fedsim.system.interrupts import Terminated, signals_as_exceptions
from fedsim.system.limits import describe_os_error, format_failure, frames_of_user

if TYPE_CHECKING:
    from fedsim.processes.process_group import RankGroup

BAD_INPUT, FAILED, INTERRUPTED, TERMINATED = 2, 1, 130, 143  # exit codes


@contextlib.contextmanager
def errors_as_lines(module: str | None = None) -> Iterator[None]:
    """Context manager that shows exceptions as error messages, and sets the exit code.

    `module`: name of the module that does the work, which is imported first. Without a module, a signal such as Ctrl-C
    may end the program at once, because there is nothing to clean up.
    """
    try:
        with warnings.catch_warnings(), contextlib.ExitStack() as stack:
            show_warnings_as_lines()
            if module is not None:
                _import(module)
                stack.enter_context(signals_as_exceptions())
            yield
    except FedsimError as error:
        is_worker_error = isinstance(error, WorkerError)
        for line in [str(error)] if is_worker_error else str(error).splitlines():  # a WorkerError includes a traceback
            _print_error(line)
        raise typer.Exit(FAILED if is_worker_error else BAD_INPUT) from None
    except BrokenPipeError:
        raise  # typer ends the program without a message
    except Exception as error:
        described = describe_os_error(error) or (format_failure(error) if frames_of_user(error) else None)
        if described is None:
            raise
        _print_error(described)
        too_long = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
        raise typer.Exit(BAD_INPUT if too_long else FAILED) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except Terminated:
        print("terminated", file=sys.stderr)
        raise typer.Exit(TERMINATED) from None


def _import(module: str) -> None:
    """Import a module that needs PyTorch, and show a message in the terminal during the import."""
    with status_line("importing PyTorch") if "torch" not in sys.modules else contextlib.nullcontext():
        gc.disable()  # otherwise the garbage collector takes a fifth of the import time
        importlib.import_module(module)
        from fedsim.config.experiment import Experiment  # imported here to keep `--help` fast

        Experiment.model_rebuild()
        gc.freeze()
        gc.enable()


def _print_error(text: str) -> None:
    lines = map(printable, text.split("\n"))  # the text may come from a file of an unknown author
    print("error: " + "\n".join(lines), file=sys.stderr)


def run_program(program: typer.Typer) -> None:
    """Run a program and exit. `~` at the start of a path is the home folder, also in `--out=~/x`, unlike in a shell."""
    for index, word in enumerate(sys.argv[1:], 1):
        start = word.find("=") + 1 if word.startswith("--") else 0
        sys.argv[index] = word[:start] + os.path.expanduser(word[start:])
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as for stderr
    try:
        program()
    except OSError as error:  # error while typer prints, for example --help
        described = describe_os_error(error)
        if described is None:
            raise
        _print_error(described)
        _discard_stdout()
        sys.exit(FAILED)
    except SystemExit as leaving:
        code = _flush_stdout(int(leaving.code or 0))
        if code and (ranks := _joined_ranks()) is not None:
            ranks.leave(code)
        _exit(code)


def _exit(code: int) -> NoReturn:
    """Exit at once, without the slow cleanup of PyTorch's modules."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for non-daemon threads
    atexit._run_exitfuncs()
    code = _flush_stdout(code)
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code)


def _flush_stdout(code: int) -> int:
    """Write all pending output, and return the exit code: `code`, or FAILED if writing fails."""
    try:
        sys.stdout.flush()
    except OSError as error:
        _discard_stdout()
        if not code and not isinstance(error, BrokenPipeError):
            _print_error(f"standard output cannot be written: {error.strerror}")
        return code or FAILED
    return code


def _discard_stdout() -> None:
    """Discard all further output, so that Python does not fail when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _joined_ranks() -> RankGroup | None:
    """Return the group of ranks (processes that train together) to which this process belongs, or None."""
    module = sys.modules.get("fedsim.processes.process_group")
    return None if module is None else module.RankGroup.joined
