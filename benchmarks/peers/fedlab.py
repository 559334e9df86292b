"""FedLab in its cross-process mode: a server, and one process per core with a serial trainer (torch.distributed)."""

# ruff: noqa: E402
from __future__ import annotations

import logging
import multiprocessing
import socket
from collections.abc import Iterator

import torch

from benchmarks.peers.work import CORES, Log, Result, Work, load, main, repaired_torchvision

VISION = repaired_torchvision()  # before fedlab is imported

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.client.manager import PassiveClientManager
from fedlab.core.network import DistNetwork
from fedlab.core.server.manager import SynchronousServerManager
from fedlab.utils import Aggregators, SerializationTool


class Server(SyncServerHandler):
    def __init__(self, work: Work) -> None:
        super().__init__(work.model(), len(work.cohorts), 1.0)
        self.work, self.log = work, Log()

    @property
    def num_clients_per_round(self) -> int:
        return len(self.work.cohorts[0])

    @property
    def downlink_package(self) -> list[torch.Tensor]:
        return [self.model_parameters, torch.tensor([self.round])]

    def sample_clients(self) -> list[int]:
        return self.work.cohorts[self.round]

    def global_update(self, buffer: list[list[torch.Tensor]]) -> None:
        weights, samples, steps = torch.stack([counts for _, counts in buffer]).T
        average = Aggregators.fedavg_aggregate([parameters for parameters, _ in buffer], weights)
        SerializationTool.deserialize_model(self._model, average)
        self.log.samples += int(samples.sum())
        self.log.steps += int(steps.sum())
        self.log.end_round(self.work.accuracy(self._model), self._model.state_dict())


class Clients(SGDSerialClientTrainer):
    def __init__(self, work: Work, clients: int) -> None:
        super().__init__(work.model(), clients)
        self.work, self.epochs, self.criterion = work, 1, work.loss

    def local_process(self, payload: list[torch.Tensor], id_list: list[int]) -> None:
        parameters, round = payload
        for client in id_list:
            batches = self.work.batches(int(round), self.work.cohorts[int(round)].index(client))
            self.optimizer = torch.optim.SGD(self._model.parameters(), **self.work.sgd)
            counts = [self.work.weights[client], sum(map(len, batches)), len(batches)]
            self.cache.append([*self.train(parameters, self.loader(batches)), torch.tensor(counts).to(parameters)])

    def loader(self, batches: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
        for batch in batches:
            yield self.work.inputs.index_select(0, batch), self.work.targets.index_select(0, batch)


def program(path: str) -> Result:
    work = load(path)
    logging.disable(logging.INFO)
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    networks = [DistNetwork(("localhost", port), 1 + CORES, rank) for rank in range(1 + CORES)]
    for number, network in enumerate(networks[1:]):
        clients = len(range(number, len(work.shards), CORES))
        manager = PassiveClientManager(network, Clients(work, clients))
        multiprocessing.get_context("fork").Process(target=manager.run).start()
    server = Server(work)
    SynchronousServerManager(networks[0], server, "GLOBAL").run()
    return server.log.result(server.model.state_dict())


if __name__ == "__main__":
    main(program)
