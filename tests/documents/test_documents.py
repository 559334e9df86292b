"""CONTRIBUTING.md names existing files, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands import ended, start

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()


def test_the_component_of_the_guide_ignores_a_distant_row(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    script = tmp_path / "example.py"  # a separate process, because the component is registered there
    script.write_text(f"{example}\nprint(*fedsim.aggregate(updates, 'softmedian', temperature=0.1).tolist())\n")
    _, [out], _ = ended([start(script, cwd=tmp_path)])
    numbers = [float(word) for word in out.splitlines()[-1].split()]
    assert numbers == pytest.approx([0.0, 1.0], abs=0.15)


def test_the_files_of_the_guide_exist():
    named = re.findall(r"`((?:tests|fedsim)/[\w/]+(?:\.py|/))`", GUIDE)
    assert named
    assert not [path for path in named if not (ROOT / path).exists()]
