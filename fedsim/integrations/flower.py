"""fedsim's aggregation rules in Flower, as a strategy for Flower's message API (flwr.serverapp)."""

# ruff: noqa: E402  (the package is checked before it is imported)

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation.containers import as_rows
from fedsim.aggregation.functional import checked_weights
from fedsim.aggregation.inputs import Nonfinite
from fedsim.aggregation.resolve import Stage
from fedsim.errors import ExperimentError, show
from fedsim.hints.attributes import takes_component
from fedsim.integrations.rounds import RuleOverRounds
from fedsim.server import ServerOptimizer
from fedsim.system.packages import import_extra

import_extra("flwr.serverapp.strategy", extra="flower", purpose="fedsim.integrations.flower")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

LOG = logging.getLogger("flwr")
OF_FEDAVG = inspect.signature(FedAvg.__init__).parameters


class Strategy(FedAvg):
    """A Flower strategy that aggregates the clients' updates with one of fedsim's rules.

        strategy = Strategy("krum", f=2, fraction_train=0.5)
        result = strategy.start(grid, initial_arrays, num_rounds=10)

    A client's update is the arrays that the client returns minus the arrays that it received. The rule aggregates the
    updates, in the order of node IDs. The new global arrays are the old arrays plus the aggregate, or the result of a
    server optimizer step. Arrays that are not floating-point do not change. The state of a rule such as foolsgold is
    kept from round to round.

    Args:
        name: aggregation rule, as in `fedsim.aggregate`: a name, a function, or a list of pre-aggregators that ends
            with a rule. The weights for rules such as weighted_mean are the metric `weighted_by_key`, by default
            "num-examples".
        server: server optimizer that updates the global arrays; None: the aggregate is added to them.
        root: only for fltrust: a function of (round, arrays sent) that trains on the server's own data, and returns the
            trained arrays as an ArrayRecord.
        loss_key: only for qfedavg: name of the metric that contains a client's loss before training.
        seed: seed for the rule's random draws. Flower samples nodes with Python's module `random`, which this seed does
            not affect.
        nonfinite: what to do with updates that contain NaN or infinity: "exclude", "error" or "keep". Excluded updates
            are logged and count as Byzantine.
        options: parameters of the rule, such as f, and keyword arguments of Flower's FedAvg.

    Raises ExperimentError (a ValueError) for an unknown rule or an invalid parameter. During a round, the same
    error is raised for arrays with a wrong shape, for invalid weights, and if the rule does not support the number of
    replies.
    """

    @takes_component("aggregate", "rule")
    def __init__(
        self,
        name: Stage | Sequence[Stage],
        *,
        server: ServerOptimizer | None = None,
        root: Callable[[int, ArrayRecord], ArrayRecord] | None = None,
        loss_key: str | None = None,
        seed: int = 0,
        nonfinite: Nonfinite = "exclude",
        **options: Any,
    ) -> None:
        params = {name: value for name, value in options.items() if name not in OF_FEDAVG}
        super().__init__(**{name: value for name, value in options.items() if name in OF_FEDAVG})
        self.rule = RuleOverRounds(name, params, seed=seed, nonfinite=nonfinite)
        for key, name, argument in (("root", "root", root), ("loss_key", "losses", loss_key)):
            if argument is None and self.rule.pipeline.accepts(name):
                raise ExperimentError(
                    f"{key}: the rule {self.rule.pipeline.name} requires this argument; pass Strategy(..., {key}=...)"
                )
        self.server, self.root, self.loss_key = server, root, loss_key
        self._global = self._sent = ArrayRecord()

    def summary(self) -> None:
        """Log the settings of the strategy."""
        LOG.info("\t├──> Rule: %s", self.rule.pipeline.name)
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages that ask clients to train, with the global arrays."""
        self._global = self._sent = arrays
        if self.server is not None:
            self._sent = _record(self.server.broadcast(_arrays(arrays)))
        return super().configure_train(server_round, self._sent, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the new global arrays and the averaged metrics, or (None, None) if no client has replied."""
        valid, _ = self._check_and_log_replies(replies, is_train=True)
        if not valid:
            return None, None
        valid = sorted(valid, key=lambda reply: reply.metadata.src_node_id)
        contents = [reply.content for reply in valid]
        return self._aggregated(server_round, valid), self.train_metrics_aggr_fn(contents, self.weighted_by_key)

    def _aggregated(self, server_round: int, replies: list[Message]) -> ArrayRecord:
        [sent], form = as_rows([_arrays(self._sent)], "arrays")
        nodes = [reply.metadata.src_node_id for reply in replies]
        records = [next(iter(reply.content.array_records.values())) for reply in replies]
        rows = [form.row(_arrays(record), f"node {node}") for node, record in zip(nodes, records, strict=True)]
        updates = torch.stack(rows) - sent
        inputs: dict[str, Any] = {"workers": [node - (node >> 63 << 64) for node in nodes]}  # as signed integers
        if self.rule.pipeline.needs_weights:
            inputs["weights"] = checked_weights(_metrics(replies, self.weighted_by_key), len(rows), self.rule.pipeline)
        if self.loss_key is not None:
            inputs["losses"] = torch.tensor(_metrics(replies, self.loss_key), dtype=torch.double)
        if self.root is not None:
            inputs["root"] = form.row(_arrays(self.root(server_round, self._sent)), "root") - sent
        self._check_finite(nodes, updates)
        update = self.rule(updates, round=server_round, **inputs)
        row = form.row(_arrays(self._global), "arrays")
        return _record(form.rebuild(row + update if self.server is None else self.server.step(row, update)))

    def _check_finite(self, nodes: list[int], updates: Tensor) -> None:
        """Check the updates for NaN and infinity. Log the nodes that sent them, or raise ExperimentError."""
        finite = updates.isfinite().all(1).tolist()
        bad = ", ".join(str(node) for node, is_finite in zip(nodes, finite, strict=True) if not is_finite)
        if bad and self.rule.nonfinite == "error":
            raise ExperimentError(
                f'the updates of nodes {bad} contain NaN or infinity; set nonfinite="exclude" to exclude such updates'
            )
        if bad and self.rule.nonfinite == "exclude":
            LOG.warning("aggregate_train: excluded the updates of nodes %s, which contain NaN or infinity", bad)


def _arrays(record: ArrayRecord) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in record.items()}


def _record(arrays: dict[str, np.ndarray]) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def _metrics(replies: list[Message], key: str) -> list[float]:
    """Return the metric `key` of each reply. Raises ExperimentError if a reply does not contain it."""
    values = []
    for reply in replies:
        record = next(iter(reply.content.metric_records.values()))
        if key not in record:
            raise ExperimentError(
                f"node {reply.metadata.src_node_id}: the reply lacks the metric {show(key)}, which the rule needs; add "
                "it to the client's MetricRecord"
            )
        values.append(float(record[key]))
    return values
