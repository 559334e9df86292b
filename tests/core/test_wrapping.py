from __future__ import annotations

import pytest

from fedsim.config.components import COMPONENTS, list_components
from fedsim.core import text_wrapping
from fedsim.core.text_wrapping import hang, note, terminal_columns


def test_brackets_stay_with_the_word_before_them():
    assert hang("head: ", "1 (0.25), 2 (0.5), 3 (0.25)", 26) == "head: 1 (0.25), 2 (0.5),\n      3 (0.25)"


def test_a_note_fits_into_80_columns():
    lines = note("word " * 40).splitlines()
    assert max(map(len, lines)) < 80
    assert [line.startswith("  ") for line in lines] == [False, *[True] * (len(lines) - 1)]


@pytest.mark.parametrize(("watched", "columns"), [(True, 123), (False, None)])
def test_only_a_terminal_has_a_width(monkeypatch, watched, columns):
    monkeypatch.setenv("COLUMNS", "123")
    monkeypatch.setattr(text_wrapping.sys.stdout, "isatty", lambda: watched, raising=False)
    assert terminal_columns() == columns


def test_the_list_of_components_fits_into_a_terminal():
    whole, narrow = list_components(COMPONENTS), list_components(COMPONENTS, 80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert narrow.split() == whole.split()
