"""The server of an asynchronous run: its tensors in the memory of an engine, and the state in checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.asynchronous.combination import Combination
from fedsim.asynchronous.policies.policy import Policy
from fedsim.asynchronous.policies.server import Arrival, AsyncServer
from fedsim.asynchronous.round_stats import RoundStats, Train
from fedsim.clients import ClientAlgorithm, State, Stepper
from fedsim.core.rows import Layout, new_rows
from fedsim.errors import DivergedError, ExperimentError, called
from fedsim.processes.shared_memory import share
from fedsim.rounds.worker_states import WorkerStates
from fedsim.training.batches import WorkItem
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask


class GradientOnly(ClientAlgorithm):
    """Client algorithm for workers that send gradients.

    `step` writes the gradient to the worker's row, instead of taking an SGD step. The row is what the worker sends.
    """

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        rows.copy_(gradients)


VIEWS = {  # attributes that `attach` sets
    *("shared", "rows", "models", "_version", "read", "units", "alive_mask"),
    *("global_row", "global_buffers", "worker_rows", "worker_buffers", "_mixing", "train"),
}


class ServerState(AsyncServer):
    """Server of an asynchronous run whose global model and workers' models are in the memory of an engine.

    Args:
        task: description of the run, with its policy, server optimizer and client algorithm.
        shared: memory of the engine, with the global model, the workers' models [n, d] and the buffers.
        worker_states: tensors that workers keep between their rounds.

    Attributes, in addition to those of `AsyncServer`:
        counts: int64 [1 + 3 n] on the CPU. It contains the number of updates of the global model, followed by three
            values for each slot: the number of updates when its worker last read the model, the number of started
            steps or rounds, and whether the worker is present (1) or has left (0).
        tables: positions of embedding tables, of which a step changes only the rows with a nonzero gradient.
        combination: the aggregation rule and the attack.
        train: function that trains the workers in the given slots.
    """

    train: Train

    def __init__(self, task: RunTask, shared: SharedState, worker_states: WorkerStates) -> None:
        experiment = task.experiment
        policy: Policy = experiment.policy.component
        stepper: Stepper = experiment.local.component
        self.policy, self.stepper, self.optimizer = policy, stepper, experiment.server.component
        self.graph, self.round = experiment.policy.topology.component, 1
        self.seed, self.buffers, self.nonfinite = experiment.seed, experiment.buffers, experiment.nonfinite
        self.algorithm, self.worker_states = task.algorithm, worker_states
        self.n = len(shared.cohort.rows) - experiment.rule.accepts("root")  # the last row is the server's own
        d = shared.cohort.rows.shape[1]
        self.combination = Combination(task, self.n, d)
        self.combines = self.combination.by_rule and not self.combination.filters
        self.counts = torch.zeros(1 + 3 * self.n, dtype=torch.int64)
        self.counts[1 : 1 + self.n] = -1  # no version read yet
        self.counts[1 + 2 * self.n :] = 1  # alive
        keeps_start = policy.needs_replicas or self.combination.needs_start_models
        self.replicas = new_rows(self.n if keeps_start else 0, d, task.dtype, task.device)
        self.replicas.copy_(shared.server.row.expand(len(self.replicas), -1))
        shared.cohort.buffers[:] = shared.server.buffers
        self.has_buffers = shared.server.buffers.numel() > 0
        self.step_state = stepper.start(shared.server.row) if "shared" in policy.state_scope else {}
        self.worker_step_states = stepper.start(shared.cohort.rows) if "private" in policy.state_scope else {}
        self.root_every, root_width = experiment.aggregate.root_every, d if experiment.rule.accepts("root") else 0
        self.own_vector = new_rows(1, root_width, task.dtype, task.device)[0]
        self.computed = torch.full((2,), -1)  # version at which `own_vector` was computed, and number of computations
        self.step_seconds = torch.ones(self.n, dtype=torch.double)
        self.tables: Tables = ()
        self.attach(shared)
        self.policy_state = policy.start(self)

    def attach(self, shared: SharedState) -> None:
        """Set the attributes that are views of tensors in `shared`. Must be called again after unpickling."""
        n, counts = self.n, self.counts.numpy()
        self.shared = shared
        self._mixing: tuple[int, np.ndarray] | None = None  # (round, matrix)
        self.global_row, self.global_buffers = shared.server.row, shared.server.buffers
        self.worker_rows, self.worker_buffers = shared.cohort.rows, shared.cohort.buffers
        self.rows = list(self.worker_rows)
        self.models = list(self.replicas) or self.rows  # start models
        self._version, self.read = counts[:1], counts[1 : 1 + n]
        self.units, self.alive_mask = counts[1 + n : 1 + 2 * n], counts[1 + 2 * n :]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in VIEWS}

    def start_round(self, round: int, stats: RoundStats) -> None:
        """Set the current round, on which attackers and graphs depend, and the statistics to which it adds."""
        self.round, self.combination.stats = round, stats

    def share(self) -> None:
        """Move the server's CPU tensors to shared memory.

        Raises ExperimentError if there is not enough shared memory.
        """
        self.worker_states.reserve(range(self.n))
        share(self.own_tensors.values())
        self.attach(self.shared)  # renews the NumPy views

    def revive_all(self) -> None:
        """Let all workers that have left return."""
        if not self.alive_mask.all():
            self.alive_mask[:] = 1
            self.policy.on_departure(self)

    def pull(self, slot: int) -> None:
        self.models[slot].copy_(self.optimizer.broadcast(self.global_row, self.shared.server.states["parameters"]))
        for name, sent in self.algorithm.send(self.shared.server.algorithm).items():
            self.shared.cohort.received[name][slot] = sent
        if self.has_buffers and self.buffers == "average":
            self.worker_buffers[slot] = self.global_buffers
        self.read[slot] = self._version[0]

    def begin(self, slot: int, worker: int) -> None:
        """Prepare the training of `worker` in `slot`: load its start model, and the state from its previous rounds."""
        if self.models is not self.rows:
            self.rows[slot].copy_(self.models[slot])
        self.worker_states.load([worker], self.shared.cohort.worker_rows, [slot])
        if self.has_buffers and self.buffers == "frozen":
            self.worker_buffers[slot] = self.global_buffers

    def end(self, slot: int, worker: int) -> None:
        """End the training of `worker` in `slot`: save the state that the worker keeps until its next round.

        The client algorithm's state on the server changes by what the worker sends in addition to its update.
        """
        shared = self.shared
        self.worker_states.save([worker], shared.cohort.worker_rows, [slot])
        if shared.cohort.messages:
            messages = {name: messages[slot] for name, messages in shared.cohort.messages.items()}
            self.algorithm.receive(shared.server.algorithm, messages, 1, len(shared.data.shards))

    def step(self, gradient: Tensor, slot: int | None = None) -> None:
        if not self.tables:
            return super().step(gradient, slot)
        step_where_touched(self.stepper, self.global_row, gradient, self.tables)
        self.increment_version()

    def arrive(self, arrival: Arrival) -> None:
        """Replace the result of a Byzantine worker, `rows[arrival.slot]`, by what the worker sends."""
        self._change(arrival, self.combination.attack)

    def admits(self, arrival: Arrival) -> bool:
        """Apply the rule to a single result, `rows[arrival.slot]`, in place. Return False if the rule rejects it."""
        return self._change(arrival, self.combination.admit)

    def root(self) -> Tensor:
        at, number = self.computed.tolist()
        if number < 0 or self.version - at >= self.root_every:
            self.computed[:] = torch.tensor([self.version, number + 1])
            step = 0 if self.policy.work == "gradient" else None
            row, self.worker_buffers[self.n] = self.rows[self.n].copy_(self.global_row), self.global_buffers
            self.train([WorkItem(self.n, len(self.shared.data.shards), number + 2, None, step)])
            self.own_vector.copy_(row if step == 0 else row - self.global_row)
        return self.own_vector

    def admit(self, arrival: Arrival, vector: Tensor) -> bool:
        if self.combination.attacks:
            self.combination.attack(self, arrival, vector)
            if self.nonfinite != "keep" and not bool(vector.isfinite().all()):
                if self.nonfinite == "error":
                    raise nonfinite_error(self.round, f"the result of worker {called(arrival.worker)}")
                stats = self.combination.stats
                stats.excluded.append(arrival.worker)
                stats.results -= Counter([(arrival.worker, arrival.staleness)])
                return False
        return not self.combination.filters or self.combination.admit(self, arrival, vector)

    def combine(self, vectors: Tensor, workers: Sequence[int], staleness: Tensor) -> Tensor:
        return self.combination.combine(self, vectors, workers, staleness=staleness)

    def mix(
        self, models: Tensor, slot: int, others: Sequence[int], weights: np.ndarray, moment: tuple[int, ...]
    ) -> Tensor:
        return self.combination.mix(self, models, slot, others, torch.from_numpy(weights), moment)

    @property
    def mixes(self) -> bool:
        return self.combination.by_rule or bool(self.combination.attackers(self.round))

    @property
    def tested(self) -> np.ndarray:
        attackers = self.combination.attackers(self.round)
        return np.array([slot for slot in self.alive.tolist() if slot not in attackers], dtype=np.int64)

    def _change(self, arrival: Arrival, change: Callable[[ServerState, Arrival, Tensor], Any]) -> Any:
        """Call `change` with the vector of a worker, which it may change in place: its gradient, or its update."""
        slot = arrival.slot
        if self.policy.work == "gradient":
            return change(self, arrival, self.rows[slot])
        delta = self.rows[slot] - self.replicas[slot]
        before = delta.clone()
        result = change(self, arrival, delta)
        if not torch.equal(delta, before):  # an unchanged result keeps its digits
            self.rows[slot].copy_(delta.add_(self.replicas[slot]))
        return result

    def mixing_matrix(self) -> np.ndarray:
        if self._mixing is None or (self.graph.changes and self._mixing[0] != self.round):
            self._mixing = self.round, self.graph.mixing_matrix(self.n, self.seed, self.round)
        return self._mixing[1]

    def update(self, update: Tensor) -> None:
        self.optimizer.step(self.global_row, update, self.shared.server.states["parameters"])
        self.increment_version()

    @property
    def own_tensors(self) -> dict[str, Tensor]:
        """Tensors by name that this object has created, without the engine's tensors."""
        tensors = {"replicas": self.replicas, "counts": self.counts, "step_seconds": self.step_seconds}
        tensors |= {"own_vector": self.own_vector, "computed": self.computed}
        states = {"shared": self.step_state, "private": self.worker_step_states, "policy_state": self.policy_state}
        states["combination"] = self.combination.tensors
        return tensors | {f"{key}.{name}": tensor for key, state in states.items() for name, tensor in state.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors by name that a checkpoint of an asynchronous run contains in addition to the engine's tensors."""
        cohort = self.shared.cohort
        in_flight = {"rows": cohort.rows, "buffers": cohort.buffers, "train_loss": cohort.train_loss}
        for key, state in (("kept", cohort.kept), ("messages", cohort.messages), ("received", cohort.received)):
            in_flight |= {f"{key}.{name}": tensor for name, tensor in state.items()}
        return {**in_flight, **{f"server.{name}": tensor for name, tensor in self.own_tensors.items()}}


def nonfinite_error(round: int, place: str) -> DivergedError:
    """Return the error for a worker's result that contains NaN or infinity.

    `place` describes the result in the message, for example "the gradient of worker 3".
    """
    remedy = "reduce local.lr, or exclude such updates with aggregate.nonfinite=exclude"
    return DivergedError(f"{place} contains NaN or infinity", remedy, round)


Tables = tuple[tuple[int, int, int], ...]  # per embedding: offset in the flat row, num_embeddings, embedding_dim


def tables_of(module: nn.Module, algorithm: Stepper) -> Tables:
    """Return the positions of a model's embedding tables in its flat parameter vector.

    With these positions, a step changes only the rows of a table whose gradient is not zero. This is not possible if
    the client algorithm has momentum or weight decay, which change all rows. The result is then ().

    Raises ExperimentError for an embedding with sparse=True and such an algorithm.
    """
    embeddings = {
        f"{path}.weight" if path else "weight": embedding
        for path, embedding in module.named_modules()
        if isinstance(embedding, (nn.Embedding, nn.EmbeddingBag))
    }
    entries = [entry for entry in Layout.of(module).parameters if entry.name in embeddings]
    if _ignores_zero_gradients(algorithm):
        return tuple((entry.offset, *entry.shape) for entry in entries)
    for entry in entries:
        if embeddings[entry.name].sparse:
            raise ExperimentError(
                f"local: {entry.name} is a sparse embedding (sparse=True), whose unused vectors must not change in a "
                "race without locks; remove local.momentum and local.weight_decay"
            )
    return ()


def step_where_touched(algorithm: Stepper, row: Tensor, gradient: Tensor, tables: Tables) -> None:
    """Take a step along a gradient [d], but leave embedding vectors whose gradient is zero untouched in memory.

    Processes that train at the same time then overwrite fewer of each other's changes. `tables` is the result of
    `tables_of`.
    """
    end = 0
    for offset, rows, length in tables:
        _step_span(algorithm, row, gradient, slice(end, offset))
        end = offset + rows * length
        table, table_gradient = (vector[offset:end].view(rows, length) for vector in (row, gradient))
        used = table_gradient.any(1).nonzero().flatten()
        stepped = table.index_select(0, used)
        algorithm.step(stepped, table_gradient.index_select(0, used), {})
        table.index_copy_(0, used, stepped)
    _step_span(algorithm, row, gradient, slice(end, len(row)))


def _step_span(algorithm: Stepper, row: Tensor, gradient: Tensor, span: slice) -> None:
    if span.start < span.stop:
        algorithm.step(row[span], gradient[span], {})


def _ignores_zero_gradients(algorithm: Stepper) -> bool:
    row = torch.ones(2)
    state = algorithm.start(row)
    algorithm.step(row, torch.zeros(2), state)
    return not state and bool((row == 1).all())
