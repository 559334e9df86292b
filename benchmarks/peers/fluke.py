"""fluke, which trains one client after another in one process, with PyTorch's default of one thread per core."""

# ruff: noqa: E402
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.peers.work import CORES, Log, Result, Work, load, main, repaired_torchvision

VISION = repaired_torchvision()  # before fluke is imported

from fluke import FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server


class Samples(FastDataLoader):
    """A client's batches of all epochs of a round. The number of samples is the client's weight."""

    def __init__(self, work: Work, client: int, log: Log) -> None:
        super().__init__(torch.empty(int(work.weights[client])), num_labels=0, batch_size=work.batch_size)
        self.work, self.client, self.log = work, client, log

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        round = len(self.log.accuracies)
        batches = self.work.batches(round, self.work.cohorts[round].index(self.client))
        self.log.trained(batches)
        for batch in batches:
            yield self.work.inputs.index_select(0, batch), self.work.targets.index_select(0, batch)


class Cohorts(Server):
    """A server that draws the cohorts of the work, and tests the global model after each round."""

    def __init__(self, work: Work, log: Log, **settings: Any) -> None:
        super().__init__(work.model(), None, **settings)
        self.work, self.log = work, log

    def get_eligible_clients(self, eligible_perc: float) -> list[Client]:
        return [self.clients[client] for client in self.work.cohorts[len(self.log.accuracies)]]

    def aggregate(self, *arguments: Any) -> None:
        super().aggregate(*arguments)
        self.log.end_round(self.work.accuracy(self.model), self.model.state_dict())


class Federation(FedAVG):
    def finalize(self) -> None:
        """Do not send the final model to all clients, which is not part of the work."""


def program(path: str) -> Result:
    work = load(path)
    torch.set_num_threads(CORES)
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    optimizer = OptimizerConfigurator({"name": "SGD", **work.sgd})
    log = Log()
    clients = [
        Client(client, Samples(work, client, log), None, optimizer, work.loss, local_epochs=1, persistency=False)
        for client in range(len(work.shards))
    ]
    server = Cohorts(work, log, clients=clients, weighted=True)
    federation = Federation(len(clients), None, {}, clients, server)
    log.ends = [log.clock()]
    federation.run(len(work.cohorts), len(work.cohorts[0]) / len(clients))
    return log.result(server.model.state_dict())


if __name__ == "__main__":
    main(program)
