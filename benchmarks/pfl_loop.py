"""Federated averaging with pfl, in one process with PyTorch's default number of threads.

Initial model, cohorts and batches equal those of fedsim, as in `bare_loop.py`.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from bare_loop import TEST_BATCH, BareRun, accuracy_of, preloaded
from common import CPU, of_torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor

from fedsim import Experiment
from fedsim.core.randomness import batch_order, sample_cohort, seed_everything
from fedsim.data import load_dataset, partition
from fedsim.system.precision import PRECISIONS


def pfl_loop(
    experiment: Experiment, device: torch.device = CPU, clock: Callable[[], float] = time.perf_counter
) -> BareRun:
    """Run the rounds of an experiment whose workers have equally many samples, and train one epoch of plain SGD.

    `clock` measures the rounds. In the first round, pfl also evaluates the workers' models.
    """
    local, seed = experiment.local, experiment.seed
    assert (experiment.sync, local.algorithm, local.epochs) == ("parameters", "sgd", 1), "one epoch of plain SGD"
    dtype = PRECISIONS[experiment.precision].rows
    train_data, test_data = load_dataset(experiment.data.name, experiment.data.root, **experiment.data.params)
    inputs, targets = preloaded(train_data, device, dtype)
    tests = list(zip(*(part.split(TEST_BATCH) for part in preloaded(test_data, device, dtype)), strict=True))
    split = experiment.partition
    shards = partition(train_data.targets.numpy(), split.name, experiment.workers, seed, **split.params)
    seed_everything(CPU, seed, "model")
    model = experiment.model.component().to(device, dtype)
    users = (
        (round, worker)
        for round in itertools.count(1)
        for worker in sample_cohort(seed, round, experiment.workers, experiment.cohort_size).tolist()
    )

    def user(user_id: tuple[int, int]) -> Dataset:
        round, worker = user_id
        shard = torch.as_tensor(shards[worker])
        positions = shard[batch_order(seed, round, worker, 0, len(shard))].to(device)
        return Dataset([inputs.index_select(0, positions), targets.index_select(0, positions)], user_id=str(worker))

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model.train()(inputs), targets)

    class Clock(TrainingProcessCallback):
        """Test after each round, and note times, the accuracy and the first model."""

        def __init__(self) -> None:
            self.ends, self.accuracy, self.first = [clock()], 0.0, dict[str, Tensor]()

        def after_central_iteration(self, *args: Any, **kwargs: Any) -> tuple[bool, Metrics]:
            self.accuracy = accuracy_of(model, tests)
            self.ends.append(clock())
            self.first = self.first or {name: value.clone() for name, value in model.state_dict().items()}
            return False, Metrics()

    model.loss, model.metrics = loss, lambda inputs, targets: dict[str, Any]()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    sgd = of_torch(local.params)
    lr = sgd.pop("lr")
    backend = SimulatedBackend(*[FederatedDataset(user, lambda: next(users))] * 2)
    noted = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(experiment.rounds, sys.maxsize, experiment.cohort_size, None),
        backend,
        PyTorchModel(model, partial(torch.optim.SGD, **sgd), torch.optim.SGD(model.parameters(), 1.0)),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=lr, local_batch_size=local.batch_size),
        NNEvalHyperParams(local_batch_size=TEST_BATCH),
        [noted],
    )
    return BareRun([end - begin for begin, end in itertools.pairwise(noted.ends)], noted.accuracy, start, noted.first)
