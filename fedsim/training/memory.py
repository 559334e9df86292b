"""Bytes of the buffers and personal parameters of a model, and explanation of out-of-memory errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask


def buffer_bytes(task: RunTask, shared: SharedState) -> int:
    """Return the bytes of the model's buffers that are sent with the parameters; 0 unless buffers are averaged."""
    sent = shared.server.buffers.numel() - task.algorithm.personal_buffers.width
    return sent * task.dtype.itemsize if task.experiment.buffers == "average" else 0


def received_bytes(task: RunTask, shared: SharedState, round: int) -> int:
    """Return the bytes of parameters that a worker receives in `round`, without the setting `downlink`.

    In the first round these are the whole model, without personal parameters, also if fragments are synchronized.
    """
    if round == 1:
        return shared.server.row.nbytes - personal_bytes(task)
    return task.fragment_received(round).columns.width * task.dtype.itemsize


def personal_bytes(task: RunTask) -> int:
    """Return the bytes of a model's personal parameters, which stay at the worker."""
    return task.algorithm.personal_columns.width * task.dtype.itemsize


@contextlib.contextmanager
def explain_oom(task: RunTask, processes: int, width: int | None = None) -> Iterator[None]:
    """Return a context manager in which out-of-memory errors name the settings to reduce.

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
    width = width or task.experiment.batched.stack_size
    sizes = {"processes": processes, "batched.stack_size": width or 1, "local.batch_size": task.schedule.largest_batch}
    larger = [f"{key} (now {size})" for key, size in sizes.items() if size > 1]
    remedy = f"reduce one of: {', '.join(larger)}" if larger else "use a smaller model"
    return f"{task.device} is out of memory; {remedy}{task.remedy_for_updates}"


def _said_by(error: Exception) -> str:
    """Return the first two sentences of PyTorch's out-of-memory message."""
    return ". ".join(" ".join(str(error).split()).split(". ")[:2]).rstrip(".")
