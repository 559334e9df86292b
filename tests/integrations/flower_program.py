"""A simulation of Flower with fedsim's strategy; it saves the global arrays."""

from __future__ import annotations

import sys

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

from fedsim.integrations.flower import Strategy

NODES, ROUNDS = 7, 2
START = {"weight": np.ones((2, 3), np.float32), "bias": np.zeros(3, np.float32), "count": np.array(5)}


def update(node, round):
    """What a client adds to the arrays; clients 0 and 1 are Byzantine."""
    generator = np.random.default_rng((node, round))
    scale = 100 if node < 2 else 1
    return {name: scale * generator.standard_normal(array.shape).astype(array.dtype) for name, array in START.items()}


client = ClientApp()


@client.train()
def train(message, context):
    node, round = context.node_config["partition-id"], message.content["config"]["server-round"]
    received = {name: array.numpy() for name, array in message.content["arrays"].items()}
    moved = {name: received[name] + added for name, added in update(node, round).items()}
    metrics = MetricRecord({"num-examples": node + 1, "loss": float(node)})
    arrays = ArrayRecord({name: _array(value) for name, value in moved.items()})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def _array(value):
    from flwr.app import Array

    return Array(np.asarray(value))


def main(path):
    server = ServerApp()

    @server.main()
    def run(grid, context):
        strategy = Strategy("krum", f=2, min_train_nodes=NODES, min_available_nodes=NODES, fraction_evaluate=0.0)
        start = ArrayRecord({name: _array(value) for name, value in START.items()})
        result = strategy.start(grid, start, num_rounds=ROUNDS)
        np.savez(path, **{name: array.numpy() for name, array in result.arrays.items()})

    run_simulation(server, client, num_supernodes=NODES, backend_config={"client_resources": {"num_cpus": 1}})


if __name__ == "__main__":
    main(*sys.argv[1:])
