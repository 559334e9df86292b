"""Random numbers: the same bits on the CPU and on the GPU, and after a capture that has failed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cases import Case, Context, Facts, check, need_gpu
from benchmarks.gpu.comparing import STACKED, TINY, run
from fedsim import philox

KEYS, COUNT = (1, 2**62 + 12345, 7), 10_001
PUBLISHED = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)  # the first block of key 0
MODELS = {"dropout": {"model": "net"}, "augmentation": {"data": {"dataset": "tests.plugs:tiny", "augment": ["flip"]}}}


def cases(context: Context) -> list[Case]:
    exact: dict[str, Callable[[philox.Stream], Tensor]] = {
        "words": lambda stream: philox.words(stream, COUNT),
        "uniform, float32": lambda stream: philox.uniform(stream, COUNT),
        "uniform, float64": lambda stream: philox.uniform(stream, COUNT, torch.float64),
        "permutations": lambda stream: philox.permutations(stream, torch.tensor(COUNT).to(stream.keys.device), COUNT),
    }
    return [
        Case("published words", partial(published, context)),
        *(Case(name, partial(same_bits, context, draw)) for name, draw in exact.items()),
        Case("normal", partial(same_bits, context, lambda stream: philox.normal(stream, COUNT), 1e-6)),
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


def same_bits(context: Context, draw: Callable[[philox.Stream], Tensor], tolerance: float = 0.0) -> Facts:
    keys = torch.tensor(KEYS)
    here, there = (draw(philox.Stream(keys.to(device), step=3, layer=2)).cpu() for device in ("cpu", context.device))
    off = float((here.double() - there.double()).abs().max())
    return check(off <= tolerance, f"CPU and device differ by {off}", off=off)


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
    """What PyTorch itself draws afterwards; last, since it may spoil this process."""
    need_gpu(context)
    numbers, told = torch.ones(1000, device=context.device), "nothing"
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            numbers.sum().item()
    except Exception as error:
        told = str(error)[:200]
    torch.nn.functional.dropout(numbers, 0.5)
    return {"capture": told, "drawn": torch.rand(3, device=context.device).tolist()}
