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
from typing import ClassVar, Literal

from fedsim.asynchronous.policies.server import Arrival, AsyncServer
from fedsim.clients import State
from fedsim.core.registry import Registry

Work = Literal["gradient", "model"]
Locking = Literal["server", "pair", "nothing"]
StateScope = frozenset[Literal["shared", "private"]]


class Policy(ABC):
    """Base class for asynchronous policies, which define when and how the workers' results change the global model.

    Attributes:
        work: what a worker sends: the "gradient" of one step, or the "model" after a round of local training.
        in_rounds: whether training proceeds in synchronous rounds. False for asynchronous policies.
        cancels: whether an update of the global model cancels all work that started before the update.
        needs_momentum: whether the client algorithm must use momentum or another optimizer state.
        allows_sampling: whether there may be more workers than `cohort`, the number of concurrent workers.
        uses_server_optimizer: whether the experiment's server optimizer updates the global model.
        uses_topology: whether the workers are on a graph, the setting `policy.topology`.
        sends_results: whether a worker sends each result as it is. Otherwise, such as for sums of several gradients,
            the policy calls `AsyncServer.admit` for what the worker sends, which a Byzantine worker may change.
        locking: what a race (training in concurrent processes) locks while it uses a result: the whole "server"; a
            "pair" of workers (a worker and its `partner`); or "nothing".
    """

    work: ClassVar[Work] = "gradient"
    in_rounds: ClassVar[bool] = False
    cancels: ClassVar[bool] = False
    needs_momentum: ClassVar[bool] = False
    allows_sampling: ClassVar[bool] = False
    uses_server_optimizer: ClassVar[bool] = False
    uses_topology: ClassVar[bool] = False
    sends_results: ClassVar[bool] = True
    locking: ClassVar[Locking] = "server"

    @property
    def needs_replicas(self) -> bool:
        """Whether the server keeps a copy of each worker's start model."""
        return self.work == "model"

    @property
    def state_scope(self) -> StateScope:
        """Kinds of optimizer state, such as momentum, that the policy uses.

        "shared" is one state for all workers, and "private" is a separate state for each worker.
        """
        return frozenset(["shared"] if self.work == "gradient" else [])

    def sizes(self, n_workers: int) -> tuple[int, ...]:
        """Return how many vectors the server combines into one, if `n_workers` workers train at the same time.

        If the number varies, the result contains the smallest and the largest. (1,) means that each vector is used
        alone, so that the aggregation rule is a filter. On a graph, the numbers of neighbours count instead.
        """
        return (1,)

    def check(self, n_workers: int) -> None:  # noqa: B027
        """Raise ExperimentError if the policy's settings do not allow `n_workers` concurrent workers."""

    def start(self, server: AsyncServer) -> State:
        """Return the policy's initial state, a dict of tensors."""
        return {}

    def may_start(self, server: AsyncServer, slot: int) -> bool:
        """Whether the idle worker in `slot` may start to train now."""
        return True

    def local_steps(self, server: AsyncServer, slot: int, scheduled: int) -> int | None:
        """Return the number of local steps of the worker in `slot` in its next round. None means `scheduled`."""
        return None

    def pull(self, server: AsyncServer, slot: int) -> None:
        """Give the idle worker in `slot` the model from which it will train."""
        server.pull(slot)

    @abstractmethod
    def take(self, server: AsyncServer, arrival: Arrival) -> None:
        """Use a worker's result: update the global model, or keep the result for a later update."""

    def partner(self, server: AsyncServer, slot: int, unit: int) -> int | None:
        """Return the slot of the second worker whose model `take` changes, or None if there is none.

        Args:
            server: server of the run.
            slot: slot of the worker whose result `take` receives.
            unit: number of steps or rounds that this worker started before.
        """
        return None

    def sender(self, worker: int) -> int:
        """Return as whose vector the rule sees that of `worker`: by default, that of the worker itself."""
        return worker

    def on_exclusion(self, server: AsyncServer, slot: int) -> None:  # noqa: B027
        """React to a result that contains NaN or infinity, or that the rule rejects. Called instead of `take`."""

    def on_departure(self, server: AsyncServer) -> None:  # noqa: B027
        """React to workers that have left or returned. `server.alive` contains the slots of the present workers."""

    def buffered(self, server: AsyncServer) -> int:
        """Return the number of results that have arrived but have not changed the global model yet."""
        return 0

    def publish(self, server: AsyncServer) -> None:  # noqa: B027
        """Compute the global model and write it to `server.global_row`. Called at the end of each round.

        Only needed if the policy does not keep the global model up to date, for example in decentralized training.
        """

    def traffic(self, unit: int) -> tuple[int, int]:
        """Return how many models or gradients a worker sends and receives for a step or round: (sent, received).

        `unit` is the number of the step or round, from 0.
        """
        return 1, 1

    def moved(self, server: AsyncServer, slot: int, unit: int) -> tuple[int, int]:
        """Return (sent, received) of step or round `unit` of the worker in `slot`: by default, those of `traffic`."""
        return self.traffic(unit)

    def numbers(self, server: AsyncServer) -> dict[str, float]:
        """Return numbers to record after a round, by name. Called after `publish`."""
        return {}

    def arrivals_needed(self, server: AsyncServer) -> int | None:
        """Return how many of the next results to arrive are certain to be used; None if all are.

        The other results may be cancelled by an update of the global model.
        """
        return None


policy = Registry("policy", base=Policy)


@policy("sync")
@dataclass(frozen=True)
class Synchronous(Policy):
    """Synchronous training as a policy, for comparison with asynchronous policies.

    On the virtual clock, each round takes as long as its slowest worker. With `sync = "gradients"`, each step does.

    >>> Synchronous().in_rounds
    True
    """

    in_rounds = True

    def take(self, server: AsyncServer, arrival: Arrival) -> None:
        raise AssertionError("the synchronous loop has no arrivals")
