"""A stack of workers takes no more memory on a GPU than `stack_width` reckons with."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import fedsim
from fedsim.core import philox
from fedsim.engines import named
from fedsim.training import forward_functions, stacked
from tests.device.pretend import pretend_gpu
from tests.real_models import GPT

DATA = {"name": "tests.components:tiny", "train": 256}
LOCAL = {"batch_size": 16, "steps": 4}


class Dropping(nn.Module):
    """A model with few parameters, and with many activations, all of which go through dropout."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.ReLU(), nn.Dropout()) for _ in range(layers)])
        self.scale, self.last = nn.Parameter(torch.ones(())), nn.Linear(784, 10)

    def forward(self, x):
        return self.last(self.layers(x.flatten(1) * self.scale))


SMALL_CNN = {"name": "cnn", "classes": 10, "widths": [4, 8], "hidden": 16}
SMALL_GPT = {**GPT["model"], "width": 32, "dropout": 0.1}
MODELS = {
    "cnn with momentum": {"model": SMALL_CNN, "data": DATA, "local": {**LOCAL, "momentum": 0.9}},
    "net": {"model": {"name": "net", "classes": 10}, "data": DATA, "local": LOCAL},
    "dropout alone": {"model": f"{__name__}:Dropping", "data": DATA, "local": LOCAL},
    "gpt": {**GPT, "model": SMALL_GPT, "local": LOCAL},
}


@pytest.mark.parametrize(
    ("model", "width", "ahead", "at_once"),
    [
        *((model, 7, 2**15, 2**12) for model in MODELS),
        *(("dropout alone", 2, *how) for how in ((512, 512), (2**17, 2**22))),
    ],
)
def test_a_stack_fits_into_the_memory_that_is_reckoned_for_it(model, width, ahead, at_once, monkeypatch):
    """`ahead`: number of random blocks that masks of several steps may need. `at_once`: how many a call generates."""
    monkeypatch.setattr(forward_functions, "BLOCKS_PER_STACK", ahead // 32)
    for module in philox, forward_functions:
        monkeypatch.setattr(module, "BLOCKS_AT_ONCE_ON_GPU", at_once)
    reckoned, train = [], stacked.StackTrainer.train

    def width_of(*arguments):
        reckoned.append(stacked.bytes_beside_workers(*arguments[:3]) + width * stacked.bytes_per_worker(*arguments[:3]))
        return width

    def train_in_limits(trainer, *arguments):
        gc.collect()
        memory.limit = memory.sizes.total() + reckoned[0]
        try:
            train(trainer, *arguments)
        finally:
            memory.limit = float("inf")

    monkeypatch.setattr(stacked.StackTrainer, "train", train_in_limits)
    monkeypatch.setattr(named, "stack_width", width_of)
    with pretend_gpu() as gpu:
        memory = gpu.memory
        tables = {"rounds": 1, "workers": 7, "engine": "batched", "cuda_graphs": False, "records": {"curve": False}}
        fedsim.run({**MODELS[model], **tables, "device": "cuda"})
    assert reckoned
