"""Cases that fail in every way, for the driver of the GPU check."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from benchmarks.gpu.cases import Case, NotApplicableError, check


def cases(context):
    return [
        Case("right", lambda: {"answer": 42}),
        Case("wrong", lambda: check(False, "differs", off=2.0)),
        Case("raises", lambda: 1 / 0),
        Case("does not apply", _not_here),
        Case("aborts", os.abort),
        Case("exits", lambda: os._exit(7)),
        Case("hangs", _hang, limit=0.5),
        Case("prints", _print),
        Case("last", lambda: {"quick": context.quick}),
    ]


def _not_here():
    raise NotApplicableError("not here")


def _hang():
    """With a process of its own, which must not stay behind."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(f"child {child.pid}", flush=True)
    time.sleep(600)


def _print():
    os.write(1, b"\xff\x00 {not json}\n" * 1000)
    return {"object": object()}
