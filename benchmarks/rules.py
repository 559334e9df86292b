"""Time and memory of every aggregation rule, compared with plain PyTorch operations and with the package byzfl.

All rules are timed on the same float32 updates, and the shortest of several times counts. Compared functions are timed
in turn: a rule, then byzfl's rule or the matrix product that the rule needs, then the rule again. On a GPU, a call ends
when the device has finished. If byzfl has the same rule, both results must agree. Memory (Linux only, on a CPU) is the
additional peak memory of a separate process that returns freed memory at once, in units of the size of the updates.

    python -m pip install byzfl
    python benchmarks/rules.py [--rows 20 100] [--columns 21840 1663370] [--repeats 3] [--threads 2] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import report
from torch import Tensor

import fedsim
from fedsim.aggregation import rule
from fedsim.system.devices import synchronize
from fedsim.system.packages import import_torchvision

KRUM_FAMILY = ("krum", "multi_krum", "medoid")
PRODUCTS = ("product_float64", "product_float32")
PLAINLY = dict.fromkeys(KRUM_FAMILY, PRODUCTS) | {"median": ("torch_median",), "trimmed_mean": ("torch_sort",)}
ENOUGH_TIME = 0.2  # minimum seconds of a short measurement, with repetitions
STATUS = Path("/proc/self/status")
RULES = [registration for registration in rule if "models" not in registration.takes]


def params_of(name: str, f: int) -> dict[str, Any]:
    registration = rule.get(name)
    enough = {"f": f, "c": 1.0, "lam": 1.5}
    return {key: value for key, value in enough.items() if registration.parameters.model_fields.get(key) is not None}


def ours(name: str, updates: Tensor, f: int) -> Callable[[], Tensor]:
    registration, parameters = rule.get(name), params_of(name, f)
    if name == "geometric_median":
        parameters |= {"nu": 0.1, "iterations": 3, "tol": 0.0, "start": "zeros"}  # as in byzfl
    if name == "centered_clipping":
        parameters |= {"tau": 100.0}  # as in byzfl
    if "root" in registration.takes:
        parameters["root"] = updates[0].clone()
    if "losses" in registration.takes:
        parameters["losses"] = torch.ones(len(updates))
    if "own" in registration.takes:
        parameters["own"] = 0
    return lambda: fedsim.aggregate(updates, name, **parameters)


def theirs(f: int) -> dict[str, Any]:
    """Return byzfl's rules by fedsim's names. Rules with a different definition are timed but not compared."""
    import_torchvision()  # byzfl imports torchvision as well
    import byzfl

    return {
        "mean": byzfl.Average(),
        "median": byzfl.Median(),
        "trimmed_mean": byzfl.TrMean(f=f),
        "geometric_median": byzfl.GeometricMedian(),
        "krum": byzfl.Krum(f=f),
        "multi_krum": byzfl.MultiKrum(f=f),
        "centered_clipping": byzfl.CenteredClipping(),
        "monna": byzfl.MoNNA(f=f),
        "meamed": byzfl.Meamed(f=f),
        "caf": byzfl.CAF(f=f),
    }


OTHERWISE_DEFINED = {"median", "caf", "multi_krum"}  # torch.median's lower value; one power step; one neighbour more


def seconds(*functions: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Return the shortest time of each function. The functions take turns, and a short one is repeated in each turn."""
    least = [float("inf")] * len(functions)
    for _ in range(repeats):
        for place, function in enumerate(functions):
            spent = 0.0
            while spent < ENOUGH_TIME / repeats:
                started = time.perf_counter()
                function()
                synchronize(device)
                took = time.perf_counter() - started
                least[place], spent = min(least[place], took), spent + took
    return least


def memory(function: Callable[[], object], updates: Tensor) -> float:
    """Return the additional peak memory of a call, relative to the size of the updates."""

    def kilobytes(field: str) -> int:
        return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(field))

    function()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory
    before = kilobytes("VmRSS:")
    function()
    return round(max(0, kilobytes("VmHWM:") - before) * 1024 / updates.nbytes, 3)


def memories(n: int, d: int) -> dict[str, float]:
    """Return the memory of every rule, measured in a new process, where no freed memory hides what a rule needs."""
    if not STATUS.exists():
        return {}
    at_once = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, __file__, "--memory-only", "--threads=1", f"--rows={n}", f"--columns={d}"]
    return json.loads(subprocess.run(command, env=os.environ | at_once, check=True, capture_output=True).stdout)


def memory_of_rules(n: int, d: int) -> dict[str, float]:
    updates = some_updates(n, d)
    return {
        registration.name: memory(ours(registration.name, updates, largest_f(registration.name, n)), updates)
        for registration in RULES
    }


def some_updates(n: int, d: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0)) * 0.01


def largest_f(name: str, n: int) -> int:
    if name == "smea" and n > 20:
        return 1  # searches all subsets of n - f rows
    return (n - 3) // 4 if name == "bulyan" else n // 5


def measure(n: int, d: int, repeats: int, device: torch.device) -> dict[str, Any]:
    updates = some_updates(n, d).to(device)

    def product64() -> Tensor:
        wide = updates.double()
        return wide @ wide.t()

    baselines = {
        "product_float64": product64,
        "product_float32": lambda: updates @ updates.t(),
        "torch_median": lambda: updates.median(0),
        "torch_sort": lambda: updates.sort(0),
    }
    others, rules, times, needed = theirs(n // 5), {}, {}, memories(n, d) if device.type == "cpu" else {}
    for registration in RULES:
        function = ours(registration.name, updates, largest_f(registration.name, n))
        against = {name: baselines[name] for name in PLAINLY.get(registration.name, ())}
        if registration.name in others:
            against["byzfl"] = lambda byzfl_rule=others[registration.name]: byzfl_rule(updates)
            if registration.name not in OTHERWISE_DEFINED:
                away = float((function() - against["byzfl"]()).abs().max())
                assert away < 1e-5, f"{registration.name}: byzfl's result differs by {away}"
        took = seconds(function, *against.values(), repeats=repeats, device=device)
        times[registration.name] = dict(zip(("ours", *against), took, strict=True))
        rules[registration.name] = {"ms": round(1e3 * took[0], 3), "memory": needed.get(registration.name)}
        if registration.name in others:
            rules[registration.name]["byzfl_over_ours"] = round(times[registration.name]["byzfl"] / took[0], 3)
    ratios = [figures["byzfl_over_ours"] for figures in rules.values() if "byzfl_over_ours" in figures]

    def over_ours(baseline: str) -> dict[str, float]:
        return {name: each[baseline] / each["ours"] for name, each in times.items() if baseline in each}

    return {
        "rules": rules,
        "baselines_ms": {
            name: round(1e3 * min(each[name] for each in times.values() if name in each), 3) for name in baselines
        },
        **{
            f"krum_family_over_{product}": {name: round(1 / ratio, 3) for name, ratio in over_ours(product).items()}
            for product in PRODUCTS
        },
        "times_faster_than_torch_median": round(over_ours("torch_median")["median"], 2),
        "times_faster_than_torch_sort": round(over_ours("torch_sort")["trimmed_mean"], 2),
        "byzfl_over_ours_median": round(statistics.median(ratios), 2),
        "byzfl_over_ours_least": round(min(ratios), 2),
        "most_memory": max((r["memory"] or 0.0, name) for name, r in rules.items()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--columns", type=int, nargs="+", default=[21_840, 1_663_370])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument(
        "--memory-only", action="store_true", help="measure only memory, for the first of --rows and --columns"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory_only:
        print(json.dumps(memory_of_rules(arguments.rows[0], arguments.columns[0])))
        return
    if find_spec("byzfl") is None:
        parser.error("the package byzfl is not installed: python -m pip install byzfl")
    figures = {
        f"n={n}, d={d}": measure(n, d, arguments.repeats, arguments.device)
        for n in arguments.rows
        for d in arguments.columns
    }
    report("rules", **figures, repeats=arguments.repeats, threads=arguments.threads, device=arguments.device)


if __name__ == "__main__":
    main()
