"""What every docstring of a rule, attack, partition and server optimizer must say."""

from __future__ import annotations

import inspect
import re

import pytest

from fedsim.listing import registry_of

KINDS = ("partitions", "attacks", "rules", "pre-aggregators", "servers")
PLUGS_OF_KINDS = [(kind, plug) for kind in KINDS for plug in registry_of(kind)]
NOBODYS = {"mean", "norm_clipping", "none", "nan", "inf", "contiguous", "iid"}  # which no one paper has brought up

every_plug = pytest.mark.parametrize(("kind", "plug"), PLUGS_OF_KINDS, ids=[f"{k}-{p.name}" for k, p in PLUGS_OF_KINDS])


@every_plug
def test_a_docstring_begins_with_one_line_that_ends(kind, plug):
    first, *rest = inspect.getdoc(plug.target).splitlines()
    assert first.endswith(".")
    assert not rest or not rest[0]


@every_plug
def test_a_docstring_says_shapes_cost_and_source(kind, plug):
    text = " ".join(inspect.getdoc(plug.target).split())
    assert re.search(r"\[[a-z(][a-z +/()]*(, [a-z]+)?\]", text), "no shape"
    assert "Cost: " in text
    assert plug.name in NOBODYS or re.search(r"\b[A-Z][\w.]+ .*(19|20)\d\d", text), "no source"
