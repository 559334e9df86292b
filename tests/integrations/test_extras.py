"""Modules whose optional package is missing."""

from __future__ import annotations

import importlib
import sys

import pytest

from fedsim.errors import MissingPackageError


@pytest.mark.parametrize(
    ("module", "package", "installed"),
    [
        ("flower", "flwr", "flwr flwr-datasets"),
        ("flower_datasets", "flwr_datasets", "flwr flwr-datasets"),
        ("lightning",) * 3,
    ],
)
def test_a_module_says_what_to_install(module, package, installed, monkeypatch):
    monkeypatch.delitem(sys.modules, f"fedsim.integrations.{module}", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # makes the import fail
    with pytest.raises(MissingPackageError, match=f"needs the package {package}, .*: pip install {installed}$"):
        importlib.import_module(f"fedsim.integrations.{module}")
