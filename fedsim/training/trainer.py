"""Interface of trainers. See `sequential.py` for the sequential trainer and `stacked.py` for the stacked trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fedsim.training.batches import WorkItem
from fedsim.training.stacked_tests import StackedTests


class Trainer(Protocol):
    """Interface of trainers, which train the workers of one process.

    A worker's row is the flat vector of its parameters or gradients. Results are written to the `SharedState`.

    Attributes:
        averages: whether the trainer has the method `step_along_mean`, which averages gradients instead of storing the
            gradient of each worker.
    """

    averages: bool

    @property
    def width(self) -> int | None:
        """Maximum number of workers that are trained at once; None if workers are trained one by one."""

    @property
    def replays(self) -> Any:
        """CUDA graphs of the training steps; None if this trainer never uses CUDA graphs."""

    @property
    def stacked_tests(self) -> StackedTests | None:
        """Tests of several models at once; None if models are tested one by one."""

    def announce(self, members: Sequence[WorkItem]) -> None:
        """Announce which workers are trained next, so that their batches can be drawn together, and early on a GPU."""

    def train(self, members: Sequence[WorkItem], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Train each worker of `members` on its own samples.

        Training starts from the worker's parameters in `CohortRows.rows`, and overwrites them. `meanwhile` is called
        after all steps are launched, before this process waits for the device.
        """

    def full_gradients(self, members: Sequence[WorkItem]) -> None:
        """Compute each worker's mean gradient over all its samples, at its parameters in `CohortRows.rows`."""

    def begin_gradient_round(self, members: Sequence[WorkItem]) -> Any:
        """Begin a round of synchronous SGD for the given workers. `CohortRows.rows` will contain their gradients."""

    def gradients(self, step: int) -> None:
        """Compute the gradient of the global model on each worker's next batch, and store it in `CohortRows.rows`.

        Workers that have no more batches are skipped.
        """

    def end_gradient_round(self) -> None:
        """End the round that `begin_gradient_round` began."""
