"""A device that is almost full: a run ends with an error of fedsim or succeeds, and the next run is right."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch

import fedsim
from benchmarks.gpu.cases import Case, Context, Facts, need_gpu
from benchmarks.gpu.comparing import STACKED, TINY, run
from benchmarks.gpu.faults import PLAIN, SPAWN, right

ENGINES: dict[str, dict[str, Any]] = {"serial": {"engine": "serial"}, "batched": STACKED, "spawn": SPAWN, "auto": {}}
LEFT = 0.9e9  # bytes of the device's memory that are left free
LARGE = {  # an experiment that needs more
    **TINY,
    **{"rounds": 1, "model": "cnn", "workers": 200, "precision": "float32", "local": {"batch_size": 256, "steps": 1}},
    "data": {"dataset": "tests.plugs:tiny", "train": 400},
}


def cases(context: Context) -> list[Case]:
    return [Case(name, partial(full, context, way), 60, PLAIN) for name, way in ENGINES.items()]


def full(context: Context, way: dict[str, Any]) -> Facts:
    need_gpu(context)
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(context.device)
    ballast = torch.empty(max(0, int(free - LEFT)), dtype=torch.uint8, device=context.device)
    outcome = "the run succeeded"
    try:
        run(context, {**LARGE, **way})
    except fedsim.FedsimError as error:
        outcome = f"{type(error).__name__}: {str(error).splitlines()[0]}"[:300]
    finally:
        del ballast
        gc.collect()
        torch.cuda.empty_cache()
    return right(context, outcome=outcome)
