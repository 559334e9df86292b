"""The process of a section: it runs one case after another and writes a JSON line immediately after each.

python -m benchmarks.gpu.section SECTION OPTIONS, as the driver starts it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, TextIO

from benchmarks.gpu.cases import ERROR, OK, SKIPPED, WRONG, Case, Context, NotApplicableError, WrongResultError
from benchmarks.gpu.plan import REFERENCES, Section, text_asked

ROOT = Path(__file__).resolve().parents[2]
SPOILT = 3  # exit status: the device can no longer be used by this process; the next case needs a new one
MOST_TEXT = 1500  # characters of an error


def cases_of(section: Section, context: Context) -> list[Case]:
    """The cases of a section that are to be run: with --quick some of them, unless they are asked for by name."""
    text = text_asked(context.only, section.name) or ""
    cases = importlib.import_module(section.module).cases(context)
    return cases[:: section.every] if context.quick and not text else [case for case in cases if text in case.name]


def run_case(case: Case) -> dict[str, Any]:
    """The outcome of a case, as the fields of its line."""
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = _outcome(case)
    outcome["seconds"] = round(time.perf_counter() - started, 3)
    if caught:
        outcome["warnings"] = sorted({f"{each.category.__name__}: {each.message}"[:300] for each in caught})
    return outcome


def _outcome(case: Case) -> dict[str, Any]:
    try:
        return {"status": OK, "facts": case.work() or {}}
    except WrongResultError as wrong:
        return {"status": WRONG, "error": str(wrong)[:MOST_TEXT], "facts": wrong.facts}
    except NotApplicableError as skipped:
        return {"status": SKIPPED, "error": str(skipped)}
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(ROOT))]
        places = [f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}" for frame in frames]
        text = f"{type(error).__name__}: {error}"[:MOST_TEXT]
        return {"status": ERROR, "error": text, "where": places[-3:], "trace": traceback.format_exc()[-3000:]}


def device_works(device: str) -> bool:
    """Whether this process can still compute on the device, which it cannot after an illegal access, for one."""
    import torch

    with contextlib.suppress(Exception):
        return torch.ones(3, device=device).sum().item() == 3
    return False


def main() -> None:
    options = options_of()
    os.set_inheritable(options.lines, False)
    section = Section(**json.loads(options.section))
    if section.name == REFERENCES.name:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    context = Context(options.device, options.quick, options.references, options.out, tuple(options.only))
    with open(options.lines, "w", encoding="utf-8") as lines:
        try:
            cases = cases_of(section, context)[options.part :: options.parts]
        except Exception as error:
            raise SystemExit(f"{type(error).__name__}: {error}") from error
        tell(lines, cases=[case.name for case in cases])
        for number, case in enumerate(cases[options.begin :], options.begin):
            tell(lines, begin=number, limit=case.limit)
            faulthandler.dump_traceback_later(max(1.0, case.limit - 2))
            outcome = run_case(case)
            faulthandler.cancel_dump_traceback_later()
            tell(lines, end=number, line=outcome)
            gc.collect()
            if outcome["status"] in (WRONG, ERROR) and context.on_gpu and not device_works(context.device):
                os._exit(SPOILT)


def tell(lines: TextIO, **fields: Any) -> None:
    lines.write(json.dumps(fields, default=str) + "\n")
    lines.flush()


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("section", help="its fields as a JSON object")
    parser.add_argument("--lines", type=int, required=True, help="file descriptor")
    parser.add_argument("--device", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--references", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", type=int, required=True)
    parser.add_argument("--parts", type=int, required=True)
    parser.add_argument("--begin", type=int, required=True, help="number of the first case")
    parser.add_argument("--only", action="append", default=[], help="as of the check, once for each word")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
