"""Every aggregation rule, pre-aggregator and attack on random rows, compared with the CPU in float64."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fedsim
from benchmarks.gpu.cases import Case, Context, Facts, check

ROWS, COLUMNS = 12, 50_000
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}  # relative to the largest number
GIVEN = {"f": 2, "c": 1.0}  # to parameters without a default
PIPELINES = (["nnm", "median"], ["bucketing", "trimmed_mean"], ["arc", "krum"])

torch.set_num_threads(1)


def cases(context: Context) -> list[Case]:
    found = []
    rules = {name: [name] for name in fedsim.rules()} | {" + ".join(names): names for names in PIPELINES}
    for dtype, tolerance in TOLERANCES.items():
        kind = str(dtype).removeprefix("torch.")
        for name, names in rules.items():
            found.append(Case(f"rule {name}, {kind}", partial(rule, context, names, dtype, tolerance)))
        for name in fedsim.pre_aggregators():
            found.append(Case(f"pre-aggregator {name}, {kind}", partial(processor, context, name, dtype, tolerance)))
        for name in fedsim.attacks():
            found.append(Case(f"attack {name}, {kind}", partial(attack, context, name, dtype, tolerance)))
    return found


def random_rows(n: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, COLUMNS, generator=torch.Generator().manual_seed(0)).to(dtype)


def rule(context: Context, names: list[str], dtype: torch.dtype, tolerance: float) -> Facts:
    """With all rows finite, and with a row that is left out."""
    rows = random_rows(ROWS, dtype)
    spoilt = rows.clone()
    spoilt[3, 7] = float("nan")
    known = fedsim.rules() | fedsim.pre_aggregators()
    params = {key: value for name in names for key, value in _required(known[name]).items()}
    worst = 0.0
    for given, nonfinite in ((rows, "error"), (spoilt, "exclude")):

        def aggregate(given: Tensor, nonfinite: str = nonfinite) -> Tensor:
            more: dict[str, Any] = {"root": given[0]} if names == ["fltrust"] else {}
            if names == ["qfedavg"]:
                more = {"losses": torch.linspace(0.1, 2, ROWS, dtype=torch.float64)}
            return fedsim.aggregate(given, rule=names, nonfinite=nonfinite, **params, **more)

        worst = max(worst, relative(context, aggregate, given))
    return check(worst <= tolerance, f"differs by {worst:.1e} of the largest number", off=worst)


def processor(context: Context, name: str, dtype: torch.dtype, tolerance: float) -> Facts:
    params = _required(fedsim.pre_aggregators()[name])
    off = relative(context, lambda rows: fedsim.pre_aggregate(rows, name, **params), random_rows(ROWS, dtype))
    return check(off <= tolerance, f"differs by {off:.1e} of the largest number", off=off)


def attack(context: Context, name: str, dtype: torch.dtype, tolerance: float) -> Facts:
    def attacked(rows: Tensor) -> Tensor:
        median = partial(fedsim.aggregate, rule="median")
        return fedsim.attack(rows[:8], 3, name, own_updates=rows[8:11], last=rows[0], aggregate=median)

    off = relative(context, attacked, random_rows(ROWS, dtype))
    return check(off <= tolerance, f"differs by {off:.1e} of the largest number", off=off)


def relative(context: Context, work: Callable[[Tensor], Tensor], rows: Tensor) -> float:
    """How far the result on the device is from that of the CPU in float64, relative to the largest number of it."""
    expected = work(rows.double()).nan_to_num(7.0, 8.0, 9.0)
    found = work(rows.to(context.device))
    if found.device.type != torch.device(context.device).type or found.dtype != rows.dtype:
        return float("inf")
    off = (found.cpu().double().nan_to_num(7.0, 8.0, 9.0) - expected).abs().max()
    return float(off / expected.abs().max().clamp(min=1e-30)) if expected.any() else float(off)


def _required(signature: inspect.Signature) -> Mapping[str, Any]:
    """Values for the parameters that have no default."""
    return {name: GIVEN[name] for name, each in signature.parameters.items() if each.default is each.empty}
