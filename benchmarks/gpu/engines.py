"""The cases of the contract of engines on the device, compared with the CPU in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.cases import Case, Context, NotApplicableError
from benchmarks.gpu.comparing import STACKED, TINY, compared, run
from fedsim import ExperimentError, Result
from tests.engines.test_contract import CASES, REFUSED, syncs_of

ENGINES = {
    "serial": {"engine": "serial"},
    "batched": {**STACKED, "batched": {"width": 3}},  # so that some cohorts are more than one stack
    "batched, no graphs": {**STACKED, "cuda_graphs": False},
}


def contract() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and tables of each case, in float64 unless it is about another precision."""
    for case, extra in CASES.items():
        for sync in syncs_of((case,)):
            yield f"{case}, {sync}", {**TINY, "sync": sync, **extra}


def cases(context: Context) -> list[Case]:
    engines = ENGINES if context.on_gpu else {name: ENGINES[name] for name in ("serial", "batched")}
    return [
        compared(context, f"{name}, {engine}", {**tables, **way}, run=refusable)
        for name, tables in contract()
        for engine, way in engines.items()
    ]


def refusable(context: Context, tables: dict[str, Any], **options: Any) -> Result:
    """Run an experiment; what an engine says that it cannot do is skipped."""
    try:
        return run(context, tables, **options)
    except ExperimentError as error:
        if any(engine == tables["engine"] and reason in str(error) for (engine, _), reason in REFUSED.items()):
            raise NotApplicableError(str(error)) from error
        raise
