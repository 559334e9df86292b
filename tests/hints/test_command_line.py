"""Typical beginners' mistakes on the command line and in files, and the one-line error for each (`mistakes.toml`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.toml import tomllib

ALLOWED = "allowed: "
QUICK = ["engine=serial", "model=logistic", "data=tests.components:tiny", "rounds=1"]
MISTAKES = tomllib.loads(Path(__file__).with_name("mistakes.toml").read_text())


def each_of(table):
    """Parametrize a test with the wrong inputs of a table, and the hints in the error line that answers each."""
    hints = {wrong: [hint] if isinstance(hint, str) else hint for wrong, hint in MISTAKES[table].items()}
    return pytest.mark.parametrize(("wrong", "hints"), hints.items(), ids=[wrong[:40] for wrong in hints])


def assert_answered(done, hints):
    """Assert that a program has ended with one error line that contains the hints. Returns the line."""
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert all(hint in line for hint in hints), line
    return line


@each_of("run")
def test_a_mistake_in_a_run_is_one_line_that_helps(cli, wrong, hints):
    line = assert_answered(cli("run", *wrong.split(), "--dry-run"), hints)
    assert ALLOWED in hints[0] or ALLOWED not in line, "the allowed values are listed only if there is no better hint"


@each_of("files")
def test_a_mistake_in_a_file_is_one_line_that_helps(cli, tmp_path, wrong, hints):
    (tmp_path / "mine.toml").write_text(wrong)
    assert assert_answered(cli("run", "mine.toml", "--dry-run"), hints).startswith("error: mine.toml: ")


@each_of("compare")
def test_a_mistake_in_what_to_compare_is_one_line_that_helps(cli, wrong, hints):
    assert_answered(cli("compare", *wrong.split(), "--dry-run"), hints)


@each_of("fedsim")
def test_a_mistake_in_a_command_is_one_line_that_helps(cli, wrong, hints):
    assert_answered(cli(*wrong.split()), hints)


@each_of("folders")
def test_a_mistake_in_a_folder_is_one_line_that_helps(cli, tmp_path, wrong, hints):
    (tmp_path / "afile").write_text("")
    assert_answered(cli("run", *QUICK, *wrong.split()), hints)
