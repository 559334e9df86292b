"""Describe the machine as one JSON line, and check that its device computes: python -m benchmarks.gpu.machine."""

from __future__ import annotations

import json
import shutil
import subprocess

import torch

from fedsim.records.run_folder import describe_environment
from fedsim.system.devices import usable_cores

QUERY = "driver_version,memory.total,memory.used,clocks.sm,clocks.mem,power.limit,compute_mode,mig.mode.current"


def describe() -> dict[str, object]:
    """Return the versions, the device, the number of cores and the free shared memory. Fail if the device does."""
    facts = {**describe_environment(), "cores": usable_cores(), "shm_free": shutil.disk_usage("/dev/shm").free}
    if not torch.cuda.is_available():
        return {**facts, "device": "cpu"}
    if torch.ones(3, device="cuda").sum().item() != 3:
        raise RuntimeError("the device returns wrong results")
    properties = torch.cuda.get_device_properties(0)
    facts |= {"device": properties.name, "gib": round(properties.total_memory / 2**30, 1), "cuda": torch.version.cuda}
    facts |= {"capability": f"{properties.major}.{properties.minor}", "cudnn": torch.backends.cudnn.version()}
    return {**facts, "processors": properties.multi_processor_count, "nvidia_smi": nvidia_smi()}


def nvidia_smi() -> dict[str, str] | str:
    """Return driver, memory, clocks and modes as reported by nvidia-smi, or why they are unknown."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return dict(zip(QUERY.split(","), done.stdout.splitlines()[0].split(", "), strict=False))


if __name__ == "__main__":
    print(json.dumps(describe(), default=str))
