"""The machine and the installed packages. Only the cases import PyTorch and fedsim."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import partial

from benchmarks.gpu.cases import Case, Context, Facts, NotApplicableError, check, need_gpu

SURROUNDINGS = ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS")
QUERY = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,power.limit,compute_mode,mig.mode.current"
NEEDED = ("torch", "numpy", "pydantic", "tqdm", "safetensors", "tomli_w", "cloudpickle")  # to run an experiment
USEFUL = {  # what cannot be checked without it
    "typer": "the command line",
    "torchvision": "downloads of data",
    "matplotlib": "figures",
    "pytest": "tests",
    "hypothesis": "tests",
}


def cases(context: Context) -> list[Case]:
    return [
        Case("device", partial(device, context)),
        Case("versions", versions),
        Case("packages", packages),
        Case("import fedsim", import_fedsim),
        Case("MNIST", mnist),
        Case("nvidia-smi", partial(nvidia_smi, context), limit=30),
        Case("surroundings", surroundings),
    ]


def device(context: Context) -> Facts:
    import torch

    if not context.on_gpu:
        return {"name": "cpu"}
    properties = torch.cuda.get_device_properties(context.device)
    works = torch.ones(3, device=context.device).sum().item() == 3
    facts = {"name": properties.name, "gib": round(properties.total_memory / 2**30, 1)}
    facts["capability"] = f"{properties.major}.{properties.minor}"
    return check(works, "does not compute", **facts, processors=properties.multi_processor_count)


def versions() -> Facts:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        **{"python": platform.python_version(), "torch": str(torch.__version__), "cuda": torch.version.cuda},
        **{"cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None},
        **{"kernel": platform.release(), "cores": cores},
    }


def packages() -> Facts:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    without = {name: what for name, what in USEFUL.items() if importlib.util.find_spec(name) is None}
    return check(not missing, f"missing: {', '.join(missing)}; see --packages", cannot_be_checked=without)


def import_fedsim() -> Facts:
    fedsim = importlib.import_module("fedsim")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {"file": fedsim.__file__, "commit": commit.stdout.strip() or None}


def mnist() -> Facts:
    from benchmarks.gpu.data import has_mnist

    return {"found": has_mnist(), "root": os.environ.get("FEDSIM_DATA")}


def nvidia_smi(context: Context) -> Facts:
    need_gpu(context)
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        raise NotApplicableError("there is no nvidia-smi")
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return dict(zip(QUERY.split(","), done.stdout.splitlines()[0].split(", "), strict=False))


def surroundings() -> Facts:
    shared = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None
    kept = {name: os.environ[name] for name in SURROUNDINGS if name in os.environ}
    return {"shm_free": shared, "tmp_free": shutil.disk_usage(tempfile.gettempdir()).free, **kept, "argv": sys.argv[:1]}
