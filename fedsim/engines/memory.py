"""The main memory that a run needs, known before it is allocated, and errors of a device that has none left.

Only what has the size of a model, or of all pairs of a cohort, is counted: not data, activations and libraries. So a
run may need somewhat more, but hardly less.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fedsim.clients import State
from fedsim.engines.shared_state import SharedState
from fedsim.engines.task import RunTask
from fedsim.processing import initial_residuals


def memory_needed(task: RunTask, d: int, processes: int, *, stacked: bool, copies: int) -> dict[str, int]:
    """Bytes of main memory that a run on CPUs needs, by what they are for.

    Args:
        d: parameters of the model.
        processes: how many processes train the workers.
        stacked: whether a process trains stacks of rows.
        copies: how many copies of the state before a round are kept, for recovery and for checkpoints.
    """
    experiment, cohort = task.experiment, task.experiment.cohort_size
    row, sample_row = d * task.dtype.itemsize, torch.zeros(1)
    n_rows = cohort + experiment.rule.accepts("root")
    algorithm_state = len(task.algorithm.start(sample_row))
    state = 1 + task.keeps_last + sum(len(task.stepper(sync).start(sample_row)) for sync in task.syncs)
    lasting = state if experiment.in_rounds else state + n_rows  # on the clock, rows go on from round to round
    gradients_of_all = "gradients" in task.syncs and not stacked
    modules = 3 * processes + (n_rows - processes if gradients_of_all and n_rows > processes else 0)
    if stacked:
        width = min(experiment.batched.max_rows or 1, -(-n_rows // processes))
        training = processes * (3 + 2 * algorithm_state) * width
    else:
        training = processes * (1 + algorithm_state)
    like = torch.empty(d, dtype=task.dtype, device="meta")
    server_state = task.algorithm.server_state(like)
    state_bytes = _bytes(task.algorithm.worker_state(like)) + _bytes(initial_residuals(experiment.chain, like))
    received = 0 if experiment.in_rounds else _bytes(task.algorithm.send(server_state))
    exchanged = _bytes(task.algorithm.message(like)) + received
    share = 1 - (1 - cohort / experiment.workers) ** experiment.rounds  # of the workers in any round, on average
    stored = round(experiment.workers * share) * state_bytes
    limit = stored if task.worker_state_memory is None else task.worker_state_memory
    parts = {
        "rows": n_rows * row,
        "global model and optimizer state": state * row,
        "worker state and messages": (state_bytes + exchanged) * n_rows,
        "state of the client algorithm at the server": (1 + copies) * _bytes(server_state),
        "full gradients": n_rows * row if task.algorithm.full_gradient else 0,
        "state that workers keep between rounds": min(stored, limit) + copies * stored,
        "modules": modules * row,
        "gradients and client algorithm state": training * row,
        "copies for recovery and checkpoints": copies * lasting * row,
        "distances of all pairs": 8 * cohort * cohort if experiment.rule.accepts("gram") else 0,
    }
    return {what: nbytes for what, nbytes in parts.items() if nbytes}


def _bytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def buffer_bytes(task: RunTask, shared: SharedState) -> int:
    """Bytes of the buffers that are sent with a model; 0 unless buffers are averaged."""
    sent = shared.server.buffers.numel() - task.algorithm.personal_buffers.width
    return sent * task.dtype.itemsize if task.experiment.buffers == "average" else 0


def personal_bytes(task: RunTask) -> int:
    """Bytes of the columns of a row that stay with the workers."""
    return task.algorithm.personal_columns.width * task.dtype.itemsize


@contextlib.contextmanager
def explain_oom(task: RunTask, processes: int, width: int | None = None) -> Iterator[None]:
    """Turn an out-of-memory error of the block into one that suggests smaller settings.

    Args:
        width: rows in a stack, if rows are stacked.

    Raises torch.OutOfMemoryError with one line that has the settings in use.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        if isinstance(error.__cause__, torch.OutOfMemoryError):
            raise  # it has been explained already
        raise torch.OutOfMemoryError(f"{what_would_fit(task, processes, width)} ({_said_by(error)})") from error


def what_would_fit(task: RunTask, processes: int, width: int | None = None) -> str:
    """`cuda:0 has no memory left; less of this would fit: processes (4 now), local.batch_size (64 now)`."""
    width = width or task.experiment.batched.max_rows
    sizes = {"processes": processes, "batched.max_rows": width or 1, "local.batch_size": task.schedule.batch_size}
    larger = [f"{key} ({size} now)" for key, size in sizes.items() if size > 1]
    remedy = f"less of this would fit: {', '.join(larger)}" if larger else "only a smaller model would fit"
    return f"{task.device} has no memory left; {remedy}"


def _said_by(error: Exception) -> str:
    """Return the first two sentences, which have the size of the allocation; the others are advice to programmers."""
    return ". ".join(" ".join(str(error).split()).split(". ")[:2]).rstrip(".")
