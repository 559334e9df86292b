"""Estimate of a run's main memory before allocation, and explanation of out-of-memory errors.

The estimate counts only tensors of the model's size and matrices with one number per pair of workers. It does not
count data, activations and libraries, so a run may need somewhat more memory, but hardly less.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from fedsim.clients import State
from fedsim.core.rows import Layout
from fedsim.processing import initial_states
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask


def state_needed(task: RunTask, d: int, n_buffer_values: int, server: int) -> dict[str, int]:
    """Estimate the bytes of a run's state between two rounds, by purpose. A race has a state for each repetition.

    Args:
        task: run to compute.
        d, n_buffer_values: number of the model's parameters and of its buffers' values.
        server: bytes of the tensors that only the server of an asynchronous run has.
    """
    experiment, cohort, row = task.experiment, task.experiment.largest_cohort, d * task.dtype.itemsize
    rows = 1 + task.keeps_last + sum(len(task.stepper(sync).start(torch.zeros(1))) for sync in task.syncs)
    rows += bool(experiment.broadcast)
    like = torch.empty(d, dtype=task.dtype, device="meta")
    share = 1 - (1 - cohort / experiment.workers) ** experiment.rounds  # expected fraction of workers that participate
    of_worker, exchanged = _of_worker(task, like, n_buffer_values)
    return {
        "global model and optimizer state": rows * row,
        "models of the groups": experiment.group_count * (1 + task.keeps_last) * row,
        "state of the client algorithm at the server": _bytes(task.algorithm.server_state(like)),
        "state that workers keep between rounds": round(experiment.workers * share) * of_worker,
        "server of an asynchronous run": server,
        "work in progress": 0 if experiment.in_rounds else cohort * (row + of_worker + exchanged),
    }


def memory_needed(
    task: RunTask, layout: Layout, processes: int, *, stacked: bool, copies: int, server: int
) -> dict[str, int]:
    """Estimate the bytes of main memory that a run on CPUs needs, by purpose, such as "rows" or "modules".

    Args:
        task: run to compute.
        layout: positions of the model's parameters.
        processes: number of processes that train the workers.
        stacked: whether a process trains several workers at once.
        copies: number of copies of the run's state that are kept for repetitions, recovery and checkpoints.
        server: bytes of the tensors that only the server of an asynchronous run has.
    """
    experiment, cohort, d = task.experiment, task.experiment.largest_cohort, layout.d
    row = d * task.dtype.itemsize
    n_rows = cohort + experiment.rule.accepts("root")
    algorithm_state = len(task.algorithm.start(torch.zeros(1)))
    held = processes * (experiment.batched.max_workers or 1 if stacked else 1) if task.streams else n_rows
    races_without_locks = experiment.mode == "race" and experiment.policy.component.locking == "nothing"
    module_each = races_without_locks or ("gradients" in task.syncs and not stacked)
    modules = 3 * processes + (n_rows - processes if module_each and n_rows > processes else 0)
    if stacked:
        width = min(experiment.batched.max_workers or 1, -(-n_rows // processes))
        training = processes * (3 + 2 * algorithm_state) * width
    else:
        training = processes * (1 + algorithm_state)
    like = torch.empty(d, dtype=task.dtype, device="meta")
    of_worker, exchanged = _of_worker(task, like, layout.n_buffer_values)
    state = state_needed(task, d, layout.n_buffer_values, server)
    copied = copies * sum(state.values())
    del state["work in progress"]  # the rows, and the state and messages of the workers
    stored = state["state that workers keep between rounds"]
    limit = stored if task.worker_state_memory is None else task.worker_state_memory
    new = min(cohort * of_worker, limit) if task.streams else 0  # states of a round that has not ended
    state["state that workers keep between rounds"] = min(stored, limit) + new
    parts = {
        "rows": held * row,
        **state,
        "sums of updates and messages": row + exchanged if task.streams else 0,
        "worker state and messages": (of_worker + exchanged) * held,
        "full gradients": held * row if task.algorithm.full_gradient else 0,
        "modules": modules * row,
        "gradients and client algorithm state": training * row,
        "copies for repetitions, recovery and checkpoints": copied,
        "distances of all pairs": 8 * cohort * cohort if experiment.rule.accepts("gram") else 0,
    }
    return {purpose: nbytes for purpose, nbytes in parts.items() if nbytes}


def _of_worker(task: RunTask, like: Tensor, n_buffer_values: int) -> tuple[int, int]:
    """Return the bytes of a worker's state and of its messages, as a pair. `like`: a row [d] on the device meta."""
    chain_state = initial_states(task.experiment.chain, like, task.shapes)
    state = _bytes(task.algorithm.worker_state(like)) + _bytes(chain_state)
    state += task.algorithm.buffers_kept(n_buffer_values).width * torch.double.itemsize
    server_state = task.algorithm.server_state(like)
    received = 0 if task.experiment.in_rounds else _bytes(task.algorithm.send(server_state))
    return state, _bytes(task.algorithm.message(like)) + received


def _bytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def buffer_bytes(task: RunTask, shared: SharedState) -> int:
    """Return the bytes of the model's buffers that are sent with the parameters; 0 unless buffers are averaged."""
    sent = shared.server.buffers.numel() - task.algorithm.personal_buffers.width
    return sent * task.dtype.itemsize if task.experiment.buffers == "average" else 0


def personal_bytes(task: RunTask) -> int:
    """Return the bytes of a model's personal parameters, which stay at the worker."""
    return task.algorithm.personal_columns.width * task.dtype.itemsize


@contextlib.contextmanager
def explain_oom(task: RunTask, processes: int, width: int | None = None) -> Iterator[None]:
    """Return a context in which out-of-memory errors name the settings to reduce.

    Args:
        task: run that is computed.
        processes: number of processes.
        width: number of workers that are trained at once; None if workers are trained one by one.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        if isinstance(error.__cause__, torch.OutOfMemoryError):
            raise  # this error has already been explained
        raise torch.OutOfMemoryError(f"{what_would_fit(task, processes, width)} ({_said_by(error)})") from error


def what_would_fit(task: RunTask, processes: int, width: int | None = None) -> str:
    """Return a message for an out-of-memory error, which names the settings to reduce.

    Example: `cuda:0 is out of memory; reduce one of: processes (now 4), local.batch_size (now 64)`.
    """
    width = width or task.experiment.batched.max_workers
    sizes = {"processes": processes, "batched.max_workers": width or 1, "local.batch_size": task.schedule.largest_batch}
    larger = [f"{key} (now {size})" for key, size in sizes.items() if size > 1]
    remedy = f"reduce one of: {', '.join(larger)}" if larger else "use a smaller model"
    return f"{task.device} is out of memory; {remedy}{task.remedy_for_updates}"


def _said_by(error: Exception) -> str:
    """Return the first two sentences of PyTorch's out-of-memory message."""
    return ". ".join(" ".join(str(error).split()).split(". ")[:2]).rstrip(".")
