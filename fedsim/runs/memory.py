"""Estimate of a run's main memory before its tensors are allocated.

The estimate counts the tensors that `allocate` makes on PyTorch's device "meta", which take no memory. It does not
count data, activations and libraries, so a run may need somewhat more memory, but hardly less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fedsim.asynchronous.server_state import ServerState
from fedsim.core.rows import Layout
from fedsim.rounds.worker_states import WorkerStates, initial_worker_state
from fedsim.training.shared_state import CohortRows, GlobalModel, SharedState, tensors_in
from fedsim.training.task import RunTask

META = torch.device("meta")


@dataclass(frozen=True)
class RunBytes:
    """Bytes of the tensors that a run allocates, without its data.

    Attributes:
        cohort: models, states and messages of the workers that are in memory at once.
        message: what a worker sends in addition to its model.
        server: global model, and the state of the server.
        worker_state: state that a worker keeps between rounds.
        stored: states of all workers that are expected to take part until the last round.
        in_flight: tensors of the workers that a checkpoint of an asynchronous run contains.
    """

    cohort: int = 0
    message: int = 0
    server: int = 0
    worker_state: int = 0
    stored: int = 0
    in_flight: int = 0

    @classmethod
    def of(cls, task: RunTask, d: int, n_buffer_values: int, n_rows: int) -> RunBytes:
        """Count the bytes of a run. The numbers are 0 if an initial state depends on the values of tensors.

        Args:
            task: run to compute.
            d, n_buffer_values: number of the model's parameters and of its buffers' values.
            n_rows: number of workers that are in memory at once.
        """
        experiment, task = task.experiment, replace(task, device=META)
        row = torch.empty(d, dtype=task.dtype, device=META)
        buffers = torch.empty(n_buffer_values, dtype=torch.double, device=META)
        try:
            server = GlobalModel.allocate(task, row, buffers)
            cohort = CohortRows.allocate(task, server, n_rows, n_rows)
            shared = SharedState(None, server, cohort, {})  # type: ignore[arg-type]  # no data
            worker_state = _bytes(initial_worker_state(task, shared))
            asynchronous = None if experiment.in_rounds else ServerState(task, shared, WorkerStates({}))
        except (RuntimeError, TypeError):  # such as that of Tensor.item on the device "meta"
            return cls()
        own, saved = (_bytes(asynchronous.own_tensors), _bytes(asynchronous.tensors)) if asynchronous else (0, 0)
        share = 1 - (1 - experiment.largest_cohort / experiment.workers) ** experiment.rounds  # that participates
        return cls(
            cohort=_bytes(cohort),
            message=_bytes(cohort.messages) // n_rows,
            server=_bytes(server) + own,
            worker_state=worker_state,
            stored=round(experiment.workers * share) * worker_state,
            in_flight=saved - own,
        )

    @property
    def saved(self) -> int:
        """Bytes of the run's state between two rounds. A race has a state for each repetition."""
        return self.server + self.stored + self.in_flight


def memory_needed(task: RunTask, layout: Layout, processes: int, *, stacked: bool, copies: int) -> dict[str, int]:
    """Estimate the bytes of main memory that a run on CPUs needs, by purpose.

    Args:
        task: run to compute.
        layout: positions of the model's parameters.
        processes: number of processes that train the workers.
        stacked: whether a process trains several workers at once.
        copies: number of copies of the run's state that are kept for repetitions, recovery and checkpoints.
    """
    experiment, cohort, row = task.experiment, task.experiment.largest_cohort, layout.d * task.dtype.itemsize
    n_rows = cohort + experiment.rule.accepts("root")
    at_once = experiment.batched.stack_size or 1 if stacked else 1  # workers that a process trains at once
    needed = RunBytes.of(task, layout.d, layout.n_buffer_values, processes * at_once if task.streams else n_rows)
    limit = needed.stored if task.worker_state_memory is None else task.worker_state_memory
    new = min(cohort * needed.worker_state, limit) if task.streams else 0  # states of a round that has not ended
    algorithm_state = len(task.algorithm.start(torch.zeros(1)))
    stack = min(at_once, -(-n_rows // processes))
    training = (3 + 2 * algorithm_state) * stack if stacked else 1 + algorithm_state
    races_without_locks = experiment.mode == "race" and experiment.policy.component.locking == "nothing"
    module_each = races_without_locks or ("gradients" in task.syncs and not stacked)
    modules = 3 * processes + (max(0, n_rows - processes) if module_each else 0)
    parts = {
        "models and states of the workers": needed.cohort,
        "global model and state of the server": needed.server,
        "sums of updates and messages": row + needed.message if task.streams else 0,
        "state that workers keep between rounds": min(needed.stored, limit) + new,
        "modules and gradients": (modules + processes * training) * row,
        "copies for repetitions, recovery and checkpoints": copies * needed.saved,
        "distances of all pairs": 8 * cohort * cohort if experiment.rule.accepts("gram") else 0,
    }
    return {purpose: nbytes for purpose, nbytes in parts.items() if nbytes}


def _bytes(tensors: object) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(tensors))
