"""A run on one page, in plain PyTorch: federated averaging with attackers, robust rules and server optimizers.

Start reading here. `run` computes the same numbers as `fedsim.run`, with a loop over the rounds and a loop over the
workers. It is slow, and no run uses it. `tests/test_reference.py` compares the engines with it, to 1e-12.

The global model is a vector w of d numbers. The update of a worker with the trained model x is x - w. Data sets,
models, rules, attacks and random draws are those of fedsim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedsim.aggregation import AggregationInputs, AggregationResult
from fedsim.config.experiment import Experiment
from fedsim.core.randomness import batch_order, draw_key, sample_cohort
from fedsim.data import TensorData, load_dataset, partition_shards
from fedsim.errors import ExperimentError


def run(experiment: Experiment) -> Iterator[tuple[Tensor, float, list[int]]]:
    """Yield (global model w [d], mean training loss, IDs of excluded workers) after each round, computed in float64.

    Args:
        experiment: synchronous rounds in which workers train a classifier without dropout and buffers. Settings that
            this page does not name have no effect.

    Raises ExperimentError unless the client algorithm is `sgd` and the server optimizer `sgd`, `momentum` or `adam`.

    >>> experiment = fedsim.Experiment(workers=5, cohort=2, rounds=2, model="2nn", precision="float64")
    >>> *_, (w, loss, excluded) = fedsim.reference.run(experiment)
    >>> torch.allclose(w, fedsim.run(experiment).global_row, rtol=0, atol=1e-12)
    True
    """
    if experiment.local.algorithm != "sgd" or experiment.server.name not in ("sgd", "momentum", "adam"):
        raise ExperimentError("experiment: must have local.algorithm=sgd and server=sgd, momentum or adam")
    seed, workers, partition = experiment.seed, experiment.workers, experiment.partition
    name, root, params = experiment.data.source(partition)
    train = load_dataset(name, root, **params)[0].to(torch.device("cpu"), torch.float64)
    shards = partition_shards(train.targets, partition.name, workers, seed=seed, **partition.params)
    weighting: Any = experiment.weights  # "samples", "uniform", or a weight for each worker
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw_key(seed, "model"))
        model = experiment.model.component().double()
    w, last = parameters_to_vector(model.parameters()).detach(), None
    states: dict[str, dict] = {"rule": {}, "attack": {}, "server": {}}  # what they keep between rounds

    for round in range(1, experiment.rounds + 1):
        cohort = sample_cohort(seed, round, workers, experiment.cohort_size).tolist()
        updates, losses = [], []
        for worker in cohort:  # local training, from the global model
            batches = batches_of(experiment.local, train, shards.of(worker), seed, round, worker)
            if worker in experiment.byzantine and (poison := experiment.attack.component.poison):
                batches = (poison(inputs, targets, train.classes) for inputs, targets in batches)
            vector_to_parameters(w.clone(), model.parameters())
            losses.append(train_worker(model, batches, experiment.local))
            updates.append(parameters_to_vector(model.parameters()).detach() - w)

        # attack, aggregation rule and server optimizer
        by_name = {"samples": [shards.size(worker) for worker in cohort], "uniform": [1] * len(cohort)}
        weights = by_name[weighting] if isinstance(weighting, str) else [weighting[worker] for worker in cohort]
        known = {"workers": cohort, "seed": seed, "moment": (round,), "last": last, "state": states["rule"]}
        inputs = AggregationInputs(torch.stack(updates), torch.tensor(weights, dtype=torch.double), **known)
        inputs = replace(inputs, updates=attacked(experiment, inputs, states["attack"]))
        result = aggregate(experiment, inputs)
        last, states["rule"] = result.update, result.state
        w = server_step(experiment, w, last, states["server"])

        # training loss per sample, of the workers that are not excluded
        finite = inputs.updates.isfinite().all(1)
        loss, samples = torch.tensor(losses, dtype=torch.double)[finite].sum(0).tolist()
        yield w, loss / samples, torch.tensor(cohort)[~finite].tolist()


def batches_of(local: Any, data: TensorData, shard: Tensor, seed: int, round: int, worker: int) -> Iterator:
    """Yield batches (inputs, targets) of a worker, shuffled in each epoch; without end if `local.steps` is set."""
    for epoch in count() if local.steps else range(local.epochs):
        order = batch_order(seed, round, worker, epoch, len(shard))
        yield from map(data.gather, shard[order].split(local.batch_size))


def train_worker(model: nn.Module, batches: Iterator, local: Any) -> tuple[float, float]:
    """Train the model with SGD. Return the sum of the losses of all samples, and the number of samples."""
    sgd, loss_sum, samples = local.component, 0.0, 0.0
    optimizer = torch.optim.SGD(model.parameters(), sgd.lr, sgd.momentum, 0, sgd.weight_decay, sgd.nesterov)
    for inputs, targets in islice(batches, local.steps):  # None: all batches
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum, samples = loss_sum + loss.item() * len(targets), samples + len(targets)
    return loss_sum, samples


def attacked(experiment: Experiment, inputs: Any, state: dict) -> Tensor:
    """Return the updates [n, d] after Byzantine workers have replaced theirs. Changes `state`."""
    attack, updates, workers = experiment.attack.component, inputs.updates, torch.tensor(inputs.workers)
    attacks = torch.isin(workers, torch.tensor(experiment.byzantine))
    if attacks.all() and attack.needs_honest:
        return updates

    def if_sent(byzantine: Tensor) -> Tensor:
        return aggregate(experiment, replace(inputs, updates=updates.index_put((attacks,), byzantine))).update

    known = {"seed": inputs.seed, "moment": inputs.moment, "last": inputs.last, "state": state.get("kept")}
    known |= {"workers": workers[~attacks].tolist(), "aggregate": if_sent}
    byzantine, state["kept"] = attack(updates[~attacks], updates[attacks], **known)
    return updates.index_put((attacks,), byzantine)


def aggregate(experiment: Experiment, inputs: Any) -> AggregationResult:
    """Apply the rule to the updates without NaN and infinity."""
    finite = inputs.updates.isfinite().all(1)
    updates, weights = inputs.updates[finite], inputs.weights[finite]
    if experiment.rule.name == "weighted_mean":  # FedAvg
        return AggregationResult(weights @ updates / weights.sum())
    workers = torch.tensor(inputs.workers)[finite].tolist()
    inputs = replace(inputs, updates=updates, workers=workers, excluded=len(finite) - len(workers))
    return experiment.rule(replace(inputs, weights=weights if experiment.rule.accepts_weights else None))


def server_step(experiment: Experiment, w: Tensor, update: Tensor, state: dict) -> Tensor:
    """Return the global model after one step of the server optimizer. Updates `state` in place."""
    name, server = experiment.server.name, experiment.server.component
    if name == "sgd":
        return w + server.lr * update
    if name == "momentum":
        v = state["v"] = server.beta * state.get("v", 0) + update
        return w + server.lr * (update + server.beta * v if server.nesterov else v)
    m = state["m"] = server.beta1 * state.get("m", 0) + (1 - server.beta1) * update
    v = state["v"] = server.beta2 * state.get("v", 0) + (1 - server.beta2) * update**2
    return w + server.lr * m / (v.sqrt() + server.tau)
