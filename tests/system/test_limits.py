"""Which frames of a traceback are the user's."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedsim
from fedsim.system.limits import frames_of_user

PACKAGE = Path(fedsim.__file__).parent


@pytest.mark.parametrize(
    ("file", "is_of_user"),
    [
        (f"{PACKAGE}_plugs.py", True),
        (PACKAGE / "models.py", False),
        ("<string>", True),
        ("<frozen importlib._bootstrap>", False),
        (Path(pytest.__file__), False),
    ],
)
def test_a_file_beside_the_package_is_of_the_user(file, is_of_user):
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("1 / 0", str(file), "exec"))
    caught.value.with_traceback(caught.value.__traceback__.tb_next)  # without the frame of this test
    assert bool(frames_of_user(caught.value)) == is_of_user
