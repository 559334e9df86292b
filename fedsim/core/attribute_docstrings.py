"""Docstrings of attributes: the strings below the fields of a class."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise


def attribute_docstrings(kind: type) -> dict[str, str]:
    """The string below each annotated field of a class and of its base classes, in one line.

    The source is read when it is needed, so descriptions cost nothing when fedsim is imported.

    >>> from fedsim.config.schema import Checkpoint
    >>> attribute_docstrings(Checkpoint)["keep"]
    'Number of newest checkpoints that are kept.'
    """
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] == "fedsim":
            found |= _in_source(textwrap.dedent(inspect.getsource(base)))
    return found


def _in_source(source: str) -> dict[str, str]:
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(below.value.value.split())
        for field, below in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }
