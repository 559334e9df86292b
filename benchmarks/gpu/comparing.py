"""Runs of fedsim compared with the same experiment on the CPU, with engine serial, mostly in float64."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import fedsim
from benchmarks.gpu.cases import Case, Context, Facts, WrongResultError, check
from fedsim.system.precision import PRECISIONS

TINY = {
    **{"rounds": 2, "workers": 3, "model": "2nn", "data": "tests.plugs:tiny", "precision": "float64"},
    "local": {"batch_size": 16, "lr": 0.05, "momentum": 0.5},
}
STACKED = {"engine": "batched", "processes": 1}
EXACT = 1e-9  # in float64, after a few rounds: another order of summation
CLOSE = {"float64": EXACT, "float32": 1e-4}  # of parameters after two short rounds, by precision
COARSE = 5e-2  # tf32, bf16
ENGINE_KEYS = ("engine", "processes", "batched", "cuda_graphs")  # these change results only by rounding
HOW = ("engine", "processes", "width", "cuda_graphs", "reason")  # reported about how a run was computed
WAIT = 25.0  # seconds for a reference that another process has begun

torch.set_num_threads(1)


def run(context: Context, tables: Mapping[str, Any], **options: Any) -> fedsim.Result:
    """Run an experiment on the device of the check."""
    return fedsim.run({**tables, "device": context.device}, **options)


def compared(
    context: Context,
    name: str,
    tables: Mapping[str, Any],
    *,
    tolerance: float | None = None,
    limit: float = 60.0,
    run: Callable[..., fedsim.Result] = run,
) -> Case:
    """A case that runs an experiment on the device and compares it with the CPU.

    `tolerance` bounds the difference of any parameter or buffer; None: by precision.
    """
    bound = CLOSE.get(tables["precision"], COARSE) if tolerance is None else tolerance
    return Case(name, lambda: compare(context, tables, bound, run), limit, on_the_cpu(tables))


def on_the_cpu(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The reference of an experiment: engine serial, in float64 unless it trains in half precision.

    There rounding decides, for one, which steps are left out because the scaled gradients are not finite.
    """
    plain = {key: value for key, value in tables.items() if key not in ENGINE_KEYS}
    half = PRECISIONS[tables["precision"]].autocast is not None
    return {**plain, "engine": "serial", "precision": tables["precision"] if half else "float64"}


def compare(
    context: Context, tables: Mapping[str, Any], tolerance: float, run: Callable[..., fedsim.Result] = run
) -> Facts:
    settings: list[Any] = []
    started = time.perf_counter()
    result = run(context, tables, on_start=settings.append)
    facts = {
        "off": difference(result, reference(context, tables)),
        "run_seconds": round(time.perf_counter() - started, 3),
        "how": {key: settings[0].how[key] for key in HOW if key in settings[0].how},
    }
    return check(facts["off"] <= tolerance, f"differs by {facts['off']:.1e}; allowed: {tolerance:.0e}", **facts)


def difference(result: fedsim.Result, state: Mapping[str, torch.Tensor]) -> float:
    """The largest difference between any parameters or buffers; infinity for NaN."""
    ours = result.model.state_dict()
    differences = [(value.double() - ours[name].double()).abs().max() for name, value in state.items() if value.numel()]
    return float(torch.stack(differences).nan_to_num(float("inf")).max())


def reference(context: Context, tables: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The state of the final model of an experiment on the CPU, from another process or computed here."""
    tables = on_the_cpu(tables)
    path = path_of(context, tables)
    if not compute(path, tables):
        deadline = time.monotonic() + WAIT
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    if not path.exists():  # its process was killed, or the disk is full
        return fedsim.run({**tables, "device": "cpu"}).model.state_dict()
    kept = torch.load(path)
    if "error" in kept:
        raise WrongResultError(f"the CPU cannot run it: {kept['error']}", {})
    return kept["state"]


def path_of(context: Context, tables: Mapping[str, Any]) -> Path:
    text = json.dumps(tables, sort_keys=True, default=str)
    return context.references / f"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.pt"


def compute(path: Path, tables: Mapping[str, Any]) -> bool:
    """Compute and keep a reference, unless another process has begun it."""
    with contextlib.suppress(OSError):
        try:
            os.close(os.open(path.with_suffix(".begun"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        try:
            kept: dict[str, Any] = {"state": fedsim.run({**tables, "device": "cpu"}).model.state_dict()}
        except fedsim.FedsimError as error:
            kept = {"error": str(error)}
        part = path.with_suffix(".part")
        torch.save(kept, part)
        part.rename(path)
    return True
