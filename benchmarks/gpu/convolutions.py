"""Convolutions of stacks in each way, from which the table is written by which fedsim chooses."""

from __future__ import annotations

from benchmarks.gpu.cases import Case, Context


def cases(context: Context) -> list[Case]:
    return []
