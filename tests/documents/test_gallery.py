"""The gallery: each experiment is on a page, and the stored results belong to the files in experiments/."""

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


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Return the folder of a comparison."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "small.toml").write_text(FILE)
    fedsim.compare(folder / "small.toml", None, folder / "small", jobs=1, seed=0)
    return folder / "small"


@pytest.fixture
def small(compared, tmp_path, monkeypatch):
    """Return the folder of a comparison, the only experiment of the gallery in this test."""
    for name in ("experiments", "gallery"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(gallery, "EXPERIMENTS", tmp_path / "experiments")
    monkeypatch.setattr(gallery, "GALLERY", tmp_path / "gallery")
    (tmp_path / "experiments" / "small.toml").write_text(FILE)
    return compared


def test_each_experiment_is_on_a_page_of_the_gallery():
    assert gallery.pages().keys() == {*gallery.names(), "all", "reproduced"}
    assert {*gallery.pages().values()} == {*gallery.GALLERY.glob("*.md")}


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({*gallery.pages().values()}), ids=lambda path: path.stem)
def test_the_page_shows_the_stored_results(page):
    pictures = {}
    assert gallery.filled(page.read_text(), pictures) == page.read_text(), "python docs/hooks/gallery.py write"
    assert all(page.with_name(picture).is_file() for picture in pictures)


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
    page = gallery.GALLERY / "small.md"
    page.write_text("# The rule of two\n\n<!-- results: small -->\n<!-- end -->\n\nThe notes.\n")
    (gallery.GALLERY / "index.md").write_text("<!-- results: all -->\n<!-- end -->\n")
    for path in (page, page.with_name("index.md")):
        gallery.write(path)
        assert gallery.filled(path.read_text(), {}) == path.read_text()
    text, index = page.read_text(), page.with_name("index.md").read_text()
    assert text.startswith(
        "# The rule of two\n\n<!-- results: small -->\n\n**Which rule? Two of them.** They take a second.\n"
    )
    assert text.endswith("<!-- end -->\n\nThe notes.\n")
    for part in (
        "fedsim compare small seed=0\n",
        "](small.png)\n\n*Test accuracy",
        "| aggregate.rule | test accuracy |",
    ):
        assert part in text
    assert page.with_name("small.png").read_bytes().startswith(b"\x89PNG")
    assert "[Which rule? Two of them.](small.md) | `fedsim compare small` | 2 runs" in index


def test_the_table_of_reproduced_results_shows_published_numbers_beside_stored_ones(small):
    file = gallery.EXPERIMENTS / "reproduced" / "small.toml"
    file.parent.mkdir()
    (gallery.EXPERIMENTS / "small.toml").rename(file)
    gallery.add("reproduced/small", small, ["seed=0"])
    path = gallery.results("reproduced/small") / "about.json"
    numbers = [
        {"of": "mean", "published": "0.9", "at": ["mean"]},
        {"of": "median", "published": "2 rounds", "at": ["median"], "column": "to_target", "target": 0.01},
        {"of": "difference", "published": "0", "here": "by hand"},
    ]
    published = {"source": "A paper", "setting": "two rules", "numbers": numbers, "agreement": "They agree."}
    path.write_text(json.dumps(gallery.about("reproduced/small") | {"published": published}))
    page = gallery.GALLERY / "reproduced.md"
    page.write_text("<!-- results: reproduced -->\n<!-- end -->\n")
    gallery.write(page)
    assert gallery.pages() == {"reproduced": page, "reproduced/small": page}
    accuracy = fedsim.load_comparison(small).rows[0].score.mean
    cells = (
        "A paper: two rules<br>`fedsim compare reproduced/small seed=0`",
        "mean: 0.9<br>median: 2 rounds<br>difference: 0",
        f"mean: {accuracy:.4f}<br>median: 1.00<br>difference: by hand",
        "They agree.",
    )
    assert f"| {' | '.join(cells)} | " in page.read_text()


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
        gallery.section("small", {})


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
