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


RARELY_USED = [
    "datasets",
    "flwr",
    "jinja2",
    "lightning",
    "matplotlib",
    "pandas",
    "plotly",
    "rich",
    "torch._dynamo",
    "torchvision",
    "typer",
]


def test_import_fedsim_loads_pytorch_and_other_packages_on_first_use():
    code = (
        "import sys, fedsim.api; before = [name for name in ('torch', 'pydantic') if name in sys.modules]\n"
        "import fedsim.comparison\n"
        "from fedsim.config.plugs import registry_of\n"
        f"print(before, [module for module in {RARELY_USED} if module in sys.modules])\n"
        "print([plug.name for plug in registry_of('partitions') if 'parameters' in vars(plug) and plug.name != 'iid'])"
    )
    assert run_python("-c", code).stdout == "[] []\n[]\n"
