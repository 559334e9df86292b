"""An almost full GPU: a run ends with a FedsimError or succeeds, and the next run is correct.

These tests allocate nearly all memory of the GPU, so nothing else may use it at the same time.
"""

from __future__ import annotations

import contextlib
import gc
import os

import pytest
import torch

import fedsim
from tests.device.agreement import ENGINES, REAL, ROUNDING, TINY, assert_same_model, run_on_cpu, run_on_gpu

LEFT = 0.9e9  # bytes of GPU memory that stay free
LARGE = {  # an experiment that needs more memory than that
    **TINY,
    **{"rounds": 1, "model": "cnn", "workers": 200, "precision": "float32", "local": {"batch_size": 256, "steps": 1}},
    "data": {"name": "tests.components:tiny", "train": 400},
}
WAYS = {
    **{name: ENGINES[name] for name in ("serial", "batched")},
    **{"processes": {"engine": "processes", "processes": 2}, "auto": {"engine": "auto"}},
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not REAL, reason="needs a real GPU"),
    pytest.mark.skipif(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1, reason="needs -n 1"),
    pytest.mark.filterwarnings("ignore::fedsim.errors.FedsimWarning"),  # `auto` falls back to a simpler way
]


@pytest.mark.parametrize("engine", WAYS)
def test_a_run_on_a_full_gpu_spoils_no_later_run(engine):
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(max(0, int(free - LEFT)), dtype=torch.uint8, device="cuda")
    with contextlib.suppress(fedsim.FedsimError):
        run_on_gpu(LARGE, **WAYS[engine])
    del ballast
    gc.collect()
    torch.cuda.empty_cache()
    assert_same_model(run_on_cpu(TINY), run_on_gpu(TINY, **ENGINES["batched"]), ROUNDING)
