"""The gallery: each experiment has a page, and the stored results belong to the files in experiments/."""

from __future__ import annotations

import importlib
import json
import sys
import tarfile
from pathlib import Path

import pytest

import fedsim

DOCS = Path(__file__).parents[2] / "docs"
sys.path.append(str(DOCS / "hooks"))  # as mkdocs does
gallery = importlib.import_module("gallery")
MANY = 30  # number of runs from which on a check takes seconds

FILE = """# Which rule? Two of them.
# They take a second. Run it with
#   fedsim compare small
name = "small"
rounds = 2
workers = 2
model = "logistic"
engine = "serial"

[local]
steps = 1

[comparison]
"aggregate.rule" = ["mean", "median"]
seed = [0, 1]
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Return the folder of a comparison, the only experiment of the gallery in this test."""
    for name in ("experiments", "gallery"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(gallery, "EXPERIMENTS", tmp_path / "experiments")
    monkeypatch.setattr(gallery, "GALLERY", tmp_path / "gallery")
    gallery.figures.cache_clear()
    path = tmp_path / "experiments" / "small.toml"
    path.write_text(FILE)
    fedsim.compare(path, None, tmp_path / "folder", jobs=1, seed=0)
    yield tmp_path / "folder"
    gallery.figures.cache_clear()


def test_each_experiment_has_a_page_with_a_title_of_its_own():
    assert {path.stem for path in (DOCS / "gallery").glob("*.md")} == {*gallery.names(), "index"}
    titles = {gallery.title(name) for name in gallery.names()}
    assert len(titles) == len(gallery.names())
    assert titles.isdisjoint(gallery.names())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (gallery.about(name)["runs"] > MANY))
        for name in filter(gallery.results, gallery.names())
    ],
)
def test_stored_results_equal_those_of_the_file(name):
    gallery.check(name)
    size = sum(path.stat().st_size for path in gallery.results(name).iterdir())
    assert size <= gallery.MOST_BYTES
    with gallery.unpacked(name) as folder:
        assert len(fedsim.load_comparison(folder).runs) == gallery.about(name)["runs"]


def test_the_page_has_the_question_the_command_the_figure_and_the_table(small):
    gallery.add("small", small, ["seed=0"])
    notes = "# The rule of two\n\nThe notes.\n"
    (gallery.GALLERY / "small.md").write_text(notes)
    page = gallery.filled("small", notes)
    assert page.startswith("# The rule of two\n\n**Which rule? Two of them.**\n\nThey take a second.\n")
    for part in (
        "fedsim compare small seed=0\n",
        "](small.png)",
        "](small.svg)",
        "| aggregate.rule | test accuracy |",
        "\nThe notes.\n",
    ):
        assert part in page
    assert gallery.figures("small")["small.png"].startswith(b"\x89PNG")
    assert (
        "[The rule of two](small.md)<br>Which rule? Two of them. | `fedsim compare small` | 2 runs"
        in gallery.overview()
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps = 1", "steps = 2", "has another local.steps"),
        ('"median"]', '"trimmed_mean"]', "are not those of fedsim compare small seed=0"),
    ],
)
def test_results_of_a_changed_file_are_stale(small, old, new, message):
    gallery.add("small", small, ["seed=0"])
    path = gallery.EXPERIMENTS / "small.toml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(gallery.StaleResultError, match=message):
        gallery.filled("small", "# small\n")


def test_the_archive_has_no_paths_of_the_machine_and_is_the_same_each_time(small):
    gallery.add("small", small, ["seed=0"])
    archive = gallery.results("small") / "records.tar.xz"
    before = archive.read_bytes()
    gallery.add("small", small, ["seed=0"])
    assert archive.read_bytes() == before
    with tarfile.open(archive) as opened:
        texts = {entry.name: opened.extractfile(entry).read().decode() for entry in opened}
    assert {name.rpartition("/")[2] for name in texts} == {"comparison.json", "experiment.toml", "metrics.jsonl"}
    assert not any(str(small.parent) in text for text in texts.values())
    assert json.loads(texts["comparison.json"])["name"] == "small"
