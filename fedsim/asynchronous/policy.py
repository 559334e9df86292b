"""The interface of asynchronous policies.

A policy says when a worker may start, which model it starts from, and what the server does with its result. On the
virtual clock and in a race, one work item of a worker goes through these steps:

    1. `may_start(server, slot)`    may this idle worker start? If not, it is asked again after the next update
    2. `local_steps(server, ...)`   how many local steps does it take? (workers that send models)
    3. `pull(server, slot)`         the worker gets the model that it starts from
    4. (training)                   the row `server.rows[slot]` becomes a gradient or a trained model
    5. `take(server, arrival)`      the server uses the row: it takes a step, or buffers the row for a later step

A policy is a frozen dataclass that derives from `Policy`; its fields are its configuration. A policy has no mutable
state: `start` makes the tensors that it needs from one arrival to the next, and the server keeps them. So the same
policy runs on the virtual clock and, with these tensors in shared memory, in racing processes.
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
    """A finished work item; its result is `server.rows[slot]`.

    Attributes:
        slot: index of the row.
        worker: number of the worker.
        unit: how many work items this slot started before this one.
        staleness: version of the global row now, minus the version that the worker started from.
    """

    slot: int
    worker: int
    unit: int
    staleness: int


class Policy(ABC):
    """An asynchronous policy; the defaults are those of one server with one model.

    Attributes:
        work: what a worker sends: the "gradient" of one step, or the "model" after a round of local training.
        in_rounds: the policy is the synchronous loop, not an asynchronous policy.
        cancels: an update of the global row cancels all work that started before the update.
        needs_momentum: the client algorithm must keep a state.
        allows_sampling: `cohort` workers at a time may be drawn from a larger population.
        uses_server_optimizer: the global row moves by the experiment's server optimizer.
        locking: what a race locks: the "server"; a "pair" of workers, the one whose result arrives and its `partner`;
            or "nothing": workers compute gradients at the live global row, and `pull` and `may_start` are not called.
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
        """Whether the server keeps each worker's start model until its result arrives, or longer."""
        return self.work == "model"

    @property
    def state_scope(self) -> StateScope:
        """The states that the policy's own steps use: one of the server ("shared"), one for each worker ("private")."""
        return frozenset(["shared"] if self.work == "gradient" else [])

    def check(self, n_workers: int) -> None:  # noqa: B027
        """Raise ExperimentError if the policy does not work with `n_workers` workers at a time."""

    def start(self, server: ServerState) -> State:
        """Make the state of the policy: tensors by name, which become `server.policy_state`."""
        return {}

    def may_start(self, server: ServerState, slot: int) -> bool:
        """Whether an idle worker may start its next work item now."""
        return True

    def local_steps(self, server: ServerState, slot: int, scheduled: int) -> int | None:
        """Number of local steps of a worker's next round; None: as many as `scheduled`."""
        return None

    def pull(self, server: ServerState, slot: int) -> None:
        """Give an idle worker the model that its next work item starts from."""
        server.pull(slot)

    @abstractmethod
    def take(self, server: ServerState, arrival: Arrival) -> None:
        """Use the result of a work item."""

    def partner(self, server: ServerState, slot: int, unit: int) -> int | None:
        """Return the other worker whose model `take` changes, if there is one."""
        return None

    def on_departure(self, server: ServerState) -> None:  # noqa: B027
        """React to a change of `server.alive`: a worker left or, after a round of a race, all workers are back."""

    def buffered(self, server: ServerState) -> int:
        """Number of results that the server took and that no update has used yet."""
        return 0

    def publish(self, server: ServerState) -> None:  # noqa: B027
        """Write the model to test into the global row, if it is not there all the time."""

    def traffic(self, unit: int) -> tuple[int, int]:
        """Number of models or gradients that a worker sends after its work item `unit`, and receives before it."""
        return 1, 1

    def arrivals_needed(self, server: ServerState) -> int | None:
        """How many of the next arrivals certainly count; None: all that are in flight."""
        return None


policy = Registry("policy", base=Policy)


@policy("sync")
@dataclass(frozen=True)
class Synchronous(Policy):
    """The synchronous loop as a policy, to compare it with asynchronous ones.

    On the clock, a round takes as long as its slowest worker; with `sync = "gradients"`, each step does.

    >>> Synchronous().in_rounds
    True
    """

    in_rounds = True

    def take(self, server: ServerState, arrival: Arrival) -> None:
        raise AssertionError("the synchronous loop has no arrivals")
