"""Engine spawn with two processes that runs reuse, and races of every policy."""

from __future__ import annotations

import atexit
import functools
from typing import Any

import fedsim
from benchmarks.gpu.cases import Case, Context
from benchmarks.gpu.comparing import compared, run
from benchmarks.gpu.engines import contract
from benchmarks.gpu.options import required
from benchmarks.gpu.ways import race

EVERY = 2  # cases of the contract


def cases(context: Context) -> list[Case]:
    spawn = {"engine": "spawn", "processes": 2}
    chosen = [case for number, case in enumerate(contract()) if number % EVERY == 0 or "dropout" in case[0]]
    found = [compared(context, name, {**tables, **spawn}, run=kept) for name, tables in chosen]
    policies = {name: required(signature) for name, signature in fedsim.policies().items() if name != "sync"}
    races = [
        Case(f"race, {name}", functools.partial(race, context, name, **params)) for name, params in policies.items()
    ]
    return found + races


def kept(context: Context, tables: dict[str, Any], **options: Any) -> fedsim.Result:
    return run(context, tables, session=session(), **options)


@functools.cache
def session() -> fedsim.Session:
    """Keeps processes from case to case."""
    opened = fedsim.Session()
    opened.__enter__()
    atexit.register(opened.__exit__, None, None, None)
    return opened
