"""The line in the terminal while a command prints nothing else, and that it is erased."""

from __future__ import annotations

import re
import warnings

import pytest

from fedsim.cli import commands
from fedsim.core.status_line import ERASE, status_line, with_status_line
from fedsim.errors import SettingWarning, show_warnings_as_lines
from tests.callbacks.test_display import watched
from tests.report.folders import invent_run


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (lambda folder: commands.report(folder), "writing the report"),
        (lambda folder: commands.plot([str(folder)], out=folder / "x.png"), "drawing the figure"),
        (lambda folder: commands.list_command(["rules"]), "importing the components"),
    ],
)
def test_a_command_shows_and_erases_its_line(command, text, monkeypatch, tmp_path, capsys):
    folder, terminal = invent_run(tmp_path / "run", [0.5, 0.6]), watched(monkeypatch)
    command(folder)
    assert terminal.getvalue() == f"{text}\r{ERASE}"
    assert capsys.readouterr().out


def test_the_line_is_erased_before_an_error_and_between_items(monkeypatch):
    terminal = watched(monkeypatch)
    with pytest.raises(ZeroDivisionError), status_line("dividing"):
        raise ZeroDivisionError
    for item in with_status_line("counting", range(2)):
        print(item, file=terminal)
    assert terminal.getvalue() == f"dividing\r{ERASE}counting\r{ERASE}0\ncounting\r{ERASE}1\ncounting\r{ERASE}"


def test_a_warning_takes_the_place_of_the_line(monkeypatch):
    terminal = watched(monkeypatch)
    with warnings.catch_warnings(), status_line("checking something that takes long"):
        warnings.simplefilter("default")
        show_warnings_as_lines()
        warnings.warn("short", SettingWarning, stacklevel=1)
    assert re.search(r"long\r\x1b\[Kwarning: short\n", terminal.getvalue())


def test_without_a_terminal_nothing_is_written(capsys):
    with status_line("waiting"):
        pass
    assert capsys.readouterr().err == ""
