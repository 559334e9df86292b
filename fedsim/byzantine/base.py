"""Attacks of Byzantine workers: their registry, and their parameters.

An attack on rows is a function that returns the Byzantine rows [b, d], or one row [d] for all attackers. Its positional
parameters receive these inputs by name, and must not be changed; its keyword-only parameters are its configuration:

    honest       [h, d], h >= 1: the updates of the honest workers of this round. Without honest workers an attack that
                 accepts them is skipped, unless its attribute `needs_honest` is false; then h may be 0
    own_updates  [b, d]: the updates that the Byzantine workers have trained
    n_byzantine  b >= 1
    rng          a NumPy generator of this attack and round, for a few numbers
    draws        Draws of this attack and round, for tensors as long as a row, on the device of the rows
    last         [d], the aggregated update of the last round; None in the first round
    aggregate    a function from Byzantine rows, [b, d] or one [d] for all attackers, to the result [d] of the rule in
                 use with the honest rows. One row costs less
    workers      the numbers of the h honest workers, in the order of their rows
    state        the state that the attack returned last time, a dict of tensors, {} at first. An attack that accepts it
                 returns (rows, state)

An attack on data is a frozen dataclass. Its fields are its configuration, it is called for the rows as above, and its
method `poison` changes training batches (see `Poison`). A method `goal` defines the attacker's success (see `Goal`).

An attack that has no effect for some numbers of workers is a frozen dataclass with a method `weakness(n, f)`. It
returns one line for f Byzantine workers among n, or None. Runs and `fedsim.attack` show the line as a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from torch import Tensor

from fedsim.core.randomness import Draws, numpy_generator
from fedsim.core.registry import Component, Registration, Registry, taken_by_name
from fedsim.errors import ExperimentError, show

Aggregate = Callable[[Tensor], Tensor]
POISON_INPUTS = "inputs", "targets", "classes", "draws", "rng"


class Poison(Protocol):
    """The batch that a Byzantine worker trains on instead of its own batch.

    Its parameters receive by name: inputs [batch, ...], targets int64 [batch], the number of classes, `draws` on the
    device of the inputs, and a NumPy generator `rng`; both are functions of (seed, round, worker, step).
    """

    def __call__(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        """Poisoned (inputs, targets). The given tensors stay unchanged and may be returned."""


class Goal(Protocol):
    """The attacker's goal for the global model: the success rate of the attack is the accuracy on these samples."""

    def __call__(self, inputs: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """The inputs of a test batch that the attacker uses, and the answers that the attacker wants, perhaps none."""


@dataclass(frozen=True)
class AttackStrategy(Component):
    """An attack with its parameters; call it for the Byzantine rows.

    Attributes:
        poison_accepts: the names of the inputs of its method `poison`.
        poison: changes training batches; None if the attack does not change data.
        goal: defines the success rate; None if the attack has no goal.
    """

    poison_accepts: tuple[str, ...] = ()

    @classmethod
    def of(cls, registration: Registration, params: dict[str, Any], **settings: Any) -> AttackStrategy:
        """Return the attack with checked parameters.

        Raises ExperimentError if its method `poison` has a parameter that is not in `POISON_INPUTS`.
        """
        poison = getattr(registration.target, "poison", None)
        try:
            accepts = taken_by_name(poison, POISON_INPUTS) if poison else ()
        except TypeError as error:
            raise ExperimentError(
                f"attack.name = {show(registration.name)}: its poison cannot be used: {error}"
            ) from None
        return super().of(registration, params, poison_accepts=tuple(accepts))

    @property
    def poison(self) -> Poison | None:
        return getattr(self.function, "poison", None)

    @property
    def goal(self) -> Goal | None:
        return getattr(self.function, "goal", None)

    @property
    def alters_rows(self) -> bool:
        """Whether it changes trained rows. An attack on data does not, unless its attribute of this name is true."""
        return getattr(self.function, "alters_rows", self.poison is None)

    @property
    def needs_honest(self) -> bool:
        """Whether it needs an honest row: if it accepts `honest`, unless its attribute of this name is false."""
        return getattr(self.function, "needs_honest", "honest" in self.accepts)

    def weakness(self, n: int, f: int) -> str | None:
        """Return one line that says why the attack has no effect with f Byzantine workers among n.

        None if it has one.
        """
        method = getattr(self.function, "weakness", None)
        line = method(n, f) if method and f else None
        return line and f"{self.name}: {line}"

    def __call__(
        self,
        honest: Tensor,
        own_updates: Tensor,
        *,
        seed: int = 0,
        moment: tuple[int, ...] = (),
        last: Tensor | None = None,
        aggregate: Aggregate | None = None,
        workers: Sequence[int] | None = None,
        state: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the Byzantine rows and the next state; the rows are a new tensor like `own_updates` [b, d].

        Random draws are a function of the seed and the moment: (round,) or (round, step).

        Raises ExperimentError if the attack cannot be computed from its inputs.
        """
        rows = own_updates.new_empty(own_updates.shape)
        if not len(own_updates):
            return rows, state or {}
        if self.accepts.get("aggregate") and aggregate is None:
            raise ExperimentError(f"aggregate: the attack {self.name} needs the rule that it is to be tuned against")
        values = {"honest": honest, "own_updates": own_updates, "n_byzantine": len(own_updates)}
        values |= {"last": last, "aggregate": aggregate, "state": state or {}}
        values["workers"] = list(range(len(honest)) if workers is None else workers)
        if "rng" in self.accepts:
            values["rng"] = numpy_generator(seed, "attack", *moment)
        if "draws" in self.accepts:
            values["draws"] = Draws.of(seed, "attack", *moment, device=own_updates.device)
        made = self.on(values)
        made, state = made if "state" in self.accepts else (made, {})
        shape = tuple(getattr(made, "shape", ()))
        if shape not in (own_updates.shape, own_updates.shape[1:]):
            b, d = own_updates.shape
            raise ExperimentError(f"attack {self.name}: must give rows of shape ({b}, {d}) or ({d},), not {shape}")
        return rows.copy_(made), state


attack_strategy = Registry(
    "attack",
    inputs=("honest", "own_updates", "n_byzantine", "rng", "draws", "last", "aggregate", "workers", "state"),
    component=AttackStrategy,
)


@dataclass(frozen=True)
class Attackers:
    """The Byzantine workers of each round. Its truth value is false if no round has any.

    Attributes:
        fixed: those that are Byzantine in every round.
        drawn: or, instead, (seed, number of workers, number of Byzantine workers): each round has its own.
        start_round: the first round in which they attack. Before it they follow the protocol.
    """

    fixed: frozenset[int] = frozenset()
    drawn: tuple[int, int, int] | None = None
    start_round: int = 1

    def __bool__(self) -> bool:
        return bool(self.fixed or self.drawn)

    def in_round(self, round: int) -> Collection[int]:
        """Return the numbers of the workers that attack in a round, counted from 1."""
        if round < self.start_round:
            return ()
        return self.fixed if self.drawn is None else _drawn(*self.drawn, round)


def draw_attackers(seed: int, workers: int, count: int, *round: int) -> list[int]:
    """The numbers of `count` Byzantine workers among all, for a run or for one of its rounds; ascending."""
    return sorted(numpy_generator(seed, "attackers", *round).permutation(workers)[:count].tolist())


@lru_cache(maxsize=8)  # each round asks again for every worker that it trains
def _drawn(seed: int, workers: int, count: int, round: int) -> frozenset[int]:
    return frozenset(draw_attackers(seed, workers, count, round))
