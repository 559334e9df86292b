"""No link leads nowhere, on the site or on a code host, which shows Markdown files as they are."""

from __future__ import annotations

import re
from functools import cache

import pytest
from markdown.extensions.toc import slugify

from tests.commands import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*/README.md"))]
FENCED = re.compile(r"^( *)(```+)[^`]*?\n.*?^\1\2$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`]*`")
LINK = re.compile(r"""\]\(<?([^)\s>]+)>?(?:\s+"[^"]*")?\)|\b(?:src|href)="([^"]+)\"""")
HEADING = re.compile(r"^#+ +(.*?)(?:\s+#+)?$", re.MULTILINE)
TARGET = re.compile(r"\]\([^)]*\)")


def links_of(text):
    found = [link or address for link, address in LINK.findall(CODE.sub("", FENCED.sub("", text)))]
    return [link for link in found if not re.match(r"[a-z][a-z+.-]*:|//", link)]


@cache
def anchors_of(path):
    """Return the anchors of a page on GitHub, and those on the site. A second equal heading is not counted."""
    titles = [
        TARGET.sub("]", heading).replace("`", "") for heading in HEADING.findall(FENCED.sub("", path.read_text()))
    ]
    github = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return github, {slugify(title, "-") for title in titles}


def error_of(page, link):
    """Return why a link of a page leads nowhere, or None."""
    address, _, anchor = link.partition("#")
    target = (page.parent / address).resolve() if address else page
    if not target.exists() or not target.is_relative_to(ROOT):
        return f"{link}: there is no such file"
    if not anchor:
        return None
    if target.suffix != ".md":
        return f"{link}: only a Markdown file has anchors"
    for host, anchors in zip(("GitHub", "the site"), anchors_of(target), strict=True):
        if anchor not in anchors:
            return f"{link}: no heading has this anchor on {host}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file_and_a_heading(page):
    assert [error for link in links_of(page.read_text()) if (error := error_of(page, link))] == []


@pytest.mark.parametrize(
    ("link", "error"),
    [
        ("there.md", None),
        ("there.md#two-words-here", None),
        ("there.md#twice", None),
        ("#own", None),
        ("folder", None),
        ("missing.md", "no such file"),
        ("/etc", "no such file"),
        ("there.md#missing", "on GitHub"),
        ("there.md#a--b", "on the site"),
        ("folder#own", "only a Markdown file"),
    ],
)
def test_a_link_that_leads_nowhere_is_an_error(link, error, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "there.md").write_text(
        "# Two `words`, here\n\n```bash\n# comment\n```\n\n## Twice\n\n## Twice\n\n## A & b\n"
    )
    (page := tmp_path / "page.md").write_text(f"# [Own](there.md)\n\nSee [this\nlink]({link}), `[that](code)`.\n")
    assert links_of(page.read_text()) == ["there.md", link]
    found = error_of(page, link)
    assert found is None if error is None else error in found
