"""The tensors that all processes of an engine work on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.clients import State
from fedsim.clients.algorithm import state_at_first
from fedsim.core.randomness import preserve_random_state
from fedsim.core.rows import Layout, new_rows
from fedsim.data import ListedShards, Shards, TensorData
from fedsim.engines.pool.shared_memory import share
from fedsim.engines.task import RunTask, Sync
from fedsim.errors import ExperimentError, show_bytes
from fedsim.processing import initial_residuals
from fedsim.system.devices import require_memory, wide_dtype
from fedsim.system.limits import describe_os_error

Split = Literal["test", "validation"]

TEST_BATCH_ON_CPU = 250  # faster than 1,000 on a CPU, where it stays in cache
TEST_BATCH_ON_GPU = 2_000


@dataclass
class RunData:
    """The samples of a run, and who holds them.

    Attributes:
        train, test, validation: the data, once; `validation` is held out of the training data, perhaps empty.
        classes: one more than the highest class or token of the targets; 0 for floating targets.
        shards: who holds which samples.
        worker_tests: which samples each worker tests on, if workers are evaluated.
        root: positions of the server's own samples, int64, on the host; empty where it has none.
    """

    train: TensorData
    test: TensorData
    validation: TensorData
    classes: int
    shards: Shards
    worker_tests: Shards
    root: Tensor

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
    ) -> RunData:
        """Return the data of a run on a device; the other arguments are attributes of the class."""
        nothing = np.zeros(0, dtype=np.int64)
        validation = test.take(nothing) if validation is None else validation
        train, test, validation = (replace(data, ids={}).to(device, dtype) for data in (train, test, validation))
        return cls(
            train=train,
            test=test,
            validation=validation,
            classes=max(train.classes, test.classes),
            shards=shards,
            worker_tests=worker_tests or ListedShards.of_arrays([nothing]),
            root=torch.from_numpy(nothing if root is None else root),
        )


@dataclass
class GlobalModel:
    """The global model, and what the server keeps from round to round.

    Attributes:
        row: [d], its parameters.
        buffers: [b], float64.
        last: [d], the last aggregated update, if the rule or the attack takes it; else [0].
        algorithm: what the server keeps for the client algorithm, tensors [w].
        states: what the server optimizer ("parameters") and the client algorithm ("gradients") keep of the row, tensors
            [d]; only for those that the run uses.
    """

    row: Tensor
    buffers: Tensor
    last: Tensor
    algorithm: State
    states: dict[Sync, State]


@dataclass
class CohortRows:
    """What belongs to the members of the cohort, one row for each; in each of several ranks, its part of the rows.

    Attributes:
        rows: [cohort, d], the models (gradients where gradients are aggregated), and one row more for the server's own
            if the rule takes it; [0, d] if no rows of single workers are needed.
        buffers: [cohort, b], float64.
        kept, residuals: the worker state, tensors [cohort, w], of the client algorithm and of the processors.
        messages: what the workers send besides their rows, tensors [cohort, w].
        received: what each worker was sent besides its row, tensors [cohort, w], if workers do not start together.
        full_gradients: [cohort, d], of all samples of each worker, if the client algorithm asks for them; else [0, d].
        train_loss: mean training loss of each member, float64 [cohort], on the host.
        losses: mean loss of each member at the global row before it trained, for rules that ask; as train_loss.
        unfit: [cohort], number of the last aggregation in which a row held something not finite, int64, on the host.
        workers, weights: the cohort, ascending, and its weights by inverse probability, in every rank.
    """

    rows: Tensor
    buffers: Tensor
    kept: State
    residuals: State
    messages: State
    received: State
    full_gradients: Tensor
    train_loss: Tensor
    losses: Tensor
    unfit: Tensor
    workers: Tensor
    weights: Tensor

    @classmethod
    def allocate(cls, task: RunTask, server: GlobalModel, n_rows: int) -> CohortRows:
        """Room for so many rows. Raises ExperimentError if there is no memory for them."""
        d, b, cohort = len(server.row), len(server.buffers), task.experiment.cohort_size

        def for_each(state: State) -> State:
            return {name: new_rows(n_rows, len(row), row.dtype, task.device).copy_(row) for name, row in state.items()}

        return cls(
            rows=_rows_of_a_cohort(n_rows if task.has_rows else 0, d, task),
            buffers=new_rows(n_rows, b, server.buffers.dtype, task.device),
            kept=for_each(state_at_first(task.algorithm, server.row, server.buffers)),
            residuals=for_each(initial_residuals(task.experiment.chain, server.row)),
            messages=for_each(task.algorithm.message(server.row)),
            received={} if task.experiment.in_rounds else for_each(task.algorithm.send(server.algorithm)),
            full_gradients=new_rows(n_rows if task.algorithm.full_gradient else 0, d, task.dtype, task.device),
            train_loss=torch.zeros(n_rows, dtype=torch.double),
            losses=torch.zeros(n_rows, dtype=torch.double),
            unfit=torch.zeros(n_rows, dtype=torch.int64),
            workers=torch.arange(cohort),
            weights=torch.ones(cohort, dtype=torch.double),
        )

    @property
    def worker_rows(self) -> State:
        """The rows that a worker may keep until its next round."""
        return {"buffers": self.buffers, **self.residuals, **self.kept}


@dataclass
class TestResults:
    """What the processes write when they test the global model.

    Attributes:
        sums: per batch the sum of losses and the count of correct answers, then, of the attacker's goal, the counts of
            answers that reach the goal and of samples that have one; float64 [batches, 4], on the host.
        outputs: the outputs of the model, [batches, batch size, ...], if metrics are computed from them; else [0].
    """

    sums: Tensor
    outputs: Tensor

    @classmethod
    def allocate(cls, task: RunTask, data: TensorData, module: nn.Module) -> TestResults:
        """Room for the results of a test of all samples."""
        size = test_batch_size(task.device)
        sums = torch.zeros(-(-len(data) // size), 4, dtype=torch.double)
        if not task.experiment.metrics or not len(data):
            return cls(sums, torch.zeros(0, device=task.device))
        with torch.no_grad(), preserve_random_state(task.device):
            sample = module.eval()(data.gather(torch.arange(1))[0])
        return cls(sums, sample.new_zeros(len(sums), size, *sample.shape[1:]))


@dataclass
class SharedState:
    """The tensors that all processes of an engine work on, in groups.

    Attributes:
        tests: the results of the newest test, of the test samples and of those held out for validation.
    """

    data: RunData
    server: GlobalModel
    cohort: CohortRows
    tests: dict[Split, TestResults]

    @classmethod
    def allocate(cls, task: RunTask, *data: Any, ranks: int = 1) -> SharedState:
        """Room for a cohort, with the global model at its start; `data` as in `RunData.on`, after the dtype.

        Each of several ranks allocates its part of the rows only, and leaves the optimizer states to `Ranks`.
        """
        of_run, module = RunData.on(task.device, task.dtype, *data), task.new_module()
        layout = Layout.of(module)
        row = new_rows(1, layout.d, task.dtype, task.device)[0].copy_(layout.read(module))
        buffers = torch.zeros(layout.n_buffer_values, dtype=wide_dtype(task.device), device=task.device)
        layout.read_buffers(module, out=buffers)
        server = GlobalModel(
            row=row,
            buffers=buffers,
            last=torch.zeros_like(row) if task.keeps_last else row.new_zeros(0),
            algorithm=task.algorithm.server_state(row),
            states={sync: task.stepper(sync).start(row) for sync in task.syncs if ranks == 1},
        )
        has_root = len(of_run.root) > 0
        return cls(
            data=of_run,
            server=server,
            cohort=CohortRows.allocate(task, server, -(-(task.experiment.cohort_size + has_root) // ranks)),
            tests={
                "test": TestResults.allocate(task, of_run.test, module),
                "validation": TestResults.allocate(task, of_run.validation, module),
            },
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors that one round leaves to the next, by name."""
        server = self.server
        named = {"global_row": server.row, "last": server.last, "global_buffers": server.buffers}
        named |= {f"algorithm.{name}": tensor for name, tensor in server.algorithm.items()}
        states = {f"{sync}.{name}": tensor for sync, state in server.states.items() for name, tensor in state.items()}
        return named | states

    def share(self) -> SharedState:
        """Move the tensors on the host to memory that other processes can map, in place.

        Raises ExperimentError if there is not enough of it.
        """
        data = self.data
        # Separately, since a session keeps them for later runs.
        share([tensor for part in (data.train, data.test, data.validation) for tensor in part.tensors])
        shards = [*data.shards.tensors, *data.worker_tests.tensors, data.root]
        share([*shards, *_tensors_in(self.server), *_tensors_in(self.cohort), *_tensors_in(self.tests)])
        return self


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a group, also those in dicts and in groups within it."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict) or is_dataclass(value):
        parts = value.values() if isinstance(value, dict) else (getattr(value, item.name) for item in fields(value))
        for part in parts:
            yield from _tensors_in(part)


def _rows_of_a_cohort(n: int, d: int, task: RunTask) -> Tensor:
    """Return the rows of a cohort. Raises ExperimentError if a CPU has no memory for them."""
    if task.device.type != "cpu":
        return new_rows(n, d, task.dtype, task.device)
    nbytes, content, instead = n * d * task.dtype.itemsize, f"one model for each of {n} workers", "a smaller cohort"
    require_memory(nbytes, content, instead)
    try:
        return new_rows(n, d, task.dtype, task.device)
    except RuntimeError as error:
        if (reason := describe_os_error(error)) is None:
            raise
        raise ExperimentError(f"memory: {content} takes {show_bytes(nbytes)}; {reason}; use {instead}") from error


def message_bytes(task: RunTask, shared: SharedState) -> tuple[int, int]:
    """Bytes that a worker receives and sends in its round besides the model."""
    received, sent = task.algorithm.numbers_sent(len(shared.server.row))
    return received * task.dtype.itemsize, sent * task.dtype.itemsize


def test_batch_size(device: torch.device) -> int:
    return TEST_BATCH_ON_CPU if device.type == "cpu" else TEST_BATCH_ON_GPU
