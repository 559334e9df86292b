"""What documents say of tests is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted((ROOT / "docs" / "explanation").glob("reliability*.md"))
TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_test_that_holds_a_promise_exists(document):
    text = document.read_text()
    files = [ROOT / "docs" / "..", *(ROOT / "tests" / kind for kind in ("environment", "hostile"))]
    named = re.findall(r"`(?:[\w/.]*::)?(test_\w+|\.\.\._\w+_\.\.\.|test_\w+_\.\.\.)`", text)
    for name in named:
        pattern = re.compile(re.escape(name).replace(r"\.\.\.", r"\w*") + "$")
        assert any(pattern.match(test) for test in TESTS), name
    for file in re.findall(r"`((?:tests/)?[\w/]*test_\w+\.py)", text):
        assert any((folder / file).is_file() for folder in files), file
