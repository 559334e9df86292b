"""The example of CONTRIBUTING.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands import ended, start

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


def test_the_plug_of_the_guide_ignores_a_distant_row(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    script = tmp_path / "example.py"  # in a process of its own, since the plug is registered there
    script.write_text(f"{example}\nprint(*fedsim.aggregate(updates, rule='softmedian', temperature=0.1).tolist())\n")
    _, [out], _ = ended([start(script, cwd=tmp_path)])
    numbers = [float(word) for word in out.splitlines()[-1].split()]
    assert numbers == pytest.approx([0.0, 1.0], abs=0.15)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:tests|fedsim)/[\w/]+(?:\.py|/))`", TEXT))))
def test_the_files_of_the_guide_exist(path):
    assert (Path(__file__).parents[2] / path).exists()
