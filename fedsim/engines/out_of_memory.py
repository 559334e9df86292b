"""Out-of-memory errors of a device that suggest smaller settings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fedsim.engines.task import TaskSpec


@contextlib.contextmanager
def explain_oom(task: TaskSpec, processes: int, width: int | None = None) -> Iterator[None]:
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


def what_would_fit(task: TaskSpec, processes: int, width: int | None = None) -> str:
    """`cuda:0 has no memory left; less of this would fit: processes (4 now), local.batch_size (64 now)`."""
    width = width or task.width
    sizes = {"processes": processes, "batched.width": width or 1, "local.batch_size": task.schedule.batch_size}
    larger = [f"{key} ({size} now)" for key, size in sizes.items() if size > 1]
    remedy = f"less of this would fit: {', '.join(larger)}" if larger else "only a smaller model would fit"
    return f"{task.device} has no memory left; {remedy}"


def _said_by(error: Exception) -> str:
    """The first two sentences, which have the size of the allocation; the others are advice to programmers."""
    return ". ".join(" ".join(str(error).split()).split(". ")[:2]).rstrip(".")
