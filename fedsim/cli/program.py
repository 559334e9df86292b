"""The program around a command: errors as lines on stderr, exit codes, and a stdout that cannot be written."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from fedsim.core.notices import notice_if_slow
from fedsim.errors import FedsimError, WorkerError, printable, warnings_as_lines
from fedsim.system.interrupts import Terminated, exit_on_interrupt, signals_as_exceptions
from fedsim.system.limits import describe_os_error

if TYPE_CHECKING:
    from fedsim.engines.distributed.process_group import RankGroup

BAD_INPUT, FAILED, INTERRUPTED, TERMINATED = 2, 1, 130, 143  # exit codes


@contextlib.contextmanager
def errors_as_lines() -> Iterator[None]:
    """Import the library, run the block, and turn errors into lines on stderr and an exit code."""
    try:
        with warnings_as_lines():
            with exit_on_interrupt(), notice_if_slow("importing PyTorch"):
                import fedsim.api  # noqa: F401  # here, so that `--help` and `--version` answer at once
            with signals_as_exceptions():
                yield
    except FedsimError as error:
        is_worker_error = isinstance(error, WorkerError)
        for line in [str(error)] if is_worker_error else str(error).splitlines():  # the former has a traceback
            print(f"error: {_printable_lines(line)}", file=sys.stderr)
        raise typer.Exit(FAILED if is_worker_error else BAD_INPUT) from None
    except (OSError, MemoryError, RuntimeError) as error:
        line = describe_os_error(error)
        if line is None or (isinstance(sys.stdout, Output) and sys.stdout.failure is not None):  # see run_program
            raise
        print(f"error: {line}", file=sys.stderr)
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except Terminated:
        print("terminated", file=sys.stderr)
        raise typer.Exit(TERMINATED) from None


def _printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def run_program(program: typer.Typer) -> None:
    """Run a program to its exit. A stdout that cannot be written gives one line on stderr; a closed pipe gives none."""
    if sys.stderr is None:  # closed, as by `2>&-`
        sys.stderr = io.TextIOWrapper(io.FileIO(os.devnull, "w"))
    if sys.stdout is None:  # closed, as by `>&-`
        return _run_to_exit(program)
    out = sys.stdout = Output(
        sys.stdout.buffer,
        sys.stdout.encoding,
        "backslashreplace" if sys.stdout.errors == "strict" else sys.stdout.errors,  # as for stderr
        line_buffering=sys.stdout.line_buffering,
        write_through=sys.stdout.write_through,
    )
    try:
        _run_to_exit(program)
    finally:
        with contextlib.suppress(OSError):
            out.flush()
        if out.failure is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # otherwise Python reports the error again at exit
            if not isinstance(out.failure, BrokenPipeError):
                print(f"error: standard output cannot be written: {out.failure.strerror}", file=sys.stderr)
            sys.exit(FAILED)


def _run_to_exit(program: typer.Typer) -> None:
    """Run a program; if it fails as one of several ranks, end the rank at once."""
    try:
        program()
    except SystemExit as leaving:
        if leaving.code and (ranks := _joined_ranks()) is not None:
            sys.stdout.flush()
            ranks.end_program(leaving.code if isinstance(leaving.code, int) else FAILED)
        raise


def _joined_ranks() -> RankGroup | None:
    """The rank group that this process has joined, found without importing PyTorch."""
    module = sys.modules.get("fedsim.engines.distributed.process_group")
    return None if module is None else module.RankGroup.joined


class Output(io.TextIOWrapper):
    """A stdout that stores why it could not be written."""

    failure: OSError | None = None

    def write(self, text: str) -> int:
        with self._failure_stored():
            return super().write(text)

    def flush(self) -> None:
        with self._failure_stored():
            super().flush()

    @contextlib.contextmanager
    def _failure_stored(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = error
            raise
