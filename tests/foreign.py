"""Values of `fedsim.system.global_settings.SETTINGS` that differ from those of a run, as a user's program may set them.

with foreign(setting):
    fedsim.run(...)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from fedsim.system.global_settings import AUTOCAST_DEVICES, FLOAT32, SETTINGS, THREADS, GlobalSetting

FOREIGN: dict[str, Any] = {
    "inference mode": True,
    "gradients": False,
    "anomaly detection": (True, False),
    "autocast": ((True,) * len(AUTOCAST_DEVICES), False, 1),
    "dtype of autocast on cpu": torch.float16,
    "dtype of autocast on cuda": torch.bfloat16,
    "default dtype": torch.float64,
    "default device": torch.device("meta"),
    "float32 precision": ("medium", True, *("bf16" if "mkldnn" in pair else "tf32" for pair in FLOAT32)),
    "deterministic algorithms": 2,
    "denormal numbers flushed": True,
    "attention": (False, False, False, True),
    "einsum": (False, "greedy"),
    "errors of NumPy": dict.fromkeys(("divide", "over", "under", "invalid"), "raise"),
    "threads": 2,
}
WALKED = [*SETTINGS, THREADS]


def foreign_value(setting: GlobalSetting) -> Any:
    """Return a value that `setting` does not have in a run. Flags that are not listed have the opposite value."""
    return FOREIGN.get(setting.name, not setting.in_run)


def foreign(setting: GlobalSetting) -> AbstractContextManager[Any]:
    """Return a context in which `setting` has another value than in a run."""
    return setting.at(foreign_value(setting))
