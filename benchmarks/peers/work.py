"""The work that every program does, and what a program reports about it. Imports only PyTorch and NumPy."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

TEST_BATCH = 1000
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

State = dict[str, Tensor]


class Work(NamedTuple):
    """Rounds of federated averaging with plain SGD.

    Attributes:
        make: creates the network, with parameters to be replaced by `state`.
        loss: mean loss of a batch of outputs and targets.
        state: initial global model.
        inputs, targets: training samples of all clients.
        test_inputs, test_targets: samples on which every round tests the global model.
        shards: numbers of each client's training samples.
        weights: each client's weight in averages.
        cohorts: clients of each round.
        orders: for each round, client of its cohort and epoch, the sample numbers in the order of training.
        sgd: arguments of `torch.optim.SGD`.
        batch_size: number of samples per step. The last batch of an epoch may be smaller.
    """

    make: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    state: State
    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    shards: list[np.ndarray]
    weights: list[float]
    cohorts: list[list[int]]
    orders: list[list[list[np.ndarray]]]
    sgd: dict[str, Any]
    batch_size: int

    def model(self) -> nn.Module:
        """Return a new copy of the initial global model."""
        parameter = next(iter(self.state.values()))
        model = self.make().to(parameter.device, parameter.dtype)
        model.load_state_dict(self.state)
        return model

    def batches(self, round: int, slot: int) -> list[Tensor]:
        """Return the sample numbers of each step, int64 [samples].

        `round` counts from 0, and `slot` is the client's position in the round's cohort.
        """
        orders = [torch.from_numpy(order).to(self.inputs.device) for order in self.orders[round][slot]]
        return [batch for order in orders for batch in order.split(self.batch_size)]

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> None:
        """Take a step on each batch, as a user of PyTorch would write it."""
        model.train()
        for batch in batches:
            optimizer.zero_grad()
            self.loss(model(self.inputs.index_select(0, batch)), self.targets.index_select(0, batch)).backward()
            optimizer.step()

    @torch.no_grad()
    def right_answers(self, model: nn.Module) -> Tensor:
        """Return the number of correct predictions on the test samples, int64 []."""
        model.eval()
        tests = zip(self.test_inputs.split(TEST_BATCH), self.test_targets.split(TEST_BATCH), strict=True)
        return torch.stack([(model(inputs).argmax(-1) == targets).sum() for inputs, targets in tests]).sum()

    def accuracy(self, model: nn.Module) -> float:
        return int(self.right_answers(model)) / self.test_targets.numel()


class Result(NamedTuple):
    """What a program did.

    Attributes:
        rounds: seconds of each round, with its test.
        accuracies: test accuracy after each round.
        first, last: global model after the first and after the last round.
        samples, steps: numbers of training samples and of SGD steps in all rounds, counted where they were trained.
    """

    rounds: list[float]
    accuracies: list[float]
    first: State
    last: State
    samples: int
    steps: int


class Log:
    """A program's notes about its rounds, from its creation at the start of the first round."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock, self.ends = clock, [clock()]
        self.accuracies: list[float] = []
        self.first: State = {}
        self.samples = self.steps = 0

    def trained(self, batches: list[Tensor]) -> None:
        """Note that a client has trained on these batches."""
        self.samples += sum(map(len, batches))
        self.steps += len(batches)

    def end_round(self, accuracy: float, state: State) -> None:
        """Note the end of a round, after which the global model is `state`."""
        self.ends.append(self.clock())
        self.accuracies.append(accuracy)
        self.first = self.first or copied(state)

    def result(self, state: State) -> Result:
        rounds = [end - begin for begin, end in pairwise(self.ends)]
        return Result(rounds, self.accuracies, self.first, copied(state), self.samples, self.steps)


def copied(state: State) -> State:
    return {name: value.detach().to("cpu", copy=True) for name, value in state.items()}


@cache
def load(path: str, shared: bool = False) -> Work:
    """Return the work in a file, and set one thread per process.

    `shared`: map the data into memory, so that all processes of a program have one copy together.
    """
    torch.set_num_threads(1)
    return torch.load(path, mmap=shared, weights_only=False)


def main(program: Callable[[str], Result | None]) -> None:
    """Run a program with the command line WORK RESULT. It returns None in processes that have no result."""
    work, path = sys.argv[1:]
    result = program(work)
    if result is not None:
        torch.save(result, path)


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over the tokens of a batch."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def repaired_torchvision() -> torch.library.Library | None:
    """Let a program import torchvision that was compiled for another build of PyTorch. Keep the result."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        operators = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return operators
    return None
