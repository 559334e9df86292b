"""The naive way: in every round each worker gets a new process with its own context, model and optimizer.

It is the kind version: the samples are given to the processes as tensors, in float32, and need no loader.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedsim
from benchmarks.common import of_torch
from fedsim.core.randomness import sample_cohort

TEST_BATCH = 1000

State = dict[str, Tensor]


class NaiveRun(NamedTuple):
    rounds: list[float]  # seconds of each
    accuracy: float  # after the last
    steps: int  # of all workers in all rounds


def naive_run(experiment: fedsim.Experiment, device: str, at_a_time: int) -> NaiveRun:
    """Rounds of plain SGD for some epochs and a mean, with so many processes at a time."""
    data, split = experiment.data, experiment.partition
    (inputs, targets), (test_inputs, test_targets) = (
        part.gather(torch.arange(len(part))) for part in fedsim.load_dataset(data.dataset, data.root, **data.params)
    )
    shards = fedsim.partition(targets.numpy(), experiment.workers, split.strategy, experiment.seed, **split.params)
    context = torch.multiprocessing.get_context("spawn")
    torch.manual_seed(experiment.seed)
    model = experiment.model.component()
    rounds, steps = [], 0
    for round in range(1, experiment.rounds + 1):
        started = time.perf_counter()
        cohort = sample_cohort(experiment.seed, round, experiment.workers, experiment.cohort_size).tolist()
        state = {name: value.numpy() for name, value in model.state_dict().items()}
        found = []
        for first in range(0, len(cohort), at_a_time):
            results = context.Queue()
            processes = []
            for worker in cohort[first : first + at_a_time]:
                mine = torch.from_numpy(shards[worker])
                given = inputs[mine].numpy(), targets[mine].numpy(), experiment.seed + 1000 * round + worker
                processes.append(context.Process(target=_worker, args=(experiment, device, state, *given, results)))
                processes[-1].start()
            found += [results.get(timeout=60) for _ in processes]
            for process in processes:
                process.join()
        steps += sum(taken for taken, _ in found)
        model.load_state_dict(
            {name: sum(torch.from_numpy(each[name]) for _, each in found) / len(found) for name in state}
        )
        accuracy = _accuracy(model.to(device), test_inputs.to(device), test_targets.to(device))
        model.cpu()
        rounds.append(time.perf_counter() - started)
    return NaiveRun(rounds, accuracy, steps)


def _worker(
    experiment: fedsim.Experiment, device: str, state: Any, inputs: Any, targets: Any, seed: int, results: Any
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = experiment.model.component()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    model.to(device)
    x, y = torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device)
    loss = F.nll_loss if _gives_log_probabilities(model, x[:8]) else F.cross_entropy
    optimizer = torch.optim.SGD(model.parameters(), **of_torch(experiment.local.params))
    model.train()
    steps = 0
    for _ in range(experiment.local.epochs):
        for batch in torch.randperm(len(x), device=device).split(experiment.local.batch_size):
            optimizer.zero_grad()
            loss(model(x[batch]), y[batch]).backward()
            optimizer.step()
            steps += 1
    results.put((steps, {name: value.cpu().numpy() for name, value in model.state_dict().items()}))


@torch.no_grad()
def _gives_log_probabilities(model: nn.Module, inputs: Tensor) -> bool:
    sums = model.eval()(inputs).exp().sum(1)
    return torch.allclose(sums, torch.ones_like(sums))


@torch.no_grad()
def _accuracy(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    model.eval()
    pairs = zip(inputs.split(TEST_BATCH), targets.split(TEST_BATCH), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in pairs) / len(targets)
