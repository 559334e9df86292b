"""The floor: an experiment as a bare loop in plain PyTorch, in one process with one thread.

One client after another loads the global state and trains with `torch.optim.SGD` on preloaded float tensors. Its state
is added to the weighted average, which is tested in every round. Initial model, cohorts and batches equal those of
fedsim, but PyTorch draws the dropout. After a round without dropout both have the same global row up to rounding.
Long training amplifies the rounding differences in float32, while they stay small in float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    accuracies: Sequence[float] = ()  # after each round
    samples: Sequence[list[int]] = ()  # for each round, number of training samples of each worker of the cohort


class Work(NamedTuple):
    """The work of an experiment's rounds, with the data on a device: what fedsim and its baselines have in common.

    Attributes:
        experiment: experiment that consists of epochs of plain SGD, averaging and tests.
        model: initial global model.
        loss: mean loss of a batch.
        inputs, targets: training data.
        tests: batches of test data.
        shards: numbers of each worker's training samples.
    """

    experiment: Experiment
    model: nn.Module
    loss: Loss
    inputs: Tensor
    targets: Tensor
    tests: list[tuple[Tensor, Tensor]]
    shards: Sequence[Any]

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        device: torch.device = CPU,
        make_model: Callable[[], nn.Module] | None = None,
        loss: Loss | None = None,
    ) -> Work:
        """Load the data and create the model. For the arguments see `bare_loop`."""
        local, seed, split = experiment.local, experiment.seed, experiment.partition
        assert (experiment.sync, local.algorithm) == ("parameters", "sgd"), "baselines average after plain SGD"
        assert local.epochs, "baselines train for whole epochs"
        dtype = PRECISIONS[experiment.precision].rows
        train_data, test_data = load_dataset(experiment.data.name, experiment.data.root, **experiment.data.params)
        inputs, targets = preloaded(train_data, device, dtype)
        tests = [batches.split(TEST_BATCH) for batches in preloaded(test_data, device, dtype)]
        shards = partition(train_data.targets.numpy(), split.name, experiment.workers, seed, **split.params)
        seed_everything(CPU, seed, "model")
        model = (make_model or experiment.model.component)().to(device, dtype)
        loss = loss or _loss_for(model, inputs[:8])
        return cls(experiment, model, loss, inputs, targets, list(zip(*tests, strict=True)), shards)

    def cohort(self, round: int) -> list[int]:
        experiment = self.experiment
        return sample_cohort(experiment.seed, round, experiment.workers, experiment.cohort_size).tolist()

    def orders(self, round: int, worker: int) -> list[Tensor]:
        """Return the numbers of a worker's samples in the order of training, for each epoch, int64 [samples]."""
        shard, epochs = torch.as_tensor(self.shards[worker]), range(self.experiment.local.epochs)
        return [shard[batch_order(self.experiment.seed, round, worker, epoch, len(shard))] for epoch in epochs]


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
    torch.set_num_threads(1)
    work = Work.of(experiment, device, make_model, loss)
    local, seed, model = experiment.local, experiment.seed, work.model
    state = start = {name: value.clone() for name, value in model.state_dict().items()}
    rounds: list[float] = []
    accuracies: list[float] = []
    samples: list[list[int]] = []
    with PRECISIONS[experiment.precision].training(device):
        for round in range(1, experiment.rounds + 1):
            started = clock()
            cohort = work.cohort(round)
            weights = [len(work.shards[worker]) if experiment.rule.needs_weights else 1 for worker in cohort]
            average = {name: torch.zeros_like(value) for name, value in state.items()}
            samples.append([])
            for worker, weight in zip(cohort, weights, strict=True):
                orders = work.orders(round, worker)
                samples[-1].append(sum(map(len, orders)))
                batches = [batch for order in orders for batch in order.to(device).split(local.batch_size)]
                seed_everything(device, seed, "forward", round, worker)
                model.load_state_dict(state)
                _train(work, torch.optim.SGD(model.parameters(), **of_torch(local.params)), batches)
                for name, value in model.state_dict().items():
                    if value.is_floating_point():
                        average[name].add_(value, alpha=weight / sum(weights))
                    else:  # the number of batches that BatchNorm has seen
                        average[name].copy_(value)
            state = average
            model.load_state_dict(state)
            accuracies.append(accuracy_of(model, work.tests))
            rounds.append(clock() - started)
            if round == 1:
                first = state
    return BareRun(rounds, accuracies[-1], on_cpu(start), on_cpu(first), accuracies, samples)


def on_cpu(state: State) -> State:
    return {name: value.cpu() for name, value in state.items()}


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


def _train(work: Work, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> None:
    work.model.train()
    for batch in batches:
        optimizer.zero_grad()
        work.loss(work.model(work.inputs.index_select(0, batch)), work.targets.index_select(0, batch)).backward()
        optimizer.step()


def accuracy_of(model: nn.Module, tests: list[tuple[Tensor, Tensor]]) -> float:
    """Return the model's accuracy on all test batches."""
    return int(right_answers(model, tests)) / sum(targets.numel() for _, targets in tests)


@torch.no_grad()
def right_answers(model: nn.Module, tests: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the number of samples that the model classifies correctly, int64 []."""
    model.eval()
    return torch.stack([(model(inputs).argmax(-1) == targets).sum() for inputs, targets in tests]).sum()
