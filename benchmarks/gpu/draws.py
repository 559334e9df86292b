"""Random numbers: the same bits on the CPU and on the GPU, and after a capture that has failed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.cases import Case, Context, Facts, check, need_gpu
from benchmarks.gpu.comparing import STACKED, TINY, run
from fedsim.core import philox
from fedsim.core.randomness import Draws
from fedsim.engines.trainers.capture import GraphPool
from fedsim.engines.trainers.dropout import Dropout, dropout_factors

COUNT = 10_001
KEYS = (1, 2**62 + 12345, 7)
PUBLISHED = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)  # the first block of key 0
ROUNDING = 1e-6  # of logarithms and cosines
CALLS: dict[str, Callable[[Draws], Tensor]] = {
    "uniform, float32": lambda draws: draws.uniform(COUNT, dtype=torch.float32),
    "uniform, float64": lambda draws: draws.uniform(COUNT, dtype=torch.float64),
    "integers": lambda draws: draws.integers(1000, COUNT),
    "permutation": lambda draws: draws.permutation(COUNT),
    "choice": lambda draws: draws.choice(COUNT, 100),
    "normal": lambda draws: draws.normal(COUNT, dtype=torch.float32),
}
MODELS = {"dropout": {"model": "net"}, "augmentation": {"data": {"dataset": "tests.plugs:tiny", "augment": ["flip"]}}}


def cases(context: Context) -> list[Case]:
    return [
        Case("published words", partial(published, context)),
        *(Case(name, partial(same_numbers, context, name)) for name in CALLS),
        Case("dropout masks", partial(same_masks, context)),
        *(
            Case(f"{name} of serial and batched", partial(engines, context, changes))
            for name, changes in MODELS.items()
        ),
        Case("in a captured graph", partial(in_a_graph, context)),
        Case("after a failed capture", partial(after_a_failed_capture, context)),
    ]


def published(context: Context) -> Facts:
    key = torch.zeros((), dtype=torch.int64, device=context.device)
    found = philox.words(philox.Stream(key), 4).tolist()
    return check(found == list(PUBLISHED), "not the published words", found=found)


def same_numbers(context: Context, name: str) -> Facts:
    """The first call, and that of a later step."""
    off = 0.0
    for step in (0, 7):
        cpu, gpu = (CALLS[name](Draws.of(0, "check", 1, device=device).steps()(step)).cpu() for device in both(context))
        off = max(off, float((cpu.double() - gpu.double()).abs().max()))
    bound = ROUNDING if name == "normal" else 0.0
    return check(off <= bound, f"CPU and device differ by {off}", off=off)


def same_masks(context: Context) -> Facts:
    layers = [Dropout(F.dropout, 0.5, (50,)), Dropout(F.dropout, 0.1, (4, 7))]
    cpu, gpu = (
        dropout_factors(torch.tensor(KEYS, device=device), 3, 2, 10, layers, torch.float32) for device in both(context)
    )
    return check(all(torch.equal(a, b.cpu()) for a, b in zip(cpu, gpu, strict=True)), "CPU and device differ")


def both(context: Context) -> tuple[str, str]:
    return "cpu", context.device


def engines(context: Context, changes: dict[str, Any]) -> Facts:
    """Both engines on the device; `engines` compares each with the CPU."""
    tables = {**TINY, **changes}
    serial, batched = (run(context, {**tables, **way}).global_row for way in ({"engine": "serial"}, STACKED))
    off = float((serial - batched).abs().max())
    return check(off <= 1e-9, f"they differ by {off:.1e}", off=off)


def in_a_graph(context: Context) -> Facts:
    """A replay draws by the key and the step that lie in memory then."""
    need_gpu(context)
    keys, step = torch.tensor(KEYS, device=context.device), torch.zeros((), dtype=torch.int64, device=context.device)
    philox.words(philox.Stream(keys, step), COUNT)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = philox.words(philox.Stream(keys, step), COUNT)
    step.fill_(5)
    graph.replay()
    expected = philox.words(philox.Stream(torch.tensor(KEYS), 5), COUNT)
    return check(torch.equal(found.cpu(), expected), "a replay draws other words")


def after_a_failed_capture(context: Context) -> Facts:
    """Whether PyTorch can draw after a failed capture; the last case, since it may damage this process."""
    need_gpu(context)
    numbers, message = torch.ones(1000, device=context.device), ""
    try:
        GraphPool(numbers.device).record(lambda: numbers.sum().item())
    except Exception as error:
        message = str(error)[:200]
    check(bool(message), "a capture that reads a number did not fail")
    torch.nn.functional.dropout(numbers, 0.5)
    return {"capture": message, "drawn": torch.rand(3, device=context.device).tolist()}
