from __future__ import annotations

import os
import sys
from functools import partial

import pytest

import fedsim
from fedsim.callbacks import painter
from fedsim.callbacks.painter import Painter
from fedsim.data import sources

pytestmark = pytest.mark.usefixtures("pictures")


@pytest.fixture
def own_process(monkeypatch):
    """Let the next painter start a process, as in a program that has not imported matplotlib."""
    monkeypatch.setattr(Painter, "came_before", False)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)


def note(path):
    path.write_text(f"{os.getpid()} {os.getpriority(os.PRIO_PROCESS, 0)}")


def test_the_drawing_process_has_the_priority_of_the_run(own_process, tmp_path):
    with Painter(["png"]) as drawing:
        assert drawing.files({"curve": partial(note, tmp_path / "note")}) == {}
    process, priority = (tmp_path / "note").read_text().split()
    assert process != str(os.getpid())
    assert int(priority) == os.getpriority(os.PRIO_PROCESS, 0)


def note_loaded_data(path):
    path.write_text(str(len(sources._loaded.get().data)))


def test_the_drawing_process_frees_its_copy_of_the_data(own_process, tmp_path):
    with sources.data_loaded_once():
        sources.load_dataset_once("mnist5k", None, {})
        with Painter(["png"]) as drawing:
            drawing.files({"curve": partial(note_loaded_data, tmp_path / "note")})
        note_loaded_data(tmp_path / "here")
    assert [(tmp_path / name).read_text() for name in ("note", "here")] == ["0", "1"]


@pytest.mark.parametrize(
    "records", [{"figures": []}, {"curve": False}, {}], ids=["no formats", "no curve", "with a figure"]
)
def test_a_process_starts_only_if_a_figure_is_drawn_and_a_line_says_why_the_run_waits(
    records, own_process, tiny_experiment, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(painter, "PATIENCE", 0.0)
    fedsim.run({**tiny_experiment, "rounds": 1, "records": records}, tmp_path / "run", progress=True)
    assert Painter.came_before == (not records)
    assert ("drawing the figures ..." in capsys.readouterr().out) == (not records)
    assert (tmp_path / "run" / "curve.png").exists() == (not records)
