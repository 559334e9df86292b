"""A case that hangs, before others."""

from __future__ import annotations

import time

from benchmarks.gpu.cases import Case


def cases(context):
    return [Case("hangs", lambda: time.sleep(600), limit=600), Case("second", dict), Case("third", dict)]
