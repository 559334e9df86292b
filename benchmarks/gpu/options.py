"""Every solver, server optimizer and policy, compared with the CPU in float64."""

from __future__ import annotations

import inspect
from typing import Any

import fedsim
from benchmarks.gpu.cases import Case, Context
from benchmarks.gpu.comparing import STACKED, TINY, compared

SOLVERS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "fedprox": {"mu": 1.0, "momentum": 0.5},
    **{"adam": {"weight_decay": 0.1, "amsgrad": True}, "adamw": {}, "adagrad": {"lr_decay": 0.1}},
}
GIVEN = {"k": 2}  # to parameters without a default
CLOCK = {"noise": "lognormal", "speed": "geometric"}


def cases(context: Context) -> list[Case]:
    engines = {"serial": {"engine": "serial"}, "batched": STACKED}
    found = []
    for engine, way in engines.items():
        for precision in ("float64", "float32"):
            end = f", {engine}, {precision}"
            plain = {**TINY, **way, "precision": precision}
            for solver, params in SOLVERS.items():
                local = {"solver": solver, "batch_size": 16, **params}
                found.append(compared(context, f"solver {solver}{end}", {**plain, "local": local}))
            for name in fedsim.server_optimizers():
                tables = {**plain, "rounds": 3, "server": {"optimizer": name}}
                found.append(compared(context, f"server {name}{end}", tables))
        for policy, signature in fedsim.policies().items():
            table = {"name": policy, **required(signature)}
            tables = {**TINY, **way, "mode": "clock", "policy": table, "clock": CLOCK}
            found.append(compared(context, f"policy {policy}, {engine}", tables))
    return found


def required(signature: inspect.Signature) -> dict[str, Any]:
    """Values for the parameters that have no default."""
    return {name: GIVEN[name] for name, each in signature.parameters.items() if each.default is each.empty}
