"""What documents say of files and tests is so, and the example of CONTRIBUTING.md runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands import ended, start

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted((ROOT / "docs" / "explanation").glob("reliability*.md"))
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
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


def test_the_component_of_the_guide_ignores_a_distant_row(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    script = tmp_path / "example.py"  # in a process of its own, since the component is registered there
    script.write_text(f"{example}\nprint(*fedsim.aggregate(updates, rule='softmedian', temperature=0.1).tolist())\n")
    _, [out], _ = ended([start(script, cwd=tmp_path)])
    numbers = [float(word) for word in out.splitlines()[-1].split()]
    assert numbers == pytest.approx([0.0, 1.0], abs=0.15)


def test_the_files_of_the_guide_exist():
    named = re.findall(r"`((?:tests|fedsim)/[\w/]+(?:\.py|/))`", GUIDE)
    assert named
    assert not [path for path in named if not (ROOT / path).exists()]
