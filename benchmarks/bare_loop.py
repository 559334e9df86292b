"""The floor: an experiment as a bare loop in plain PyTorch, in one process with one thread.

One client after another loads the global state and trains with `torch.optim.SGD` on preloaded float tensors. Its state
is added to the weighted average, which is tested in every round. Initial model, cohorts and batches equal those of
fedsim, but PyTorch draws the dropout. After a round without dropout both have the same global row up to rounding.
Long training amplifies the rounding differences in float32, while they stay small in float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from common import CPU, of_torch
from torch import Tensor, nn

from fedsim import Experiment, load_experiment
from fedsim.core.randomness import batch_order, sample_cohort, seed_everything
from fedsim.data import TensorData, load_dataset, partition
from fedsim.system.precision import PRECISIONS

TEST_BATCH = 1000

State = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


class BareRun(NamedTuple):
    rounds: list[float]  # seconds of each round
    accuracy: float  # after the last round
    start: State  # initial global model
    first: State  # global model after the first round


def bare_loop(
    experiment: Experiment,
    device: torch.device = CPU,
    make_model: Callable[[], nn.Module] | None = None,
    loss: Loss | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> BareRun:
    """Run the rounds of an experiment that consists of epochs of plain SGD, averaging and tests.

    Args:
        make_model: creates the model, which must have the parameters of the experiment's model (the default).
        loss: loss function. Default: NLL for a model that outputs log-probabilities, otherwise cross-entropy.
        clock: clock that measures the rounds.
    """
    local, seed = experiment.local, experiment.seed
    assert (experiment.sync, local.algorithm) == ("parameters", "sgd"), "this loop averages parameters after plain SGD"
    assert local.epochs, "this loop trains for whole epochs"
    torch.set_num_threads(1)
    dtype = PRECISIONS[experiment.precision].rows
    train_data, test_data = load_dataset(experiment.data.name, experiment.data.root, **experiment.data.params)
    inputs, targets = preloaded(train_data, device, dtype)
    test_inputs, test_targets = preloaded(test_data, device, dtype)
    tests = list(zip(test_inputs.split(TEST_BATCH), test_targets.split(TEST_BATCH), strict=True))
    split = experiment.partition
    shards = partition(train_data.targets.numpy(), experiment.workers, split.name, seed, **split.params)
    seed_everything(CPU, seed, "model")
    model = (make_model or experiment.model.component)().to(device, dtype)
    loss = loss or _loss_for(model, inputs[:8])
    state = start = {name: value.clone() for name, value in model.state_dict().items()}
    rounds: list[float] = []
    for round in range(1, experiment.rounds + 1):
        started = clock()
        cohort = sample_cohort(seed, round, experiment.workers, experiment.cohort_size).tolist()
        weights = [len(shards[worker]) if experiment.rule.needs_weights else 1 for worker in cohort]
        average = {name: torch.zeros_like(value) for name, value in state.items()}
        for worker, weight in zip(cohort, weights, strict=True):
            shard = torch.as_tensor(shards[worker])
            orders = [batch_order(seed, round, worker, epoch, len(shard)) for epoch in range(local.epochs)]
            batches = [batch for order in orders for batch in shard[order].to(device).split(local.batch_size)]
            seed_everything(device, seed, "forward", round, worker)
            model.load_state_dict(state)
            _train(model, loss, torch.optim.SGD(model.parameters(), **of_torch(local.params)), inputs, targets, batches)
            for name, value in model.state_dict().items():
                if value.is_floating_point():
                    average[name].add_(value, alpha=weight / sum(weights))
                else:  # the number of batches that BatchNorm has seen
                    average[name].copy_(value)
        state = average
        model.load_state_dict(state)
        accuracy = accuracy_of(model, tests)
        rounds.append(clock() - started)
        if round == 1:
            first = state
    return BareRun(rounds, accuracy, *({name: value.cpu() for name, value in kept.items()} for kept in (start, first)))


def without_dropout(experiment: Experiment) -> Experiment:
    """Return the experiment without dropout, so that the loop and fedsim draw the same numbers."""
    if "dropout" not in experiment.model.params:
        return experiment
    return load_experiment(experiment, ["model.dropout=0.0"])


def preloaded(data: TensorData, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return all inputs and targets of a data set."""
    inputs, targets = data.to(CPU, dtype).gather(torch.arange(len(data)))
    return inputs.to(device, memory_format=torch.contiguous_format, copy=True), targets.to(device)


@torch.no_grad()
def _loss_for(model: nn.Module, inputs: Tensor) -> Loss:
    """Return NLL for a model that outputs log-probabilities, otherwise cross-entropy."""
    sums = model.eval()(inputs).exp().sum(1)
    return F.nll_loss if torch.allclose(sums, torch.ones_like(sums)) else F.cross_entropy


def _train(
    model: nn.Module,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
    batches: list[Tensor],
) -> None:
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss(model(inputs.index_select(0, batch)), targets.index_select(0, batch)).backward()
        optimizer.step()


@torch.no_grad()
def accuracy_of(model: nn.Module, tests: list[tuple[Tensor, Tensor]]) -> float:
    """Return the model's accuracy on all test batches."""
    model.eval()
    correct = sum((model(inputs).argmax(-1) == targets).sum() for inputs, targets in tests)
    return int(correct) / sum(targets.numel() for _, targets in tests)
