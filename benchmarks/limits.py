"""The operations and bytes of a training round, and the measured rates of the machine.

One plain training step and one test batch of a single row are counted on the CPU in float32. The counts hold for any
device and engine that does this work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import CPU, of_torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fedsim import Experiment
from fedsim.system.devices import synchronize, usable_cores

VALUE = 4  # bytes of a float32
TEST_BATCH = 1000
COPIED = {"cpu": 2**28, "cuda": 2**30}  # bytes, more than any cache holds
MULTIPLIED = {"cpu": 2048, "cuda": 8192}  # rows and columns of a square matrix
TIMINGS, SECONDS = 5, 0.2  # repetitions of a measurement, and minimum seconds of each


class Cost(NamedTuple):
    """The cost of some work.

    Attributes:
        flops: floating-point operations of convolutions and matrix products. A multiply-add counts as two.
        row_bytes: memory traffic of the rows, assuming that everything else stays in caches and registers.
        operation_bytes: memory traffic if every PyTorch operation reads its inputs from memory and writes its outputs.
        operations: number of operations without views. On a GPU each is one or a few kernels.
    """

    flops: float
    row_bytes: float
    operation_bytes: float
    operations: float

    def times(self, factor: float) -> Cost:
        return Cost(*(factor * part for part in self))

    def plus(self, cost: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(self, cost, strict=True)))


class Traffic(TorchDispatchMode):
    """A mode that counts the operations in its `with` block and the bytes of their inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        schema = function._schema
        if not function.is_view and not schema.name.startswith(("aten::empty", "aten::new_empty")):
            values = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
            changed = [values.get(name) for name in (a.name for a in schema.arguments if a.is_write)]
            made = [] if any(each.alias_info for each in schema.returns) else result
            self.operations += 1
            self.bytes += _bytes_of((values, changed, made))
        return result


def _bytes_of(tree: Any) -> int:
    """Return the bytes of all tensors in nested lists and dicts. Repeated elements of expanded tensors count once."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)


def measured(work: Callable[[], object], row_bytes: float) -> Cost:
    """Return the cost of executing `work` on the CPU."""
    with FlopCounterMode(display=False) as flops:
        work()
    with Traffic() as traffic:
        work()
    return Cost(flops.get_total_flops(), row_bytes, traffic.bytes, traffic.operations)


def step_cost(model: nn.Module, inputs: Tensor, targets: Tensor, **sgd: Any) -> Cost:
    """Return the cost of one SGD step on one batch on the CPU.

    The forward pass reads all d values of a row. The backward pass reads all except the first layer's weights, because
    images need no gradient. The gradient is written and read, and the step reads and writes the row and the momentum
    (if any). This makes 6 d values (8 d with momentum) minus those of the first layer.
    """
    first, d = next(model.parameters()).numel(), sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), **sgd)
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    step()  # the first step creates the momentum
    return measured(step, ((8 if sgd.get("momentum") else 6) * d - first) * VALUE)


def test_cost(model: nn.Module, inputs: Tensor) -> Cost:
    """Return the cost of the forward pass of one test batch."""
    d = sum(parameter.numel() for parameter in model.parameters())

    @torch.no_grad()
    def forward() -> None:
        model.eval()(inputs)

    return measured(forward, d * VALUE)


def average_cost(rows: int, d: int) -> Cost:
    """Return the cost of setting rows to the global row and averaging them: each row is written once and read once."""
    traffic = 2 * rows * d * VALUE
    return Cost(2 * rows * d, traffic, traffic, 2 * rows)


def round_cost(experiment: Experiment, sample_shape: tuple[int, ...], train_samples: int, test_samples: int) -> Cost:
    """Return the cost of a whole round (training, averaging and testing). A short batch counts proportionally."""
    local, cohort = experiment.local, experiment.cohort_size
    assert local.epochs, "the cost of a round requires local.epochs"
    model = experiment.model.component()
    inputs, targets = torch.randn(local.batch_size, *sample_shape), torch.zeros(local.batch_size, dtype=torch.long)
    steps = local.epochs * cohort * train_samples / experiment.workers / local.batch_size
    training = step_cost(model, inputs, targets, **of_torch(local.params)).times(steps)
    testing = test_cost(model, torch.randn(TEST_BATCH, *sample_shape)).times(test_samples / TEST_BATCH)
    aggregator = average_cost(cohort, sum(parameter.numel() for parameter in model.parameters()))
    return training.plus(testing).plus(aggregator)


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second, read and written, of a large copy within device memory."""
    source = torch.rand(COPIED[device.type] // VALUE, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), device)


def matmul_rate(device: torch.device) -> float:
    """Return the floating-point operations per second of a large float32 matrix product in PyTorch's current mode."""
    n = MULTIPLIED[device.type]
    a, b = torch.randn(2, n, n, device=device)
    product = torch.empty_like(a)
    return 2 * n**3 / seconds(lambda: torch.mm(a, b, out=product), device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the shortest of several measured times. Short work is repeated within each measurement."""
    threads = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    try:
        once = timed(work, 1, device)  # warm-up
        once = timed(work, 1, device)
        count = max(1, round(SECONDS / once))
        return min(timed(work, count, device) / count for _ in range(TIMINGS))
    finally:
        torch.set_num_threads(threads)


def timed(work: Callable[[], object], count: int, device: torch.device) -> float:
    """Return the seconds of `count` calls, including the work on the device."""
    synchronize(device)
    started = time.perf_counter()
    for _ in range(count):
        work()
    synchronize(device)
    return time.perf_counter() - started


class Machine(NamedTuple):
    bandwidth: float  # bytes per second
    rate: float  # floating-point operations per second

    @classmethod
    def measured(cls, device: torch.device = CPU) -> Machine:
        return cls(copy_bandwidth(device), matmul_rate(device))

    def figures(self) -> dict[str, float]:
        return {"copy_gb_per_second": round(self.bandwidth / 1e9, 1), "matmul_gflops": round(self.rate / 1e9, 1)}

    def compare(self, cost: Cost, round_seconds: float) -> dict[str, float]:
        """Return a round's counts, their times at the machine's best rates, and the round's multiple of the limit.

        The limit is the larger of the times for arithmetic and for row traffic, assuming that no cache holds rows
        between steps.
        """
        arithmetic, rows = cost.flops / self.rate, cost.row_bytes / self.bandwidth
        return {
            "gflop": round(cost.flops / 1e9, 3),
            "row_gb": round(cost.row_bytes / 1e9, 4),
            "operation_gb": round(cost.operation_bytes / 1e9, 4),
            "operations": round(cost.operations),
            "seconds_of_arithmetic": round(arithmetic, 5),
            "seconds_of_row_traffic": round(rows, 5),
            "seconds_of_operation_traffic": round(cost.operation_bytes / self.bandwidth, 5),
            "times_the_limit": round(round_seconds / max(arithmetic, rows), 2),
        }
