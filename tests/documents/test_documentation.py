"""Documentation pages: their code blocks run, and the site is built without warnings and fetches nothing."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.forking import Program

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FETCHED = re.compile(
    r"""<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=["']?(?:https?:)?//|@import|url\(["']?(?:https?:)?//"""
)


sys.path.append(str(DOCS / "hooks"))  # as mkdocs does
blocks = importlib.import_module("blocks")
PAGES = {
    path.relative_to(DOCS).as_posix(): text
    for path in sorted(DOCS.rglob("*.md"))
    if blocks.is_run(text := path.read_text())
}


def run_forked(words, folder, environment):
    """Run `python *words` in a fork of a process that has imported fedsim, which saves two seconds per page."""
    program = Program(words, cwd=folder, environment=environment)
    _, error = program.communicate(timeout=blocks.MOST_SECONDS)
    return program.returncode, error


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * blocks.is_slow(text)) for page, text in PAGES.items()]
)
def test_the_blocks_of_the_page_run(page, tmp_path):
    assert blocks.error_of(PAGES[page], blocks.run(PAGES[page], tmp_path, run_forked), tmp_path) is None
    if missing := blocks.missing_packages(PAGES[page]):
        pytest.skip(f"skipped only the blocks that need {', '.join(missing)}")


def test_quoted_experiments_equal_those_of_the_files():
    experiments = [path.read_text() for path in (ROOT / "experiments").glob("*.toml")]
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
    page = blocks.shown(PAGE, results, lambda picture: f"page-{Path(picture).name}")
    assert '    <div class="result" markdown>\n\n    ```text\n    it is 2\n    ```\n\n    </div>' in page
    assert "![made](page-made.png)" in page
    assert '```python title="my_rules.py"\n' in page
    assert not re.search(r"output=|picture=|needs=|run=", page)
    assert "\n2\n" not in page  # printed by a block without output="yes"


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
    """Return the folder of the built site, whose code blocks have not been run."""
    if find_spec("mkdocs") is None:
        pytest.skip("needs mkdocs: pip install 'fedsim-sgd[docs]'")
    return built(tmp_path_factory.mktemp("site"), run="no")


def built(folder, run):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "FEDSIM_DOCS_RUN": run, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_site_is_built_without_warnings(site):
    assert (site / "index.html").is_file()
    assert not (site / "hooks").exists()


@pytest.mark.slow
def test_the_site_fetches_nothing(site):
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert pages
    for page in pages:
        assert not (match := FETCHED.search(page.read_text())), f"{page}: {match[0]}"


@pytest.mark.slow
def test_the_site_is_built_with_the_outputs_of_its_blocks(tmp_path):
    pytest.importorskip("mkdocs", reason="needs mkdocs: pip install 'fedsim-sgd[docs]'")
    assert '<div class="result">' in "".join(page.read_text() for page in built(tmp_path, run="yes").rglob("*.html"))
