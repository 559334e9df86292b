"""The names that `import fedsim` offers."""

from __future__ import annotations

import pytest

import fedsim
from tests.commands import run_python


def test_every_public_name_is_there_and_listed():
    for name in fedsim.__all__:
        assert getattr(fedsim, name) is not None
    assert set(fedsim.__all__) <= set(dir(fedsim))


def test_modules_of_the_package_are_attributes_and_nothing_else_is():
    assert fedsim.models.model.get("net")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        fedsim.nothing  # noqa: B018


def test_the_library_imports_packages_for_pictures_and_statistics_only_when_they_are_used():
    code = (
        "import sys, fedsim; before = 'torch' in sys.modules; fedsim.run\n"
        "print(before, [m for m in ('matplotlib', 'sklearn', 'scipy', 'plotly', 'torchvision') if m in sys.modules])"
    )
    assert run_python("-c", code).stdout == "False []\n"
