"""The task of an engine: a description for every process, and the tensors that all processes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.byzantine import Attackers
from fedsim.clients import ClientAlgorithm, State
from fedsim.clients.algorithm import state_at_first
from fedsim.core.learning_task import LearningTask
from fedsim.core.randomness import preserve_random_state, seed_everything
from fedsim.core.rows import Layout, new_rows
from fedsim.core.training import Objective
from fedsim.data import ListedShards, Shards, TensorData, transforms_of_workers
from fedsim.data.partitions import Transform
from fedsim.engines.pool.shared_memory import share
from fedsim.engines.schedule import Amount, DrawnAmount, Schedule
from fedsim.errors import ExperimentError, show_bytes
from fedsim.processing import initial_residuals
from fedsim.server import ServerStep
from fedsim.system.devices import require_memory, wide_dtype
from fedsim.system.limits import describe_os_error
from fedsim.system.precision import PRECISIONS, Precision

if TYPE_CHECKING:
    from fedsim.config.experiment import Experiment

Sync = Literal["parameters", "gradients"]

TEST_BATCH_ON_CPU = 250  # faster than 1,000 on a CPU, where it stays in cache
TEST_BATCH_ON_GPU = 2_000


@dataclass(frozen=True)
class RunTask:
    """An experiment as every process of an engine knows it, with what depends on the machine, the model and the data.

    Attributes:
        experiment: with its components, which belong to this run; without its data set. See `Experiment.own`.
        solver: the client algorithm, which knows the model.
        byzantine: the Byzantine workers of each round.
        scratch_folder: folder for temporary files; None: that of the system.
    """

    experiment: Experiment
    device: torch.device
    solver: ClientAlgorithm
    byzantine: Attackers
    scratch_folder: str | None = None

    @property
    def precision(self) -> Precision:
        return PRECISIONS[self.experiment.precision]

    @property
    def dtype(self) -> torch.dtype:
        """The type of rows, and the default of other tensors."""
        return self.precision.rows

    @property
    def learning_task(self) -> LearningTask:
        """The loss, and which answers are correct."""
        return self.experiment.task.component

    @cached_property
    def schedule(self) -> Schedule:
        """The local work of all workers and rounds."""
        local, seed = self.experiment.local, self.experiment.seed

        def amount(given: int | list[int] | dict[str, list[int]] | None) -> Amount | None:
            if isinstance(given, dict):
                uniform, choice = given.get("uniform"), given.get("choice", [])
                return DrawnAmount(range(uniform[0], uniform[1] + 1) if uniform else tuple(choice), seed)
            return tuple(given) if isinstance(given, list) else given

        return Schedule(local.batch_size, amount(local.epochs), amount(local.steps), local.drop_last, local.accumulate)

    @cached_property
    def transforms(self) -> Sequence[Transform | None] | None:
        """What the partition does to the samples of each worker; None: nothing."""
        partition = self.experiment.partition
        return transforms_of_workers(self.experiment.workers, partition.strategy, **partition.params)

    @property
    def worker_state_memory(self) -> int | None:
        """Bytes of worker state from which it lies in files; None: never."""
        return None if self.experiment.mode == "race" else self.experiment.worker_state_memory

    @property
    def keeps_last(self) -> bool:
        """Whether the last aggregated update has to be kept, for the rule or for the attack."""
        by_attack = bool(self.byzantine) and "last" in self.experiment.attack.component.accepts
        return self.experiment.rule.accepts("last") or by_attack

    def sync_in(self, round: int) -> Sync:
        """Whether a round aggregates gradients or parameters."""
        return "gradients" if round <= self.experiment.rounds_of_gradients else "parameters"

    @property
    def objective(self) -> Objective:
        """The loss of training, of tests and of all trials of a model."""
        return Objective(self.precision, self.learning_task)

    @property
    def syncs(self) -> tuple[Sync, ...]:
        """What the rounds of the run aggregate, in order: ("gradients", "parameters") for post-local SGD."""
        return tuple(dict.fromkeys(map(self.sync_in, (1, self.experiment.rounds))))

    @property
    def has_rows(self) -> bool:
        """Whether there are rows of single workers in any round."""
        return self.experiment.gradient_hook is None or "parameters" in self.syncs

    def local_lr_at(self, round: int, step: int = 0) -> float | None:
        """The learning rate of the local solver in a step (from 0) of a round, if it has one."""
        lr, schedule = self.experiment.local_lr, self.experiment.local_schedule
        return lr if schedule is None or lr is None else schedule.rate(lr, round, step)

    def solver_at(self, round: int, step: int = 0) -> ClientAlgorithm:
        """The solver with the learning rate of a step (from 0) of a round."""
        lr = self.local_lr_at(round, step)
        return self.solver if self.experiment.local_schedule is None or lr is None else self.solver.with_lr(lr)

    def server_at(self, round: int) -> ServerStep:
        """The server optimizer with the learning rate of a round."""
        server: Any = self.experiment.server.component
        schedule = self.experiment.server_schedule
        return server if schedule is None else replace(server, lr=schedule.rate(server.lr, round))

    def stepper(self, sync: Sync) -> ClientAlgorithm | ServerStep:
        """What moves the global row: the server optimizer along updates, or the solver along gradients."""
        return self.experiment.server.component if sync == "parameters" else self.solver

    def stepper_at(self, moment: tuple[int, ...]) -> ClientAlgorithm | ServerStep:
        """The `stepper` of a round, or of a round and a step, with the learning rates of then."""
        return self.server_at(moment[0]) if self.sync_in(moment[0]) == "parameters" else self.solver_at(*moment)

    def new_module(self) -> nn.Module:
        """The model at its start, the same in every process; the global random state is left as it was.

        Raises ExperimentError if it has complex parameters or buffers.
        """
        with preserve_random_state(torch.device("cpu")):
            seed_everything(torch.device("cpu"), self.experiment.seed, "model")
            module = self.experiment.model.component()
        _require_real(module)
        return module.to(self.device, self.dtype)


@dataclass
class SharedState:
    """The tensors that all processes of an engine work on.

    Attributes:
        train, test, validation: the data, once; `validation` is held out of the training data, perhaps empty.
        classes: one more than the highest class or token of the targets; 0 for floating targets.
        shards: who holds which samples.
        worker_tests: which samples each worker tests on, if workers are evaluated.
        root: positions of the server's own samples, int64, on the host; empty where it has none.
        global_row: [d], the global model.
        rows: [cohort, d], one row for each member of the cohort (its gradient where gradients are aggregated), and one
            more for the server's own row if the rule takes it; [0, d] if no rows of single workers are needed.
        global_buffers, buffers: the same for buffers, float64 [b] and [cohort, b].
        kept, residuals: the cohort's worker state, tensors [cohort, w], of the client algorithm and of the processors.
        messages: what the workers of the cohort send besides their rows, tensors [cohort, w].
        full_gradients: [cohort, d], of all samples of each worker, if the client algorithm asks for them; else [0, d].
        server_state: what the server keeps for the client algorithm, tensors [w].
        received: what each worker was sent besides its row, tensors [cohort, w], if workers do not start together.
        states: what the server optimizer ("parameters") and the solver ("gradients") keep of the global row, tensors
            [d]; only for those that the run uses.
        last: [d], the last aggregated update, if the rule or the attack takes it; else [0].
        unfit: [cohort], number of the last aggregation in which a row held something not finite, int64, on the host.
        train_loss: mean training loss of each member of the cohort, float64 [cohort], on the host.
        losses: mean loss of each member at the global row before it trained, for rules that ask; as train_loss.
        cohort_workers, cohort_weights: the cohort, ascending, and its weights by inverse probability, in every rank.
        test_sums: per test batch the sum of losses and the count of correct answers, then, of the attacker's goal, the
            counts of answers that reach the goal and of samples that have one; float64 [batches, 4], on the host.
        validation_sums: the same of the validation batches.
        test_outputs, validation_outputs: the outputs of the model for these batches, [batches, batch size, ...], if
            metrics are computed from them; else [0].
    """

    train: TensorData
    test: TensorData
    validation: TensorData
    classes: int
    shards: Shards
    worker_tests: Shards
    root: Tensor
    global_row: Tensor
    rows: Tensor
    global_buffers: Tensor
    buffers: Tensor
    kept: State
    residuals: State
    messages: State
    full_gradients: Tensor
    server_state: State
    received: State
    states: dict[Sync, State]
    last: Tensor
    unfit: Tensor
    train_loss: Tensor
    losses: Tensor
    cohort_workers: Tensor
    cohort_weights: Tensor
    test_sums: Tensor
    validation_sums: Tensor
    test_outputs: Tensor
    validation_outputs: Tensor

    @classmethod
    def allocate(
        cls,
        task: RunTask,
        train: TensorData,
        test: TensorData,
        shards: Shards,
        root: np.ndarray | None = None,
        worker_tests: Shards | None = None,
        validation: TensorData | None = None,
        *,
        ranks: int = 1,
    ) -> SharedState:
        """Room for a cohort, with the global row at the model's start; the arguments are attributes of the class.

        Each of several ranks allocates its part of the rows only, and leaves the optimizer states to its aggregator.
        """
        module, cohort = task.new_module(), task.experiment.cohort_size
        layout = Layout.of(module)
        validation = test.take(np.zeros(0, dtype=np.int64)) if validation is None else validation
        parts = [replace(data, ids=None).to(task.device, task.dtype) for data in (train, test, validation)]
        train, test, validation = parts
        global_row = new_rows(1, layout.d, task.dtype, task.device)[0].copy_(layout.read(module))
        wide = wide_dtype(task.device)
        global_buffers = torch.zeros(layout.n_buffer_values, dtype=wide, device=task.device)
        layout.read_buffers(module, out=global_buffers)
        n_rows = -(-(cohort if root is None else cohort + 1) // ranks)
        server_state = task.solver.server_state(global_row)

        def for_each(state: State) -> State:
            return {name: new_rows(n_rows, len(row), row.dtype, task.device).copy_(row) for name, row in state.items()}

        return cls(
            train=train,
            test=test,
            validation=validation,
            classes=max(train.classes, test.classes),
            shards=shards,
            worker_tests=worker_tests or ListedShards.of_arrays([np.zeros(0, dtype=np.int64)]),
            root=torch.from_numpy(np.zeros(0, dtype=np.int64) if root is None else root),
            global_row=global_row,
            rows=_rows_of_a_cohort(n_rows if task.has_rows else 0, layout.d, task),
            global_buffers=global_buffers,
            buffers=new_rows(n_rows, layout.n_buffer_values, wide, task.device),
            kept=for_each(state_at_first(task.solver, global_row, global_buffers)),
            residuals=for_each(initial_residuals(task.experiment.chain, global_row)),
            messages=for_each(task.solver.message(global_row)),
            full_gradients=new_rows(n_rows if task.solver.full_gradient else 0, layout.d, task.dtype, task.device),
            server_state=server_state,
            received={} if task.experiment.in_rounds else for_each(task.solver.send(server_state)),
            states={sync: task.stepper(sync).start(global_row) for sync in task.syncs if ranks == 1},
            last=torch.zeros_like(global_row) if task.keeps_last else global_row.new_zeros(0),
            unfit=torch.zeros(n_rows, dtype=torch.int64),
            train_loss=torch.zeros(n_rows, dtype=torch.double),
            losses=torch.zeros(n_rows, dtype=torch.double),
            test_sums=_sums_of_batches(test, task),
            validation_sums=_sums_of_batches(validation, task),
            test_outputs=_outputs_of_batches(test, task, module),
            validation_outputs=_outputs_of_batches(validation, task, module),
            cohort_workers=torch.arange(cohort),
            cohort_weights=torch.ones(cohort, dtype=torch.double),
        )

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors that one round leaves to the next, by name."""
        named = {"global_row": self.global_row, "last": self.last, "global_buffers": self.global_buffers}
        named |= {f"algorithm.{name}": tensor for name, tensor in self.server_state.items()}
        states = {f"{sync}.{name}": tensor for sync, state in self.states.items() for name, tensor in state.items()}
        return named | states

    @property
    def worker_rows(self) -> State:
        """The cohort's rows that a worker may keep until its next round."""
        return {"buffers": self.buffers, **self.residuals, **self.kept}

    def share(self) -> SharedState:
        """Move the tensors on the host to memory that other processes can map, in place.

        Raises ExperimentError if there is not enough of it.
        """
        tensors = [value for item in fields(self) if isinstance(value := getattr(self, item.name), Tensor)]
        named = [*self.states.values(), self.kept, self.residuals, self.messages, self.server_state, self.received]
        tensors += [tensor for state in named for tensor in state.values()]
        kept = [self.train, self.test, self.validation]
        # Separately, since a session keeps them for later runs.
        share([tensor for data in kept for tensor in data.tensors])
        share([*tensors, *self.shards.tensors, *self.worker_tests.tensors])
        return self


def _require_real(module: nn.Module) -> None:
    """Raise ExperimentError if the model has complex tensors, whose imaginary part rows would lose."""
    for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in tensors:
            if tensor.is_complex():
                raise ExperimentError(
                    f"model: the {kind} {name} is complex ({tensor.dtype}); must be real: keep its real and imaginary "
                    "parts in one real tensor [..., 2], and use torch.view_as_complex in forward"
                )


def _rows_of_a_cohort(n: int, d: int, task: RunTask) -> Tensor:
    """The rows of a cohort. Raises ExperimentError if a CPU has no memory for them."""
    if task.device.type != "cpu":
        return new_rows(n, d, task.dtype, task.device)
    nbytes, what, instead = n * d * task.dtype.itemsize, f"one model for each of {n} workers", "a smaller cohort"
    require_memory(nbytes, what, instead)
    try:
        return new_rows(n, d, task.dtype, task.device)
    except RuntimeError as error:
        if (reason := describe_os_error(error)) is None:
            raise
        raise ExperimentError(f"memory: {what} takes {show_bytes(nbytes)}; {reason}; use {instead}") from error


def _sums_of_batches(data: TensorData, task: RunTask) -> Tensor:
    return torch.zeros(-(-len(data) // test_batch_size(task.device)), 4, dtype=torch.double)


def _outputs_of_batches(data: TensorData, task: RunTask, module: nn.Module) -> Tensor:
    """Room for the outputs of the model for all samples; [0] without metrics, or without samples."""
    if not task.experiment.metrics or not len(data):
        return torch.zeros(0, device=task.device)
    with torch.no_grad(), preserve_random_state(task.device):
        sample = module.eval()(data.gather(torch.arange(1))[0])
    return sample.new_zeros(len(_sums_of_batches(data, task)), test_batch_size(task.device), *sample.shape[1:])


def message_bytes(task: RunTask, shared: SharedState) -> tuple[int, int]:
    """Bytes that a worker receives and sends in its round besides the model."""
    received, sent = task.solver.numbers_sent(len(shared.global_row))
    return received * task.dtype.itemsize, sent * task.dtype.itemsize


def test_batch_size(device: torch.device) -> int:
    return TEST_BATCH_ON_CPU if device.type == "cpu" else TEST_BATCH_ON_GPU
