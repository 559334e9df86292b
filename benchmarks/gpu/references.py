"""Computes the references of other sections on the CPU, in the order of their use, while the GPU works."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Case, Context
from benchmarks.gpu.comparing import compute, path_of
from benchmarks.gpu.plan import sections_of, text_asked
from benchmarks.gpu.section import cases_of


def cases(context: Context) -> list[Case]:
    wanted: dict[Path, Mapping[str, Any]] = {}
    compared = [section for section in sections_of().values() if section.compared]
    for section in compared:
        if text_asked(context.only, section.name) is None:
            continue
        for case in cases_of(section, context):
            if case.reference is not None:
                wanted.setdefault(path_of(context, case.reference), case.reference)
    return [Case(path.stem, partial(_compute, path, tables)) for path, tables in wanted.items()]


def _compute(path: Path, tables: Mapping[str, Any]) -> None:
    compute(path, tables)
