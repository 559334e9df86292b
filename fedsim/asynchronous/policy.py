"""The interface of asynchronous policies.

A policy decides when a worker may start, which model the worker starts from, and what the server does with the
worker's result. On the virtual clock and in a race, each work item goes through these steps:

    1. `may_start(server, slot)`    whether this idle worker may start; if not, it is asked again after the next update
    2. `local_steps(server, ...)`   number of local steps (only for workers that send models)
    3. `pull(server, slot)`         give the worker its start model
    4. (training)                   the row `server.rows[slot]` becomes a gradient or a trained model
    5. `take(server, arrival)`      use the row: step the global model, or buffer the row for a later step

A slot is the number of one of the concurrent workers, and the index of its row, a flat parameter vector. The global row
is the flat parameter vector of the server's model.

A policy is a frozen dataclass derived from `Policy`; its fields are its configuration. A policy has no mutable state:
`start` creates the tensors that the policy needs between arrivals, and the server stores them. So the same policy runs
on the virtual clock and, with these tensors in shared memory, in racing processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from fedsim.clients import State
from fedsim.core.registry import Registry

if TYPE_CHECKING:
    from fedsim.asynchronous.server_state import ServerState

Work = Literal["gradient", "model"]
Locking = Literal["server", "pair", "nothing"]
StateScope = frozenset[Literal["shared", "private"]]


class Arrival(NamedTuple):
    """A finished work item, whose result is in `server.rows[slot]`.

    Attributes:
        slot: place of the worker among the concurrent workers, which is also the index of its row.
        worker: ID of the worker.
        unit: number of work items that this slot started before this one.
        staleness: number of updates of the global model since the worker read it.
    """

    slot: int
    worker: int
    unit: int
    staleness: int


class Policy(ABC):
    """Base class for asynchronous policies. The defaults suit a policy with one server and one global model.

    Attributes:
        work: what a worker sends: the "gradient" of one step, or the "model" after a round of local training.
        in_rounds: whether the policy is the synchronous loop instead of an asynchronous policy.
        cancels: whether an update of the global model cancels all work that started before the update.
        needs_momentum: whether the client algorithm must have a state, such as momentum.
        allows_sampling: whether there may be more workers than `cohort`, the number of concurrent workers.
        uses_server_optimizer: whether the experiment's server optimizer updates the global model.
        locking: what a race locks: the "server"; a "pair" of workers (the one whose result arrives, and its `partner`);
            or "nothing". With "nothing", workers compute gradients at the live global model, and `pull` and `may_start`
            are not called.
    """

    work: ClassVar[Work] = "gradient"
    in_rounds: ClassVar[bool] = False
    cancels: ClassVar[bool] = False
    needs_momentum: ClassVar[bool] = False
    allows_sampling: ClassVar[bool] = False
    uses_server_optimizer: ClassVar[bool] = False
    locking: ClassVar[Locking] = "server"

    @property
    def needs_replicas(self) -> bool:
        """Whether the server keeps a copy of each worker's start model, at least until the worker's result arrives."""
        return self.work == "model"

    @property
    def state_scope(self) -> StateScope:
        """Set of the optimizer states (momentum) that the policy's steps use.

        "shared" is one state for all workers, and "private" is a separate state for each worker.
        """
        return frozenset(["shared"] if self.work == "gradient" else [])

    def check(self, n_workers: int) -> None:  # noqa: B027
        """Raise ExperimentError if the policy does not support `n_workers` concurrent workers."""

    def start(self, server: ServerState) -> State:
        """Return the policy's initial state: named tensors, which the server stores as `server.policy_state`."""
        return {}

    def may_start(self, server: ServerState, slot: int) -> bool:
        """Whether the idle worker in `slot` may start its next work item now."""
        return True

    def local_steps(self, server: ServerState, slot: int, scheduled: int) -> int | None:
        """Return the number of local steps in the next round of the worker in `slot`; None means `scheduled` steps."""
        return None

    def pull(self, server: ServerState, slot: int) -> None:
        """Give the idle worker in `slot` the model from which its next work item starts."""
        server.pull(slot)

    @abstractmethod
    def take(self, server: ServerState, arrival: Arrival) -> None:
        """Use the arrived result, `server.rows[arrival.slot]`: take a step on the global model, or buffer it."""

    def partner(self, server: ServerState, slot: int, unit: int) -> int | None:
        """Return the slot of the second worker whose model `take` changes, or None if `take` changes only one.

        Args:
            server: state of the server.
            slot: slot of the result that `take` will receive.
            unit: number of work items that this slot started before the one with this result.
        """
        return None

    def on_departure(self, server: ServerState) -> None:  # noqa: B027
        """Called after a change of `server.alive`: a worker has left or, after a race's round, all workers are back."""

    def buffered(self, server: ServerState) -> int:
        """Return the number of results that have arrived but are not yet part of an update."""
        return 0

    def publish(self, server: ServerState) -> None:  # noqa: B027
        """Write the model to test into `server.global_row`. Only needed if the policy keeps this model elsewhere."""

    def traffic(self, unit: int) -> tuple[int, int]:
        """Return (sent, received): how many models or gradients a worker sends after and receives before a work item.

        `unit` numbers the worker's work items from 0.
        """
        return 1, 1

    def arrivals_needed(self, server: ServerState) -> int | None:
        """Return how many of the next results are certain to be used. None: all work in flight.

        The results after these may be cancelled.
        """
        return None


policy = Registry("policy", base=Policy)


@policy("sync")
@dataclass(frozen=True)
class Synchronous(Policy):
    """The synchronous loop as a policy, for comparison with asynchronous policies.

    On the virtual clock, a round (with `sync = "gradients"`, a step) takes as long as its slowest worker.

    >>> Synchronous().in_rounds
    True
    """

    in_rounds = True

    def take(self, server: ServerState, arrival: Arrival) -> None:
        raise AssertionError("the synchronous loop has no arrivals")
