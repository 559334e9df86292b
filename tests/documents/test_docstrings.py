"""Docstring examples run, and component docstrings state shapes, cost and source."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import fedsim
from fedsim.config.components import registry_of

PACKAGE = Path(fedsim.__file__).parent
WITH_EXAMPLES = sorted(path for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text())
KINDS = (
    "tasks",
    "models",
    "datasets",
    "augmentations",
    "partitions",
    "client-algorithms",
    "attacks",
    "rules",
    "pre-aggregators",
    "processors",
    "server-optimizers",
)
COMPONENTS_OF_KINDS = [(kind, registration) for kind in KINDS for registration in registry_of(kind)]
WITHOUT_SOURCE = {"mean", "norm_clipping", "none", "nan", "inf", "contiguous", "iid", "given"}
PACKAGES = ("fedsim.aggregation", "fedsim.server", "fedsim.byzantine", "fedsim.data", "fedsim.processing")
PUBLIC = [name for name in fedsim.__all__ if getattr(getattr(fedsim, name), "__module__", "").startswith(PACKAGES)]

every_component = pytest.mark.parametrize(
    ("kind", "registration"), COMPONENTS_OF_KINDS, ids=[f"{k}-{p.name}" for k, p in COMPONENTS_OF_KINDS]
)


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_the_examples_of_a_module_run(path):
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    module = importlib.import_module(name.removesuffix(".__init__"))
    failed, tried = doctest.testmod(module, extraglobs={"fedsim": fedsim, "np": np, "torch": torch})
    assert tried or "doctest: +SKIP" in path.read_text()  # an example that needs an optional package
    assert not failed


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_an_example(name):
    assert ">>> " in inspect.getdoc(getattr(fedsim, name))


@every_component
def test_a_docstring_has_a_first_line_an_example_shapes_cost_and_source(kind, registration):
    docstring = inspect.getdoc(registration.target)
    first, *rest = docstring.splitlines()
    assert first.endswith(".")
    assert not rest or not rest[0]
    assert ">>> " in docstring
    text = " ".join(docstring.split())
    if kind not in ("models", "datasets"):
        assert re.search(r"\[[a-z(][a-z +/()]*(, [a-z]+)*\]", text), "no shape"
        assert "Cost: " in text
    if kind not in ("models", "datasets", "augmentations"):
        assert registration.name in WITHOUT_SOURCE or re.search(r"\b[A-Z][\w.]+ .*(19|20)\d\d", text), "no source"
