"""Tensors that all processes of an engine read and write: data, global model, the cohort's rows, and test results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.clients import State
from fedsim.clients.algorithm import state_at_first
from fedsim.core.learning_task import joint_of
from fedsim.core.model_inputs import outputs_of
from fedsim.core.randomness import preserve_random_state
from fedsim.core.rows import Layout, new_rows
from fedsim.data import ListedShards, Shards, TensorData
from fedsim.errors import ExperimentError, show_bytes
from fedsim.processes.shared_memory import share
from fedsim.system.devices import require_memory, wide_dtype
from fedsim.system.limits import describe_os_error
from fedsim.training.task import RunTask, Sync

Split = Literal["test", "validation"]

CLUSTERS = "clusters", "cluster_buffers"  # names of the parameters and buffers of global models after the first
TEST_BATCH_ON_CPU = 250  # faster than 1,000 on a CPU, because the batch stays in cache
TEST_BATCH_ON_GPU = 2_000


@dataclass
class RunData:
    """Samples of a run, and their assignment to workers.

    Attributes:
        train, test, validation: datasets. `validation` is held out of the training data and may be empty.
        classes: number of classes or tokens; 0 for floating-point targets.
        shards: training samples of each worker.
        worker_tests: local test samples of each worker, if workers are tested.
        root: indices of the server's own training samples, int64, on the CPU; empty if the server has none.
        own_tests: dataset of the local test samples, if these come from the test part of the data.
    """

    train: TensorData
    test: TensorData
    validation: TensorData
    classes: int
    shards: Shards
    worker_tests: Shards
    root: Tensor
    own_tests: TensorData

    @classmethod
    def on(
        cls,
        device: torch.device,
        dtype: torch.dtype,
        train: TensorData,
        test: TensorData,
        shards: Shards,
        root: np.ndarray | None = None,
        worker_tests: Shards | None = None,
        validation: TensorData | None = None,
        own_tests: TensorData | None = None,
    ) -> RunData:
        """Move the data of a run to `device`, convert floating-point values to `dtype`, and return them as a RunData.

        The other arguments are the attributes of the class. None stands for an empty attribute.
        """
        nothing = np.zeros(0, dtype=np.int64)
        validation = test.take(nothing) if validation is None else validation
        parts = train, test, validation, test if own_tests is None else own_tests
        moved = {id(data): replace(data, ids={}, worker_names=()).to(device, dtype) for data in parts}
        train, test, validation, own_tests = (moved[id(data)] for data in parts)
        return cls(
            train=train,
            test=test,
            validation=validation,
            classes=max(train.classes, test.classes),
            shards=shards,
            worker_tests=worker_tests or ListedShards.of_arrays([nothing]),
            root=torch.from_numpy(nothing if root is None else root),
            own_tests=own_tests,
        )


@dataclass
class GlobalModel:
    """Global model, and the server's state that is kept between rounds.

    Attributes:
        row: [d], all parameters of the global model as one flat vector.
        buffers: [b], all buffers of the global model as one flat vector, float64.
        last: [d], latest aggregated update, if the rule or the attack uses it; otherwise [0].
        algorithm: state that the client algorithm keeps at the server, a flat tensor for each name. With several global
            models, "clusters" [clusters - 1, d] and "cluster_buffers" [clusters - 1, b] contain all but the first.
        downlink: with the setting `downlink`, the workers' `copy` of the parameters [d], and the state of the
            compressors; otherwise empty.
        states: optimizer states, tensors [d] by name: under "parameters" those of the server optimizer, under
            "gradients" those of the client algorithm. Only the keys that the run uses exist.
        groups: for each of the G groups of workers, its model ("rows" [G, d] and "buffers" [G, b]), its latest
            aggregated update ("last"), and the number of samples of its updates since it received the global model
            ("samples"). Also "unfit" and "losses", as in `CohortRows`. Empty without groups.
    """

    row: Tensor
    buffers: Tensor
    last: Tensor
    algorithm: State
    downlink: State
    states: dict[Sync, State]
    groups: State

    @classmethod
    def allocate(cls, task: RunTask, row: Tensor, buffers: Tensor, ranks: int = 1) -> GlobalModel:
        """Allocate the server's state for a global model.

        Args:
            task: run to compute.
            row: parameters of the global model, [d].
            buffers: buffers of the global model, [b].
            ranks: number of ranks. Several ranks allocate the optimizer states elsewhere, each for a part of the
                parameters.
        """
        chain, groups, others = (
            task.experiment.downlink_chain,
            task.experiment.group_count,
            task.algorithm.clusters - 1,
        )
        algorithm = {name: tensor.clone() for name, tensor in task.algorithm.server_state(row).items()}
        return cls(
            row=row,
            buffers=buffers,
            last=torch.zeros_like(row) if (task.top if groups else task).keeps_last else row.new_zeros(0),
            algorithm=algorithm | ({"cluster_buffers": buffers.repeat(others, 1)} if others else {}),
            downlink={"copy": row.clone()} | task.chain_states(chain, row) if chain else {},
            states={sync: task.stepper(sync).start(row) for sync in task.syncs if ranks == 1},
            groups=_rows_of_groups(task, groups, row, buffers) if groups else {},
        )

    def of_group(self, group: int) -> GlobalModel:
        """Return the model of a group as a GlobalModel, which has the server state of a group and contains views."""
        row, buffers, last = (self.groups[name][group] for name in ("rows", "buffers", "last"))
        return replace(self, row=row, buffers=buffers, last=last, states={"parameters": {}})

    def model(self, cluster: int) -> tuple[Tensor, Tensor]:
        """Return the parameters [d] and buffers [b] of the global model of `cluster`: 0 for `row` and `buffers`."""
        if not cluster:
            return self.row, self.buffers
        row, buffers = (self.algorithm[name][cluster - 1] for name in CLUSTERS)
        return row, buffers


@dataclass
class CohortRows:
    """Tensors with one row for each worker of the cohort. With ranks, each rank has only the rows of its own workers.

    If the cohort is trained in several parts, called waves (`RunTask.streams`), there are only rows for one wave.

    Attributes:
        size: number of workers that this process, or the processes that share these tensors, train in a round.
        rows: [cohort, d], parameters of each worker's model, or gradients if gradients are aggregated; [0, d] if no
            round stores them. If the rule uses the server's own model, an additional last row contains it.
        buffers: [cohort, b], buffers of each worker's model, float64.
        kept, chain_states: worker states of the client algorithm and of the update processors, tensors [cohort, width]
            by name.
        messages: tensors [cohort, width], by name, that the workers send in addition to their updates.
        received: tensors [cohort, width], by name, that the server sends in addition to the global parameters; only if
            workers start at different times.
        full_gradients: [cohort, d], gradients over all samples of each worker, if the client algorithm needs them;
            otherwise [0, d].
        train_loss: [cohort], mean training loss of each worker, float64, on the CPU.
        losses: [cohort], mean loss of the global model on each worker's samples before training, if the rule uses
            losses; float64, on the CPU.
        unfit: [cohort], int64, on the CPU: number of the latest aggregation, from 1, in which the worker's update
            contained NaN or infinity, or 0 if there is none.
        clusters: [cohort], int64, on the CPU: index of the global model that each worker has selected.
        workers: [cohort], IDs of all workers of the cohort, ascending.
        weights: [cohort], weight of each of these workers if weights are based on probabilities.
    """

    size: int
    rows: Tensor
    buffers: Tensor
    kept: State
    chain_states: State
    messages: State
    received: State
    full_gradients: Tensor
    train_loss: Tensor
    losses: Tensor
    unfit: Tensor
    clusters: Tensor
    workers: Tensor
    weights: Tensor

    @classmethod
    def allocate(cls, task: RunTask, server: GlobalModel, size: int, n_rows: int) -> CohortRows:
        """Allocate the tensors for `n_rows` workers. `size` is the attribute of the class.

        Raises ExperimentError if there is not enough memory.
        """
        d, b, cohort = len(server.row), len(server.buffers), task.experiment.largest_cohort

        def repeated(state: State) -> State:
            return {name: new_rows(n_rows, len(row), row.dtype, task.device).copy_(row) for name, row in state.items()}

        return cls(
            size=size,
            rows=_rows_of_a_cohort(n_rows if task.has_rows else 0, d, task),
            buffers=new_rows(n_rows, b, server.buffers.dtype, task.device),
            kept=repeated(state_at_first(task.algorithm, server.row, server.buffers)),
            chain_states=repeated(task.chain_states(task.experiment.chain, server.row)),
            messages=repeated(task.algorithm.message(server.row)),
            received={} if task.experiment.in_rounds else repeated(task.algorithm.send(server.algorithm)),
            full_gradients=new_rows(n_rows if task.algorithm.full_gradient else 0, d, task.dtype, task.device),
            train_loss=torch.zeros(n_rows, dtype=torch.double),
            losses=torch.zeros(n_rows, dtype=torch.double),
            unfit=torch.zeros(n_rows, dtype=torch.int64),
            clusters=torch.zeros(n_rows, dtype=torch.int64),
            workers=torch.arange(cohort),
            weights=torch.ones(cohort, dtype=torch.double),
        )

    @property
    def worker_rows(self) -> State:
        """Tensors [cohort, width], by name, with everything that workers may keep until their next round."""
        return {"buffers": self.buffers, **self.chain_states, **self.kept}


@dataclass
class TestResults:
    """Results of a test of the global model, with one entry per batch.

    Attributes:
        sums: [batches, 4], float64, on the CPU. The columns are the sum of losses, the number of correct predictions,
            the number of predictions that match the attacker's goal, and the number of samples that have such a goal.
        outputs: [batches, batch size, ...], outputs of the model, if metrics or a joint loss need them; otherwise [0].
    """

    sums: Tensor
    outputs: Tensor

    @classmethod
    def allocate(cls, task: RunTask, data: TensorData, module: nn.Module) -> TestResults:
        """Allocate the results for a test of `module` on all samples of `data`."""
        size = test_batch_size(task.device)
        sums = torch.zeros(-(-len(data) // size), 4, dtype=torch.double)
        nothing, is_joint = torch.zeros(0, device=task.device), joint_of(task.learning_task)
        if not len(data) or not (task.experiment.metrics or is_joint):
            return cls(sums, nothing)
        inputs, targets = data.gather(torch.arange(min(2, len(data))))  # a loss may squeeze that of a single sample
        with torch.no_grad(), preserve_random_state(task.device):
            sample = outputs_of(module.eval(), inputs)
        if is_joint and not is_joint(sample, targets) and not task.experiment.metrics:
            return cls(sums, nothing)
        return cls(sums, sample.new_zeros(len(sums), size, *sample.shape[1:]))


@dataclass
class SharedState:
    """Tensors that all processes of an engine read and write.

    Attributes:
        data: samples of the run.
        server: global model and server state.
        cohort: per-worker tensors of the current cohort.
        tests: results of the latest test, for the test samples and the validation samples.
    """

    data: RunData
    server: GlobalModel
    cohort: CohortRows
    tests: dict[Split, TestResults]

    @classmethod
    def allocate(cls, task: RunTask, *data: Any, ranks: int = 1) -> SharedState:
        """Allocate the tensors of a run, and initialise the global model.

        Args:
            task: run to compute.
            data: arguments of `RunData.on` that follow `dtype`.
            ranks: number of ranks. If there are several, each allocates only the rows of its own workers.
        """
        of_run, module = RunData.on(task.device, task.dtype, *data), task.new_module()
        layout = Layout.of(module)
        row = new_rows(1, layout.d, task.dtype, task.device)[0].copy_(layout.read(module))
        buffers = torch.zeros(layout.n_buffer_values, dtype=wide_dtype(task.device), device=task.device)
        layout.read_buffers(module, out=buffers)
        server, has_root = GlobalModel.allocate(task, row, buffers, ranks), len(of_run.root) > 0
        for cluster in range(1, task.algorithm.clusters):
            initial, (of_cluster, its_buffers) = task.new_module(cluster), server.model(cluster)
            of_cluster.copy_(layout.read(initial))
            layout.read_buffers(initial, out=its_buffers)
        size = -(-(task.experiment.largest_cohort + has_root) // ranks)
        return cls(
            data=of_run,
            server=server,
            cohort=CohortRows.allocate(task, server, size, 0 if task.streams else size),
            tests={
                "test": TestResults.allocate(task, of_run.test, module),
                "validation": TestResults.allocate(task, of_run.validation, module),
            },
        )

    def allocate_wave(self, task: RunTask, n_rows: int) -> None:
        """Allocate rows for a wave: a part of the cohort with at most `n_rows` workers (see `CohortRows`)."""
        self.cohort = CohortRows.allocate(task, self.server, self.cohort.size, n_rows)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint must contain to resume the run, by name."""
        server = self.server
        named = {"global_row": server.row, "last": server.last, "global_buffers": server.buffers}
        named |= {f"algorithm.{name}": tensor for name, tensor in server.algorithm.items()}
        named |= {f"downlink.{name}": tensor for name, tensor in server.downlink.items()}
        named |= {f"groups.{name}": tensor for name, tensor in server.groups.items()}
        states = {f"{sync}.{name}": tensor for sync, state in server.states.items() for name, tensor in state.items()}
        return named | states

    def share(self) -> SharedState:
        """Move all CPU tensors to shared memory, in place, and return this object.

        Raises ExperimentError if there is not enough shared memory.
        """
        data = self.data
        # The datasets have a block of their own, because a session reuses them for later runs.
        parts = data.train, data.test, data.validation, data.own_tests
        share([tensor for part in parts for tensor in part.tensors.values()])
        shards = [*data.shards.tensors, *data.worker_tests.tensors, data.root]
        share([*shards, *tensors_in(self.server), *tensors_in(self.cohort), *tensors_in(self.tests)])
        return self


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in a tensor, dict or dataclass, including nested ones."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict) or is_dataclass(value):
        parts = value.values() if isinstance(value, dict) else (getattr(value, item.name) for item in fields(value))
        for part in parts:
            yield from tensors_in(part)


def _rows_of_groups(task: RunTask, n: int, row: Tensor, buffers: Tensor) -> State:
    rows = new_rows(n, len(row), task.dtype, task.device).copy_(row)
    none, last = torch.zeros(n, dtype=torch.int64), torch.zeros_like(rows if task.keeps_last else rows[:, :0])
    counts = {"samples": none, "unfit": none.clone(), "losses": none.double()}
    return {"rows": rows, "buffers": buffers.repeat(n, 1), "last": last, **counts}


def _rows_of_a_cohort(n: int, d: int, task: RunTask) -> Tensor:
    """Allocate a tensor [n, d] for the models of n workers. Raises ExperimentError if it does not fit in memory."""
    if task.device.type != "cpu":
        return new_rows(n, d, task.dtype, task.device)
    nbytes, content = n * d * task.dtype.itemsize, f"one model for each of {n} workers"
    instead = f"a smaller cohort{task.remedy_for_updates}"
    require_memory(nbytes, content, instead)
    try:
        return new_rows(n, d, task.dtype, task.device)
    except RuntimeError as error:
        if (reason := describe_os_error(error)) is None:
            raise
        raise ExperimentError(f"memory: {content} takes {show_bytes(nbytes)}; {reason}; use {instead}") from error


def message_bytes(task: RunTask, shared: SharedState) -> tuple[int, int]:
    """Return how many bytes a worker receives and sends per round in addition to the model, as a pair."""
    received, sent = task.algorithm.numbers_sent(len(shared.server.row))
    if task.experiment.buffers == "average" and "cluster_buffers" in shared.server.algorithm:
        received += shared.server.algorithm["cluster_buffers"].numel()
    return received * task.dtype.itemsize, sent * task.dtype.itemsize


def test_batch_size(device: torch.device) -> int:
    """Return the batch size for tests of models on `device`."""
    return TEST_BATCH_ON_CPU if device.type == "cpu" else TEST_BATCH_ON_GPU
