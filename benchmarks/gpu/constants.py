"""The cost of a launch, a wait, a copy, a node of a graph and a product. Imports PyTorch only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.cases import Case, Context, Facts, need_gpu
from benchmarks.gpu.timing import microseconds

PRODUCTS = {  # the type, and whether float32 products may be computed in TF32
    **{"float32": (torch.float32, False), "tf32": (torch.float32, True)},
    **{"bf16": (torch.bfloat16, False), "float64": (torch.float64, False)},
}
STACKS = {  # rows, batch, inputs and outputs of a layer
    **{"2nn, first": (100, 10, 784, 200), "cnn, third": (10, 10, 3136, 512), "net, third": (4, 64, 320, 50)},
}
SORTED = ((10, 1_663_370), (100, 199_210))

torch.set_num_threads(1)


def cases(context: Context) -> list[Case]:
    device = context.device
    small: dict[str, Callable[[], Callable[[], object]]] = {
        "launch": lambda: partial(torch.randn(1000, device=device).add_, 1),
        "wait (item)": lambda: torch.ones((), device=device).item,
        "wait (nonzero)": lambda: torch.ones(10, dtype=torch.bool, device=device).nonzero,
        "copy to the device, 8 kB": lambda: partial(torch.zeros(1000, dtype=torch.int64).to, device, copy=True),
        "copy to the host, 8 bytes": lambda: partial(torch.ones((), device=device).to, "cpu", copy=True),
        "index by a list": lambda: partial(torch.randn(100, 1000, device=device).__getitem__, [0, 1, 2, 3]),
    }
    return [
        *(Case(name, lambda make=make: microseconds(make(), device)) for name, make in small.items()),
        Case("bandwidth", partial(bandwidth, context)),
        *(Case(f"product, {name}", partial(product, context, *how)) for name, how in PRODUCTS.items()),
        *(Case(f"graph of {count} nodes", partial(graph, context, count)) for count in (1, 30, 120)),
        *(Case(f"stack, {name}", partial(stack, context, *sizes)) for name, sizes in STACKS.items()),
        *(Case(f"sort, {n} x {d}", partial(sort, context, n, d)) for n, d in SORTED),
    ]


def bandwidth(context: Context) -> Facts:
    """Bytes read and written by a copy within the device's memory."""
    source = torch.rand(2**28 if context.on_gpu else 2**24, device=context.device)
    target = torch.empty_like(source)
    return {
        "gb_per_second": round(2e-3 * source.nbytes / microseconds(lambda: target.copy_(source), context.device)["us"])
    }


def product(context: Context, dtype: torch.dtype, tf32: bool) -> Facts:
    if tf32:
        need_gpu(context)
    n = 8192 if context.on_gpu else 512
    a, b = torch.randn(2, n, n, device=context.device).to(dtype)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        us = microseconds(lambda: a @ b, context.device)["us"]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return {"tflop_per_second": round(2e-6 * n**3 / us, 2)}


def graph(context: Context, count: int) -> Facts:
    """Kernels that do next to nothing, one after another in a CUDA graph."""
    need_gpu(context)
    numbers = torch.ones(1000, device=context.device)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(count):
            numbers.add_(1)
    found = microseconds(captured.replay, context.device)
    return {**found, "us_per_node": round(found["us"] / count, 3)}


def stack(context: Context, rows: int, batch: int, inputs: int, outputs: int) -> Facts:
    """The forward pass of a linear layer of many rows, and its SGD step in one product."""
    if context.quick:
        rows = min(rows, 4)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=context.device)

    images, gradients = random(rows, batch, inputs), random(rows, batch, outputs)
    weights, biases = random(rows, outputs, inputs), random(rows, 1, outputs)
    forward = microseconds(lambda: torch.baddbmm(biases, images, weights.mT), context.device)["us"]
    step = microseconds(lambda: weights.baddbmm_(gradients.mT, images, alpha=-1e-6), context.device)["us"]
    return {
        **{"forward_us": forward, "forward_gb_per_second": round(1e-3 * weights.nbytes / forward)},
        **{"step_us": step, "step_gb_per_second": round(2e-3 * weights.nbytes / step)},
    }


def sort(context: Context, n: int, d: int) -> Facts:
    """Operations that rules consist of, over n rows."""
    rows = torch.randn(n, d if context.on_gpu else d // 100, device=context.device)
    work = {"mean": lambda: rows.mean(0), "sort": lambda: rows.sort(0), "median": lambda: rows.median(0)}
    return {f"{name}_us": microseconds(each, context.device)["us"] for name, each in work.items()}
