"""What an asynchronous policy is: what the server does when one worker's work arrives, and who may start when.

A policy is a frozen dataclass that derives from `Policy`; its fields are its configuration. It keeps nothing itself:
what it remembers are tensors, made by `start`, which lie in the `Server` beside the rows. So the same code runs on the
virtual clock and, with these tensors in shared memory, in racing processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from fedsim.local import State
from fedsim.registry import Plug, Registry

if TYPE_CHECKING:
    from fedsim.asynchronous.server import Server

Work = Literal["gradient", "model"]


class Arrival(NamedTuple):
    """A piece of work that has come in; its result is `server.rows[slot]`.

    Attributes:
        slot: the place of its row.
        worker: whose work it is.
        unit: how many pieces of work this slot has begun before.
        staleness: version of the server now, less the version that the work began with.
    """

    slot: int
    worker: int
    unit: int
    staleness: int


class Policy(ABC):
    """What the clock and the race ask of a policy; the defaults are those of one server with one model.

    Attributes:
        work: what a worker brings: the "gradient" of one step at the model that it began with, or the "model" that has
            come of that in a round of local training.
        in_rounds: whether it is no asynchronous policy at all but the synchronous loop, round by round.
        cancels: whether an update of the global row ends all work that began before it.
        needs_momentum: whether it is nothing without a local solver that keeps a state.
        samples: whether workers may be drawn from a larger population, because nothing is kept of any of them.
        steps_server: whether the global row moves by the experiment's server optimizer.
        locking: what has to be locked in a race: the "server"; a "pair" of workers, the one whose work comes in and its
            `partner`; or "nothing", where gradients are computed at the live global row, so that `take` finds them in
            the worker's row, and neither `pull` nor `may_start` is asked.
    """

    work: ClassVar[Work] = "gradient"
    in_rounds: ClassVar[bool] = False
    cancels: ClassVar[bool] = False
    needs_momentum: ClassVar[bool] = False
    samples: ClassVar[bool] = False
    steps_server: ClassVar[bool] = False
    locking: ClassVar[Literal["server", "pair", "nothing"]] = "server"

    @property
    def replicas(self) -> bool:
        """Whether the model that work begins with has to be kept until it arrives, or longer."""
        return self.work == "model"

    @property
    def moments(self) -> frozenset[Literal["shared", "private"]]:
        """Whose state the local solver has for steps that the policy takes: the server's, each worker's, or both."""
        return frozenset(["shared"] if self.work == "gradient" else [])

    def check(self, n_workers: int) -> None:  # noqa: B027
        """Raise ExperimentError where the policy cannot be with so many workers at work."""

    def start(self, server: Server) -> State:
        """What the policy remembers, beside what the server has: tensors, on the server's device or on the host."""
        return {}

    def may_start(self, server: Server, slot: int) -> bool:
        """Whether an idle worker may begin its next piece of work now.

        If not, it is asked again when the global row has a new version, or a worker has left.
        """
        return True

    def steps(self, server: Server, slot: int, scheduled: int) -> int | None:
        """How many steps a worker's next round has, if not as many as are `scheduled`."""
        return None

    def pull(self, server: Server, slot: int) -> None:
        """An idle worker gets what its next piece of work begins with."""
        server.pull(slot)

    @abstractmethod
    def take(self, server: Server, arrival: Arrival) -> None:
        """Do with a piece of work what the policy does with it."""

    def partner(self, server: Server, slot: int, unit: int) -> int | None:
        """Whose model `take` changes beside that of the worker whose piece of work comes in, if there is any."""
        return None

    def left(self, server: Server) -> None:  # noqa: B027
        """Others are among `server.alive` than were: one has left or, at the end of a race's round, all are back."""

    def held(self, server: Server) -> int:
        """How many pieces of work have been taken that no update has used yet."""
        return 0

    def publish(self, server: Server) -> None:  # noqa: B027
        """Make the global row what is to be tested, where it is not that all the time."""

    def traffic(self, unit: int) -> tuple[int, int]:
        """How many models, or gradients, go up after a piece of work and come down before it."""
        return 1, 1

    def wanted(self, server: Server) -> int | None:
        """How many of the next arrivals are certain to count; None: all that are under way."""
        return None


class PolicyRegistry(Registry):
    """A Registry of what the clock and the race can work with: dataclasses that derive from Policy."""

    def _plug(self, name: str, target: Callable[..., Any]) -> Plug:
        kind = target if isinstance(target, type) else type(target)
        if not (issubclass(kind, Policy) and is_dataclass(kind)):
            raise TypeError("must be a dataclass that derives from fedsim.asynchronous.Policy")
        return super()._plug(name, target)


policy = PolicyRegistry("policy")
