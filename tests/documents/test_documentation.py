"""Documentation pages: their code blocks run, and the site is built without warnings and fetches nothing."""

from __future__ import annotations

import functools
import importlib
import os
import re
import shutil
import subprocess
import sys
import venv
from importlib.util import find_spec
from pkgutil import resolve_name

import pytest
import torch

from tests.commands import ROOT
from tests.declared import ABSENT, PROJECT, distributions_of, modules_besides, requirements
from tests.forking import Program
from tests.test_structure import FLOORS

DOCS = ROOT / "docs"
FETCHED = re.compile(
    r"""<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=["']?(?:https?:)?//|@import|url\(["']?(?:https?:)?//"""
)

sys.path.append(str(DOCS / "hooks"))  # as mkdocs does
blocks = importlib.import_module("blocks")
word_counts = importlib.import_module("count_words").counts
PAGES = blocks.pages()
MOST_WORDS, MOST_HOW_TO_PAGES = 22_000, 35
MOST_GALLERY_WORDS = 250  # of a page, which also has at most one table
TABLE = re.compile(r"^ *\|(?: *:?-+:? *\|)+ *$", re.MULTILINE)  # the line below the headings
MOST_BYTES = 60_000  # of a picture


@functools.cache
def as_installed():
    """Return the beginning of a program that has the packages of the extra `test`, and those that blocks need."""
    needed = {name for text in PAGES.values() for block in blocks.blocks_of(text) for name in block.packages}
    others = modules_besides(distributions_of(f"{PROJECT['name']}[test]", requirements())) - needed
    return ABSENT.format(names=others)


def run_forked(words, folder, environment):
    """Run `python *words` with the packages of the extra `test` and those that blocks name in `needs`.

    The process is the fork of a process that has imported fedsim, which saves two seconds per page.
    """
    code = f"{as_installed()}import runpy\ndel sys.argv[0]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    program = Program(["-c", code, *words], cwd=folder, environment=environment)
    _, error = program.communicate(timeout=blocks.MOST_SECONDS)
    return program.returncode, error


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (blocks.SLOW in text)) for page, text in PAGES.items()]
)
def test_the_blocks_of_the_page_print_the_outputs_below_them(page, tmp_path):
    results = blocks.run(PAGES[page], tmp_path, run_forked)
    assert blocks.error_of(PAGES[page], results, tmp_path) is None
    here, by_rounding = torch.backends.cpu.get_cpu_capability(), []
    for block, result in zip(blocks.blocks_of(PAGES[page]), results, strict=True):
        if block.action and "output" in block.attributes:
            new = blocks.difference(block.output, result["output"])
            if new and here != blocks.CPU and blocks.SLOW in PAGES[page]:  # of long training, which amplifies rounding
                by_rounding.append(f"{block.line}: {new}")
            else:
                assert new is None, f"{block.line}: {new}\npython docs/hooks/blocks.py {page}"
        if block.action and "picture" in block.attributes:
            assert (ROOT / page).with_name(block.address).is_file()
    if by_rounding:
        pytest.skip(f"{here} rounds differently than {blocks.CPU}, with which pages are written: {by_rounding}")
    if missing := blocks.missing_packages(PAGES[page]):
        pytest.skip(f"skipped only the blocks that need {', '.join(missing)}")


def test_pages_are_few_and_short_and_pictures_small():
    texts = {path.relative_to(DOCS).as_posix(): path.read_text() for path in DOCS.rglob("*.md")}
    assert [page for page, text in texts.items() if text.startswith("---")] == [], "a code host shows front matter"
    assert sum(word_counts().values()) <= MOST_WORDS, "python docs/hooks/count_words.py"
    assert len([page for page in texts if page.startswith("how-to/")]) <= MOST_HOW_TO_PAGES
    pictures = list(DOCS.rglob("*.png"))
    assert [path.name for path in pictures if path.stat().st_size > MOST_BYTES] == []
    assert [path.name for path in pictures if not any(path.name in text for text in texts.values())] == []


def test_pages_of_the_gallery_have_few_words_and_one_table():
    counts = {path: count for path, count in word_counts().items() if path.parent.name == "gallery"}
    assert {path.name: count for path, count in counts.items() if count > MOST_GALLERY_WORDS} == {}
    assert {path.name for path in counts if len(TABLE.findall(path.read_text())) > 1} == set()


def test_every_page_is_in_the_navigation_once(monkeypatch):
    """Here and on the site, mkdocs itself reads `mkdocs.yml` and lets the hooks add the generated pages."""
    pytest.importorskip("mkdocs", reason="needs mkdocs: pip install -e '.[docs]'")
    from mkdocs.config import load_config
    from mkdocs.structure.files import get_files, set_exclusions
    from mkdocs.structure.nav import Link, get_navigation

    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    config = load_config(str(ROOT / "mkdocs.yml"))
    files = config.plugins.on_files(get_files(config), config=config)
    set_exclusions(files, config)
    navigation = get_navigation(files, config)

    def links(items):
        for item in items:
            yield from links(item.children or ())
            if isinstance(item, Link):
                yield item.url

    assert list(links(navigation.items)) == [], "not a page, for example because of the indentation in mkdocs.yml"
    pages = [file.src_uri for file in files.documentation_pages()]
    assert sorted(page.file.src_uri for page in navigation.pages) == sorted(pages)
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert written <= set(pages)


def test_the_page_on_the_architecture_shows_the_packages_in_order_and_names_functions_that_exist():
    page = (DOCS / "explanation" / "architecture.md").read_text()
    picture = next(block.code for block in blocks.blocks_of(page) if block.language == "text")
    floor_of = {package: floor for floor, packages in enumerate(FLOORS) for package in packages}
    lines = [re.split(r" {2,}", line)[0].split(", ") for line in picture.splitlines()]
    floors = [[floor_of[package] for package in packages] for packages in lines]
    in_order = [floor for line in floors for floor in line]
    assert in_order == sorted(in_order, reverse=True)
    assert {package for packages in lines for package in packages} == set(floor_of)
    names = re.findall(r"`(fedsim(?:\.\w+)+)`", page)
    assert len(names) > 50
    for name in names:
        resolve_name(name)


def test_quoted_experiments_equal_those_of_the_files():
    experiments = [path.read_text() for path in (ROOT / "experiments").rglob("*.toml")]
    texts = [path.read_text() for path in DOCS.rglob("*.md")]
    quoted = [
        block.code
        for text in texts
        for block in blocks.blocks_of(text)
        if block.language == "toml" and not block.action
    ]
    assert quoted
    for code in quoted:
        assert any(code in experiment for experiment in experiments), code


PAGE = """
```python title="my_rules.py"
FACTOR = 2
```

- in a list:
    ```python output="yes"
    from my_rules import FACTOR
    print("it is", FACTOR)
    ```

```bash output="yes"
cat my_rules.py | wc -l
```

```python picture="figures/made.png"
import pathlib
pathlib.Path("figures").mkdir()
pathlib.Path("figures/made.png").write_bytes(b"")
print(FACTOR)
```

```python run="no: needs a GPU"
1 / 0
```

```python needs="os no_such_package"
1 / 0
```

```text
not run
```
"""


def test_blocks_run_in_order_in_one_namespace_and_folder(tmp_path):
    results = blocks.run(PAGE, tmp_path)
    assert blocks.error_of(PAGE, results, tmp_path) is None
    assert [result["output"] for result in results] == ["", "it is 2\n", "1\n", "2\n", "", "", ""]
    assert blocks.missing_packages(PAGE) == ["no_such_package"]


def test_outputs_and_pictures_are_written_below_their_blocks(tmp_path):
    results = blocks.run(PAGE, tmp_path)
    page, pictures = blocks.written(PAGE, results, "page")
    assert "    ```\n\n    ```text\n    it is 2\n    ```\n" in page
    assert pictures == {"page-figures-made.png": "figures/made.png"}
    assert "![made](page-figures-made.png)" in page
    assert page.count("```text") == 3
    assert blocks.written(page, results, "page") == (page, pictures), "what is up to date does not change"
    outdated = page.replace("it is 2", "it was 3").replace("![made]", "![A caption]")
    assert blocks.written(outdated, results, "page")[0] == page.replace("![made]", "![A caption]")
    site = blocks.on_page_markdown(page, None, None, None)
    assert '    <div class="result" markdown>\n\n    ```text\n    it is 2\n    ```\n\n    </div>' in site
    assert '```python title="my_rules.py"\n' in site
    assert not re.search(r"output=|picture=|needs=|run=", site)


ROUNDS = """net: 4 workers; spawn, 2 forked processes on cpu
round  accuracy  train s
    1    0.7390    0.228
    2    0.8380    0.301
    3    0.9100    0.222
final accuracy 0.9100 in 2.3 s
runs/net-20261122-094400
"""


@pytest.mark.parametrize(
    ("old", "new", "equal"),
    [
        ("spawn, 2 forked processes", "serial", True),
        ("0.8380    0.301", "0.8390   12.301", True),
        ("2.3 s\nruns/net-20261122-094400", "14.0 s\nruns/net-20271122-101112", True),
        ("    1    0.7390    0.228\n    2    0.8380    0.301\n", "...\n", True),
        ("    1    0.7390    0.228\n", "...\n", True),
        ("0.8380", "0.7380", False),
        ("0.8380", "1", False),
        ("    2    0.8380    0.301\n", "", False),
        ("round", "rounds", False),
        ("4 workers", "5 workers", False),
    ],
)
def test_outputs_are_equal_up_to_times_names_and_rounding(old, new, equal):
    assert (blocks.difference(ROUNDS.replace(old, new), ROUNDS) is None) == equal


def test_an_outdated_output_stays_shortened():
    stored = ROUNDS.replace("    1    0.7390    0.228\n    2    0.8380    0.301\n", "    ...\n")
    assert blocks.arranged(stored, ROUNDS.replace("0.9100", "0.9500")) == stored.replace("0.9100", "0.9500")


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("\n\n```python\n1 / 0\n```\n", "line 3:(.|\n)*ZeroDivisionError"),
        ("```bash\nfedsim list no_such_rule\n```\n", "line 1:(.|\n)*no_such_rule"),
        ("```bash\nfalse\necho no error\n```\n", "line 1:(.|\n)*exit status 1"),
        ('```python picture="a.png"\n```\n', "line 1: the block created no picture a.png"),
    ],
)
def test_a_block_that_fails_is_an_error_with_its_line(page, problem, tmp_path):
    assert re.match(problem, blocks.error_of(page, blocks.run(page, tmp_path, run_forked), tmp_path))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder of the built site."""
    if find_spec("mkdocs") is None:
        pytest.skip("needs mkdocs: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_site_is_built_without_warnings(site):
    assert '<div class="result">' in (site / "tutorials" / "first-run.html").read_text()
    assert not (site / "hooks").exists()


OVERFLOWING = """(selector) => [...document.querySelectorAll(selector)]
    .filter((box) => box.clientWidth && box.scrollWidth > box.clientWidth + 1)
    .map((box) => box.textContent.slice(0, 80))"""
BROKEN = """[...document.querySelectorAll(".md-content td code")]
    .filter((name) => /^[\\w.=]+$/.test(name.textContent) && !name.closest(".listed"))
    .filter((name) => name.getClientRects().length > 1)
    .map((name) => name.textContent)"""
NARROW, WIDE = 375, 1300  # pixels of a phone and of a laptop


@pytest.mark.slow
def test_pages_fit_narrow_screens_and_outputs_fit_wide_screens(site, browser):
    """On narrow screens, code and tables are scrolled. Tables of the reference are lists instead."""
    for width, boxes in (
        (NARROW, ".listed .md-typeset__scrollwrap, .listed .md-typeset__table"),
        (WIDE, ".language-text code"),
    ):
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.set_default_timeout(120_000)  # for slow machines
        for path in sorted(site.rglob("*.html")):
            page.goto(path.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
            assert page.evaluate(OVERFLOWING, boxes) == [], path
            assert width != NARROW or page.evaluate(BROKEN) == [], path
            if width == NARROW and path.parent.name == "reference":
                tables = "[...document.querySelectorAll('.md-content table')]"
                assert page.evaluate(f"{tables}.every((table) => getComputedStyle(table).display === 'block')"), path


@pytest.mark.slow
def test_the_site_fetches_nothing(site):
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert pages
    for page in pages:
        assert not (match := FETCHED.search(page.read_text())), f"{page}: {match[0]}"


@pytest.mark.slow
def test_the_readmes_command_builds_the_site_in_a_fresh_environment(tmp_path):
    """Only what the extra `docs` brings is installed. It takes minutes and needs a package index."""
    skipped = shutil.ignore_patterns(".*", "__pycache__", "site")
    shutil.copytree(ROOT, tmp_path / "clone", ignore=skipped)
    venv.create(tmp_path / "fresh", with_pip=True)
    folder = str(tmp_path / "fresh" / "bin")
    environment = {**os.environ, "PATH": os.pathsep.join([folder, os.environ["PATH"]])}
    environment.pop("PYTHONPATH", None)
    for words in (["python", "-m", "pip", "install", "-e", ".[docs]"], ["mkdocs", "build", "--strict", "--quiet"]):
        words = [f"{folder}/{words[0]}", *words[1:]]
        done = subprocess.run(words, cwd=tmp_path / "clone", env=environment, capture_output=True, text=True)
        if "install" in words and re.search("No matching distribution|NewConnectionError|ConnectTimeout", done.stderr):
            pytest.skip(f"needs a package index: {done.stderr[-300:]}")
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "clone" / "site" / "index.html").is_file()
