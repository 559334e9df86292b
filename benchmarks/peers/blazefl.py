"""BlazeFL with its pool of threads, one per core.

Its README recommends threads with a free-threaded Python 3.14. This version is the last one for Python with the GIL.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

import torch
from blazefl.contrib import FedAvgBaseServerHandler, FedAvgThreadPoolClientTrainer
from blazefl.contrib.fedavg import FedAvgDownlinkPackage, FedAvgUplinkPackage
from blazefl.core import deserialize_model, serialize_model

from benchmarks.peers.work import CORES, Log, Result, Work, load, main


class Selector:
    def __init__(self, work: Work) -> None:
        self.work = work

    def select_model(self, name: str) -> torch.nn.Module:
        return self.work.model()


class Server(FedAvgBaseServerHandler):
    def sample_clients(self) -> list[int]:
        return self.dataset.cohorts[self.round]


class Clients(FedAvgThreadPoolClientTrainer):
    round = 0

    def worker(
        self, cid: int, device: str, payload: FedAvgDownlinkPackage, stop_event: threading.Event
    ) -> FedAvgUplinkPackage:
        work = self.dataset
        model = self.model_selector.select_model(self.model_name)
        deserialize_model(model, payload.model_parameters)
        batches = work.batches(self.round, work.cohorts[self.round].index(cid))
        work.train(model, torch.optim.SGD(model.parameters(), **work.sgd), batches)
        counts = {"samples": sum(map(len, batches)), "steps": len(batches)}
        return FedAvgUplinkPackage(cid, serialize_model(model), work.weights[cid], counts)

    def progress_fn(self, it: list[Future[FedAvgUplinkPackage]]) -> list[Future[FedAvgUplinkPackage]]:
        return it  # without a progress bar


def program(path: str) -> Result:
    work = load(path)
    clients, rounds, lr = len(work.shards), len(work.cohorts), work.sgd["lr"]
    server = Server(Selector(work), "", work, rounds, clients, 1.0, "cpu", work.batch_size, seed=0)
    server.num_clients_per_round = len(work.cohorts[0])
    pool = Clients(Selector(work), "", work, "cpu", clients, 1, work.batch_size, lr, seed=0, num_parallels=CORES)
    log = Log()
    while not server.if_stop():
        pool.round = server.round
        pool.local_process(server.downlink_package(), server.sample_clients())
        for package in pool.uplink_package():
            log.samples += package.metadata["samples"]
            log.steps += package.metadata["steps"]
            server.load(package)
        log.end_round(work.accuracy(server.model), server.model.state_dict())
    return log.result(server.model.state_dict())


if __name__ == "__main__":
    main(program)
