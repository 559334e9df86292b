"""Flower with its simulation engine on Ray, and one CPU per client, so that each core runs one client at a time."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

import torch

from benchmarks.peers.work import CORES, Log, Result, load, main


def program(path: str) -> Result:
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)  # for Ray's processes
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app = ClientApp(), ServerApp()
    results: list[Result] = []

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        work = load(path, shared=True)
        round, slot, client = (int(message.content["config"][key]) for key in ("round", "slot", "client"))
        model, batches = work.model(), work.batches(round, slot)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        work.train(model, torch.optim.SGD(model.parameters(), **work.sgd), batches)
        counts = {"samples": sum(map(len, batches)), "steps": len(batches), "weight": work.weights[client]}
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(counts)}
        return Message(content=RecordDict(content), reply_to=message)

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        work = load(path, shared=True)
        torch.set_num_threads(CORES)  # during a test, the clients' processes wait
        model, log = work.model(), Log()

        class Cohorts(FedAvg):
            """FedAvg that tells each sampled node which client it is, and counts the steps."""

            def configure_train(self, server_round: int, arrays: ArrayRecord, *others: Any) -> list[Message]:
                messages = list(super().configure_train(server_round, arrays, *others))
                for slot, (client, message) in enumerate(zip(work.cohorts[server_round - 1], messages, strict=True)):
                    config = ConfigRecord({"round": server_round - 1, "slot": slot, "client": client})
                    message.content = RecordDict({"arrays": arrays, "config": config})
                return messages

            def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
                replies = list(replies)
                log.samples += sum(reply.content["metrics"]["samples"] for reply in replies)
                log.steps += sum(reply.content["metrics"]["steps"] for reply in replies)
                return super().aggregate_train(server_round, replies)

        def test(server_round: int, arrays: ArrayRecord) -> None:
            if server_round:  # no test before the first round
                model.load_state_dict(arrays.to_torch_state_dict())
                log.end_round(work.accuracy(model), model.state_dict())

        sizes = {"min_train_nodes": len(work.cohorts[0]), "min_available_nodes": len(work.shards)}
        strategy = Cohorts(1e-9, 0.0, **sizes, weighted_by_key="weight")
        strategy.start(grid, ArrayRecord(work.state), len(work.cohorts), evaluate_fn=test)
        results.append(log.result(model.state_dict()))

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, len(load(path, shared=True).shards), backend_config=resources)
    return results[0]


if __name__ == "__main__":
    main(program)
