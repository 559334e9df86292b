"""Time and memory of every update processor, compared with a copy of the rows and with plain PyTorch operations.

Each processor compresses 20 rows of 1,663,370 float32 numbers (the model `cnn`), one after another, as a run does. It
is compared with one copy of all rows, and with the obvious PyTorch version, on the same rows. Functions are timed in
turn, and the shortest of several times counts. Both versions must do the same work: deterministic results must be
equal, and random results must have the same mean squared error and the same number of zeros, up to 3 percent. Memory
(Linux only) is the additional peak memory of a separate process, in units of the size of the rows.

    python benchmarks/compression.py [--rows 20] [--repeats 3] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from common import report
from rules import STATUS, memory, seconds, some_updates
from torch import Tensor

from fedsim.core.rows import Layout
from fedsim.models import cnn
from fedsim.processing import apply_chain, initial_states, processor
from fedsim.system.c_libraries import keep_freed_memory

K = 16_633  # one percent
PARAMS = {
    "gaussian_noise": {"std": 0.01},
    "top_k": {"k": K},
    "rand_k": {"k": K},
    "sketch": {"rows": 5, "columns": K, "k": K},
}
MOST_COPIES, MOST_MEMORY, TOLERANCE = 3.0, 0.3, 0.03
SHAPES = [entry.shape for entry in Layout.of(cnn()).parameters]


def ours(name: str, rows: Tensor) -> Callable[[], Tensor]:
    """Return a function that compresses all rows in place. The first call starts from the rows as they are."""
    chain = [processor.bind(processor.get(name), processor.get(name).check(PARAMS.get(name, {})))]
    states = [initial_states(chain, row, SHAPES) for row in rows]

    def compress() -> Tensor:
        for worker, row in enumerate(rows):
            apply_chain(chain, row, (1, worker), {}, states[worker], SHAPES, seed=0)
        return rows

    return compress


# -- The obvious PyTorch versions, of one row


def plain_clip(row: Tensor) -> Tensor:
    return row * (1 / row.norm()).clamp(max=1)


def plain_noise(row: Tensor) -> Tensor:
    return row + 0.01 * torch.randn_like(row)


def plain_top_k(row: Tensor) -> Tensor:
    indices = row.abs().topk(K).indices
    return torch.zeros_like(row).scatter_(0, indices, row[indices])


def plain_rand_k(row: Tensor) -> Tensor:
    indices = torch.randperm(len(row))[:K]
    return torch.zeros_like(row).scatter_(0, indices, row[indices] * len(row) / K)


def plain_qsgd(row: Tensor) -> Tensor:
    norm = row.norm()
    return norm * row.sign() * (16 * row.abs() / norm + torch.rand_like(row)).floor() / 16


def plain_sign(row: Tensor) -> Tensor:
    scale = row.abs().mean()
    return torch.where(row < 0, -scale, scale)


def plain_terngrad(row: Tensor) -> Tensor:
    scale = row.abs().max()
    return scale * row.sign() * torch.bernoulli(row.abs() / scale)


def plain_natural(row: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(row)
    lower = torch.ldexp(mantissa.sign() / 2, exponent)
    return torch.where(torch.rand_like(row) < 2 * mantissa.abs() - 1, 2 * lower, lower)


def plain_cast(row: Tensor) -> Tensor:
    return row.bfloat16().float()


def plain_powersgd(row: Tensor) -> Tensor:
    parts = []
    for shape, part in zip(SHAPES, row.split([math.prod(shape) for shape in SHAPES]), strict=True):
        if len(shape) > 1 and 2 * (shape[0] + part.numel() // shape[0]) < part.numel():
            matrix = part.view(shape[0], -1)
            left = torch.linalg.qr(matrix @ torch.randn(matrix.shape[1], 2)).Q
            part = (left @ (left.T @ matrix)).view(-1)
        parts.append(part)
    return torch.cat(parts)


def plain_sketch(row: Tensor) -> Tensor:
    counters, signs = torch.randint(K, (5, len(row))), 2 * torch.randint(2, (5, len(row))) - 1
    table = torch.zeros(5, K).scatter_add_(1, counters, signs * row)
    estimates = (table.gather(1, counters) * signs).median(0).values
    return plain_top_k(estimates)


PLAIN = {
    "clip": plain_clip,
    "gaussian_noise": plain_noise,
    "top_k": plain_top_k,
    "rand_k": plain_rand_k,
    "qsgd": plain_qsgd,
    "sign": plain_sign,
    "terngrad": plain_terngrad,
    "natural": plain_natural,
    "cast": plain_cast,
    "powersgd": plain_powersgd,
    "sketch": plain_sketch,
}


def check_work(name: str, row: Tensor) -> None:
    """Raise AssertionError unless both versions do the same work on a row."""
    ours_row, plain_row = ours(name, row.clone().unsqueeze(0))()[0], PLAIN[name](row)
    if name in ("clip", "top_k", "sign", "cast"):
        assert torch.allclose(ours_row, plain_row, rtol=1e-4), name
    errors = [float((each - row).double().square().mean()) for each in (ours_row, plain_row)]
    zeros = [int((each == 0).sum()) for each in (ours_row, plain_row)]
    assert math.isclose(*errors, rel_tol=TOLERANCE), (name, errors)
    assert math.isclose(*zeros, rel_tol=TOLERANCE), (name, zeros)


def memories(n: int) -> dict[str, float]:
    """Return the memory of every processor, measured in a new process, where no freed memory hides what it needs."""
    if not STATUS.exists():
        return {}
    at_once = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, __file__, "--memory-only", "--threads=1", f"--rows={n}"]
    return json.loads(subprocess.run(command, env=os.environ | at_once, check=True, capture_output=True).stdout)


def memory_of_processors(n: int) -> dict[str, float]:
    rows, needed = some_updates(n, sum(map(math.prod, SHAPES))), {}
    work = rows.clone()
    for registration in processor:
        compress = ours(registration.name, work)

        def again(compress: Callable[[], Tensor] = compress) -> None:
            work.copy_(rows)
            compress()

        needed[registration.name] = memory(again, rows)
    return needed


def measure(n: int, repeats: int) -> dict[str, Any]:
    d = sum(map(math.prod, SHAPES))
    rows = some_updates(n, d)
    target, magnitudes, work = torch.empty_like(rows), rows.abs(), rows.clone()
    needed, figures = memories(n), {}
    for registration in processor:
        name = registration.name
        check_work(name, rows[0])
        compress = ours(name, work)

        def again(compress: Callable[[], Tensor] = compress) -> None:
            work.copy_(rows)
            compress()

        def plain(name: str = name) -> None:
            for row in rows:
                PLAIN[name](row)

        def select() -> None:
            for row in magnitudes:
                row.topk(K, sorted=False)

        baselines = [select] if name == "top_k" else []
        copied, took, against, *selected = seconds(
            lambda: target.copy_(rows), again, plain, *baselines, repeats=repeats
        )
        took -= copied  # of the rows that are restored
        figures[name] = {
            "ms": round(1e3 * took, 1),
            "copies_of_the_rows": round(took / copied, 2),
            "plain_over_ours": round(against / took, 2),
            "memory": needed.get(name),
        }
        if selected:
            figures[name]["copies_beyond_topk"] = round((took - selected[0]) / copied, 2)
    return {
        "processors": figures,
        "copy_ms": round(1e3 * copied, 1),
        "top_k_within_limit": figures["top_k"]["copies_beyond_topk"] <= MOST_COPIES,
        "memory_within_limit": all((each["memory"] or 0) < MOST_MEMORY for each in figures.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory-only", action="store_true", help="measure only memory")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if arguments.memory_only:
        print(json.dumps(memory_of_processors(arguments.rows)))
        return
    keep_freed_memory()  # as a run does
    figures = measure(arguments.rows, arguments.repeats)
    report("compression", **figures, repeats=arguments.repeats, threads=arguments.threads)


if __name__ == "__main__":
    main()
