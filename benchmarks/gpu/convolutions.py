"""Convolutions of stacks in each way.

Forward and backward pass of a layer in float32, within a CUDA graph, as the steps of stacks are. That all ways give the
same is checked in float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.cases import Case, Context, Facts, check
from benchmarks.gpu.timing import microseconds
from fedsim.engines.stacking.operations import WAYS, way_on

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the other benchmarks, which are programs

from convolutions import SHAPES, Shape, layer, step

ROWS = (4, 10, 100)
ROUNDING = 1e-9  # in float64, relative to the largest number
SECONDS = 0.1  # of each way

torch.set_num_threads(1)


def cases(context: Context) -> list[Case]:
    counts = ROWS if context.on_gpu else ROWS[:1]
    return [
        Case(f"{name}, {rows} rows", partial(measure, context, shape, rows))
        for rows in counts
        for name, shape in SHAPES.items()
    ]


def measure(context: Context, shape: Shape, rows: int) -> Facts:
    """Microseconds of each way."""
    device = torch.device(context.device)
    tensors = layer(shape, rows, torch.float, device)
    found = {
        name: microseconds(captured(context, way, shape, tensors), context.device, SECONDS)["us"]
        for name, way in WAYS.items()
    }
    fastest = min(found, key=lambda name: found[name])
    facts = {"us": found, "fastest": fastest, "now": way_on(device)}
    off = difference(shape, rows, device)
    return check(off <= ROUNDING, f"the ways differ by {off:.1e} of the largest number", off=off, **facts)


def captured(context: Context, way: Callable[..., Tensor], shape: Shape, tensors: list[Tensor]) -> Callable[[], object]:
    """One pass, on a GPU as a CUDA graph."""
    work = partial(step, way, shape, tensors)
    if not context.on_gpu:
        return work
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def difference(shape: Shape, rows: int, device: torch.device) -> float:
    """How far the outputs and gradients of all ways are from those of one row after another, in float64."""
    tensors = layer(shape, rows, torch.double, device)
    expected = step(WAYS["one by one"], shape, tensors)
    worst = 0.0
    for way in WAYS.values():
        for found, right in zip(step(way, shape, tensors), expected, strict=True):
            worst = max(worst, float(((found - right).abs().max() / right.abs().max()).detach()))
    return worst
