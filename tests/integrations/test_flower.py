"""The strategy for Flower, with Flower's messages and in a Flower simulation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedsim

pytest.importorskip("flwr", reason="needs the package flwr")

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedsim.integrations.flower import Strategy

NODES, ROUNDS = 7, 2
START = {"weight": np.ones((2, 3), np.float32), "bias": np.zeros(3, np.float32), "count": np.array(5)}
IDS = [2**64 - 1 - 10 * node for node in range(NODES)]  # Flower's node IDs are unsigned 64-bit integers
WITHOUT_EVALUATION = {"fraction_evaluate": 0.0, "min_train_nodes": NODES}


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """Set the run, node and task IDs that Flower's messages read and a ServerApp would set."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class InProcess(Grid):
    """A Flower grid whose nodes are functions."""

    def __init__(self, reply):
        self.reply = reply

    def get_node_ids(self):
        return IDS

    def send_and_receive(self, messages, *, timeout=None):
        return [self.reply(message, IDS.index(message.metadata.dst_node_id)) for message in messages]

    def set_run(self, *args): ...
    def create_message(self, *args): ...
    def push_messages(self, *args): ...
    def pull_messages(self, *args): ...

    @property
    def run(self): ...


def record(arrays):
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


def numpy(arrays):
    return {name: array.numpy() for name, array in arrays.items()}


def update(node, round):
    """Return what client `node` adds to the arrays. Clients 0 and 1 are Byzantine."""
    generator = np.random.default_rng((node, round))
    scale = 100 if node < 2 else 1
    return {name: scale * generator.standard_normal(array.shape).astype(array.dtype) for name, array in START.items()}


def moved(arrays, node, round):
    return {name: arrays[name] + added for name, added in update(node, round).items()}


def replying(message, node, change=lambda arrays, node: arrays, metrics=None):
    received = numpy(message.content["arrays"])
    arrays = change(moved(received, node, message.content["config"]["server-round"]), node)
    arrays = dict(reversed(arrays.items()))  # in reverse order
    metrics = MetricRecord({"num-examples": node + 1, "loss": float(node)} if metrics is None else metrics)
    return Message(content=RecordDict({"arrays": record(arrays), "metrics": metrics}), reply_to=message)


def result_of(strategy, reply=replying, rounds=ROUNDS):
    return strategy.start(InProcess(reply), record(START), num_rounds=rounds)


def expected_rows(rule, *, rounds=ROUNDS, **inputs):
    """Return the floating-point arrays as a row, after rounds of `fedsim.aggregate` on the same updates."""
    row = flat(START)
    for round in range(1, rounds + 1):
        rows = torch.stack([flat(update(node, round)) for node in reversed(range(NODES))])  # ordered by node ID
        row = row + fedsim.aggregate(rows, rule, **inputs)
    return row


def flat(arrays):
    return torch.cat([torch.from_numpy(arrays[name]).reshape(-1) for name in ("weight", "bias")])


@pytest.mark.parametrize(
    ("rule", "params"),
    [("mean", {}), ("krum", {"f": 2}), (["nnm", "trimmed_mean"], {"f": 2}), ("norm_clipping", {"c": 0.5})],
    ids=str,
)
def test_the_global_arrays_move_by_the_aggregate_of_the_updates(rule, params):
    result = result_of(Strategy(rule, **params, **WITHOUT_EVALUATION))
    arrays = numpy(result.arrays)
    assert torch.allclose(flat(arrays), expected_rows(rule, **params), atol=1e-4)
    assert {name: (value.dtype, value.shape) for name, value in arrays.items()} == {
        name: (value.dtype, value.shape) for name, value in START.items()
    }
    assert arrays["count"] == START["count"]
    assert result.train_metrics_clientapp[1]["loss"] == pytest.approx(sum(k * (k + 1) for k in range(7)) / 28)


def test_rules_get_weights_losses_and_root():
    weights = torch.arange(NODES, 0, -1)
    result = result_of(Strategy("weighted_mean", **WITHOUT_EVALUATION), rounds=1)
    assert torch.allclose(flat(numpy(result.arrays)), expected_rows("weighted_mean", weights=weights, rounds=1))
    result = result_of(Strategy("qfedavg", loss_key="loss", **WITHOUT_EVALUATION), rounds=1)
    losses = torch.arange(NODES - 1, -1, -1)
    assert torch.allclose(flat(numpy(result.arrays)), expected_rows("qfedavg", losses=losses, rounds=1))

    def trained(round, arrays):
        return record(moved(numpy(arrays), 99, round))

    result = result_of(Strategy("fltrust", root=trained, **WITHOUT_EVALUATION), rounds=1)
    root = flat(update(99, 1))
    assert torch.allclose(flat(numpy(result.arrays)), expected_rows("fltrust", root=root, rounds=1), atol=1e-6)


def test_a_rule_keeps_its_state_from_round_to_round():
    result = numpy(result_of(Strategy("centered_clipping", tau=0.5, **WITHOUT_EVALUATION)).arrays)
    row, last = flat(START), None
    for round in range(1, ROUNDS + 1):
        rows = torch.stack([flat(update(node, round)) for node in range(NODES)])
        last = fedsim.aggregate(rows, "centered_clipping", tau=0.5, last=last)
        row = row + last
    assert torch.allclose(flat(result), row, atol=1e-4)
    foolsgold = Strategy("foolsgold", **WITHOUT_EVALUATION)
    assert not torch.allclose(flat(numpy(result_of(foolsgold).arrays)), expected_rows("foolsgold"), atol=1e-4)


def test_a_server_optimizer_moves_the_global_arrays():
    server, optimizer = (fedsim.ServerOptimizer("bmuf", nesterov=True) for _ in range(2))
    result = numpy(result_of(Strategy("median", server=server, **WITHOUT_EVALUATION)).arrays)
    row = flat(START)
    for round in range(1, ROUNDS + 1):
        rows = torch.stack([flat(update(node, round)) for node in range(NODES)])
        optimizer.broadcast(row)
        row = optimizer.step(row, fedsim.aggregate(rows, "median"))
    assert torch.allclose(flat(result), row, atol=1e-4)


def test_updates_that_are_not_finite_are_excluded_and_logged(caplog):
    def broken(arrays, node):
        return {name: value * np.nan if value.ndim and node == 3 else value for name, value in arrays.items()}

    result = result_of(Strategy("median", **WITHOUT_EVALUATION), lambda m, n: replying(m, n, broken), rounds=1)
    rows = torch.stack([flat(update(node, 1)) for node in range(NODES) if node != 3])
    assert torch.allclose(flat(numpy(result.arrays)), flat(START) + fedsim.aggregate(rows, "median"), atol=1e-5)
    assert f"excluded the updates of nodes {IDS[3]}" in caplog.text
    with pytest.raises(fedsim.ExperimentError, match=f"^the updates of nodes {IDS[3]} contain NaN"):
        result_of(Strategy("median", nonfinite="error", **WITHOUT_EVALUATION), lambda m, n: replying(m, n, broken))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"name": "fltrust"}, r"^root: the rule fltrust requires this argument; pass"),
        ({"name": "qfedavg"}, r"^loss_key: the rule qfedavg requires this argument; pass"),
    ],
)
def test_a_wrong_option_is_an_error_before_the_first_round(options, line):
    with pytest.raises(fedsim.ExperimentError, match=line):
        Strategy(**options)


def test_a_wrong_reply_is_an_error_that_names_the_node():
    def flattened(arrays, node):
        return {name: value.reshape(-1) if node == 1 and value.ndim == 2 else value for name, value in arrays.items()}

    with pytest.raises(fedsim.ExperimentError, match=rf"^node {IDS[1]}\['weight'\]: must have shape \(2, 3\)"):
        result_of(Strategy("mean", **WITHOUT_EVALUATION), lambda m, n: replying(m, n, flattened))
    without_loss = Strategy("qfedavg", loss_key="loss", **WITHOUT_EVALUATION)
    with pytest.raises(fedsim.ExperimentError, match=rf'^node {min(IDS)}: the reply lacks the metric "loss"'):
        result_of(without_loss, lambda m, n: replying(m, n, metrics={"num-examples": 1}))
