"""Convolutions of a stack of rows, each with its own kernels: the fastest implementation for each shape.

Timed is the forward and backward pass of one layer in float32, for k rows with one batch each, with gradients for the
kernels and (except in first layers) for the inputs. The implementations are one convolution per row, which is the
baseline, one grouped convolution, and one grouped convolution whose gradient of the inputs is a forward convolution
with turned kernels. In float64 the benchmark checks that all return the same. On a GPU, `python -m benchmarks.gpu`
times them within CUDA graphs, as stacked steps use them.

    python benchmarks/convolutions.py [--device auto] [--rows 1,4,16] [--repeats 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import report
from torch import Tensor

from fedsim.data.tensors import in_order
from fedsim.system.devices import resolve_device, synchronize
from fedsim.system.precision import full_precision
from fedsim.training.operations import WAYS, Options, one_by_one

SECONDS = 0.15  # minimum duration of each timing
BASELINE = "one by one"


class Shape(NamedTuple):
    """A layer: samples in a batch, channels in, channels out, height and width, size of the kernels, padding.

    A layer of one channel is a network's first, whose inputs need no gradient.
    """

    batch: int
    inputs: int
    outputs: int
    size: int
    kernel: int
    padding: int


SHAPES = {  # the layers of the networks `cnn` and `net`, and two layers of deeper networks
    "cnn, first": Shape(10, 1, 32, 28, 5, 2),
    "cnn, second": Shape(10, 32, 64, 14, 5, 2),
    "net, first": Shape(64, 1, 10, 28, 5, 0),
    "net, second": Shape(64, 10, 20, 12, 5, 0),
    "3x3, 64 channels": Shape(16, 64, 64, 16, 3, 1),
    "1x1, 64 channels": Shape(16, 64, 64, 16, 1, 0),
}


def layer(shape: Shape, k: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return inputs (in the memory order of fedsim's batches), kernels and biases of k rows, equal on all devices."""
    generator = torch.Generator().manual_seed(0)
    sizes = (
        (k * shape.batch, shape.inputs, shape.size, shape.size),
        (k, shape.outputs, shape.inputs, shape.kernel, shape.kernel),
        (k, shape.outputs),
    )
    inputs, *parameters = (torch.randn(size, generator=generator, dtype=dtype).to(device) for size in sizes)
    return [in_order(inputs), *parameters]


def step(way: Callable[..., Tensor], shape: Shape, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the outputs, and the gradients of half their sum of squares."""
    leaves = [tensor.detach().requires_grad_(shape.inputs > 1 or place > 0) for place, tensor in enumerate(tensors)]
    outputs = way(F.conv2d, *leaves, Options(padding=shape.padding))
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return outputs, *torch.autograd.grad(outputs, wanted, outputs.detach())


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, averaged over as many calls as fill SECONDS."""
    run()
    synchronize(device)
    calls, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < SECONDS:
        run()
        synchronize(device)
        calls += 1
    return passed / calls


def measure(shape: Shape, k: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """Return the milliseconds of the baseline per row, and the speedup of each implementation."""
    for name, way in WAYS.items():
        exact = layer(shape, k, torch.double, device)
        for actual, expected in zip(step(way, shape, exact), step(one_by_one, shape, exact), strict=True):
            torch.testing.assert_close(actual, expected, msg=lambda text, name=name: f"{name}: {text}")
    tensors = layer(shape, k, torch.float, device)
    runs = {name: lambda way=way: step(way, shape, tensors) for name, way in WAYS.items()}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):  # in turn, so that a slow period of the machine affects all of them
        for name, run in runs.items():
            taken[name].append(seconds(run, device))
    base = taken[BASELINE]
    faster = {name: [a / b for a, b in zip(base, times, strict=True)] for name, times in taken.items()}
    return {
        "baseline_ms_per_row": round(statistics.median(base) / k * 1e3, 3),
        "times_faster": {name: round(statistics.median(ratios), 2) for name, ratios in faster.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", default="1,4,16", help="comma-separated numbers of rows")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    device = resolve_device(options.device)
    torch.set_num_threads(1)
    with full_precision(device):
        figures = {
            name: {f"{k} rows": measure(shape, k, device, options.repeats) for k in map(int, options.rows.split(","))}
            for name, shape in SHAPES.items()
        }
    report("convolutions", device=device, shapes=figures, baseline=BASELINE, threads=1, repeats=options.repeats)


if __name__ == "__main__":
    main()
