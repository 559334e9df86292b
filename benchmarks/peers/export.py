"""The work of an experiment, with the same initial model, cohorts and batches as in fedsim."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import CPU, of_torch
from torch import Tensor, nn

from benchmarks.peers.networks import NETWORKS
from benchmarks.peers.work import Work, token_loss
from fedsim import Experiment
from fedsim.core.randomness import batch_order, sample_cohort, seed_everything
from fedsim.data import TensorData, load_dataset, partition
from fedsim.system.precision import PRECISIONS


def work_of(experiment: Experiment, device: torch.device = CPU, make: Callable[[], nn.Module] | None = None) -> Work:
    """Return the work of an experiment that consists of plain SGD, averaging and tests.

    `make` creates a network with the parameters of the experiment's model (the default).
    """
    local, seed, split = experiment.local, experiment.seed, experiment.partition
    assert (experiment.sync, local.algorithm) == ("parameters", "sgd"), "other programs average after plain SGD"
    dtype = PRECISIONS[experiment.precision].rows
    train, test = load_dataset(experiment.data.name, experiment.data.root, **experiment.data.params)
    inputs, targets = preloaded(train, device, dtype)
    shards = partition(targets.cpu().numpy(), split.name, experiment.workers, seed=seed, ids=train.ids, **split.params)
    seed_everything(CPU, seed, "model")
    model = experiment.model.component().to(device, dtype)
    test_inputs, test_targets = preloaded(test, device, dtype)
    cohorts = [
        sample_cohort(seed, round, experiment.workers, experiment.cohort_size).tolist()
        for round in range(1, experiment.rounds + 1)
    ]
    return Work(
        make or experiment.model.component,
        _loss_for(model, test_inputs[:8], test_targets[:8]),
        model.state_dict(),
        inputs,
        targets,
        test_inputs,
        test_targets,
        shards=list(shards),
        weights=[len(shard) if experiment.rule.needs_weights else 1 for shard in shards],
        cohorts=cohorts,
        orders=[
            [list(_orders(experiment, round, client, shards[client])) for client in cohort]
            for round, cohort in enumerate(cohorts, 1)
        ],
        sgd=of_torch(local.params),
        batch_size=local.batch_size,
    )


def without_fedsim(experiment: Experiment) -> Callable[[], nn.Module]:
    """Return a factory of the experiment's network that does not import fedsim."""
    name, _, attribute = experiment.model.name.partition(":")
    factory = getattr(importlib.import_module(name), attribute) if attribute else NETWORKS[name]
    takes = inspect.signature(factory).parameters
    return partial(factory, **{key: value for key, value in experiment.model.params.items() if key in takes})


def preloaded(data: TensorData, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return all inputs and targets of a data set."""
    inputs, targets = data.to(CPU, dtype).gather(torch.arange(len(data)))
    return inputs.to(device, memory_format=torch.contiguous_format, copy=True), targets.to(device)


def _orders(experiment: Experiment, round: int, client: int, shard: Any) -> Iterator[np.ndarray]:
    """Yield the sample numbers of each epoch. With `local.steps`, the last epoch is cut off."""
    local, shard = experiment.local, np.asarray(shard)
    steps = local.steps or local.epochs * -(-len(shard) // local.batch_size)
    for epoch in count():
        order = shard[batch_order(experiment.seed, round, client, epoch, len(shard)).numpy()]
        yield order[: steps * local.batch_size]
        steps -= -(-len(order) // local.batch_size)
        if steps <= 0:
            return


@torch.no_grad()
def _loss_for(model: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return NLL for a model that outputs log-probabilities, otherwise cross-entropy."""
    if targets.ndim > 1:
        return token_loss
    sums = model.eval()(inputs).exp().sum(1)
    return F.nll_loss if torch.allclose(sums, torch.ones_like(sums)) else F.cross_entropy
