"""Attacks of Byzantine workers, and their registry.

An attack on updates is a function that returns the updates that b attackers send, [b, d], or one update [d] that all
attackers send. Its positional parameters receive these inputs by name, and must not be changed. Its keyword-only
parameters are its configuration:

    honest       updates of the h honest workers in this round, [h, d], h >= 1. In a round without honest workers, an
                 attack that accepts `honest` is skipped, unless its attribute `needs_honest` is false. Then h may be 0
    own_updates  updates that the b Byzantine workers computed by training, [b, d]
    n_byzantine  number b of attackers in this round, >= 1
    rng          NumPy generator, seeded for this attack and round, for small numbers of draws
    draws        Draws, seeded for this attack and round, for random tensors of length d on the device of the updates
    last         aggregated update of the previous round, [d], or None in the first round
    aggregate    function that applies the aggregation rule to the honest and the Byzantine updates, and returns [d].
                 Its argument is the Byzantine updates: [b, d], or one update [d] for all attackers, which is faster
    workers      IDs of the h honest workers, in the order of the rows of `honest`
    weights      weights W_ij of the h honest workers at the receiver i, float64 [h]. Only with policies on a graph
    byzantine_weights
                 weights W_ij of the b attackers at the receiver i, float64 [b]. Only with policies on a graph
    state        dict of tensors that the attack returned in the previous round, {} in the first one. An attack that
                 accepts `state` returns (updates, next state)

An attack on data is a frozen dataclass. Its fields are its configuration. Its method `poison` changes training batches
(see `Poison`), and its method `__call__` returns the updates to send, as above. An optional method `goal` defines the
success rate of the attack (see `Goal`).

An attack that has no effect for some numbers of workers is a frozen dataclass with a method `weakness(n, f)`. The
method returns a line of text if the attack has no effect with f Byzantine workers among n, otherwise None. Runs and
`fedsim.attack` show this line as a warning.
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
    """Interface of an attack's method `poison`, which changes the training batches of Byzantine workers.

    Its parameters may have these names: `inputs` [batch, ...], `targets` int64 [batch], `classes` (number of classes),
    `draws` (random tensors) and `rng` (NumPy generator).
    """

    def __call__(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        """Return the changed batch (inputs, targets). The arguments must not be changed in place."""


class Goal(Protocol):
    """Interface of an attack's method `goal`, which defines what the attacker wants the global model to predict.

    The success rate of the attack is the accuracy of the global model on the samples and labels that `goal` returns.
    """

    def __call__(self, inputs: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Return the samples of a test batch that count for the success rate, and the labels that the attacker wants.

        A sample may be changed, for example by a backdoor's patch. The result may contain no samples.
        """


@dataclass(frozen=True)
class AttackStrategy(Component):
    """Attack of Byzantine workers. Call the object to get the updates that they send.

    Attributes:
        poison_accepts: names of the inputs of the attack's method `poison`.
        poison: method that changes training batches, or None if the attack does not change data.
        goal: method that defines the success rate, or None if the attack has none.
    """

    poison_accepts: tuple[str, ...] = ()

    @classmethod
    def of(cls, registration: Registration, params: dict[str, Any], **settings: Any) -> AttackStrategy:
        """Create the attack from a registered attack and its parameters.

        Raises ExperimentError if the attack's method `poison` has an unknown parameter.
        """
        poison = getattr(registration.target, "poison", None)
        try:
            accepts = taken_by_name(poison, POISON_INPUTS) if poison else ()
        except TypeError as error:
            raise ExperimentError(
                f"attack.name = {show(registration.name)}: its method poison cannot be used: {error}"
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
        """Whether the attackers send something other than the updates that they have trained.

        This is the attribute `alters_rows` of the attack. An attack without this attribute counts as altering updates,
        unless it has a method `poison`, which changes the training data instead.
        """
        function = getattr(self.function, "func", self.function)  # of a function with its parameters
        return getattr(function, "alters_rows", self.poison is None)

    @property
    def needs_honest(self) -> bool:
        """Whether the attack needs at least one honest update.

        This is the attribute `needs_honest` of the attack. For an attack without this attribute, it is true if the
        attack has an input called `honest`, and otherwise false.
        """
        return getattr(self.function, "needs_honest", "honest" in self.accepts)

    @property
    def row_by_row(self) -> bool:
        """Whether an attacker's update depends only on what the attacker computed and on the previous aggregate.

        This is the attribute `row_by_row` of the attack; false for an attack without this attribute.
        """
        return getattr(getattr(self.function, "func", self.function), "row_by_row", False)

    def weakness(self, n: int, f: int) -> str | None:
        """Return a warning if the attack has no effect with f Byzantine workers among n, otherwise None."""
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
        weights: Tensor | None = None,
        byzantine_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the updates that the Byzantine workers send.

        Args:
            honest: updates of the h honest workers, [h, d].
            own_updates: updates that the b Byzantine workers computed by training, [b, d].
            seed: seed of random draws.
            moment: (round,) or (round, step). Seeds the random draws together with `seed`.
            last: aggregated update of the previous round, [d], or None.
            aggregate: function that maps the Byzantine updates to the result of the aggregation rule. Required by
                attacks that are tuned against the rule.
            workers: IDs of the honest workers. None: 0 to h - 1.
            state: state that the attack returned in the previous round.
            weights, byzantine_weights: weights of the honest workers [h] and of the Byzantine workers [b] at the
                receiver, on a graph.

        Returns the updates that the Byzantine workers send (a new tensor [b, d]) and the next state.

        Raises ExperimentError if the attack cannot be computed from its inputs.
        """
        rows = own_updates.new_empty(own_updates.shape)
        if not len(own_updates):
            return rows, state or {}
        if "weights" in self.accepts and weights is None:
            raise ExperimentError(f"attack {self.name}: needs a policy on a graph, such as policy=d_psgd")
        if self.accepts.get("aggregate") and aggregate is None:
            raise ExperimentError(
                f"aggregate: is required, because the attack {self.name} is tuned against the aggregation rule"
            )
        values = {"honest": honest, "own_updates": own_updates, "n_byzantine": len(own_updates)}
        values |= {"last": last, "aggregate": aggregate, "state": state or {}}
        values |= {"weights": weights, "byzantine_weights": byzantine_weights}
        values["workers"] = list(range(len(honest)) if workers is None else workers)
        if "rng" in self.accepts:
            values["rng"] = numpy_generator(seed, "attack", *moment)
        if "draws" in self.accepts:
            values["draws"] = Draws.of("attack", *moment, seed=seed, device=own_updates.device)
        result = self.on(values)
        result, state = result if "state" in self.accepts else (result, {})
        shape = tuple(getattr(result, "shape", ()))
        if shape not in (own_updates.shape, own_updates.shape[1:]):
            b, d = own_updates.shape
            raise ExperimentError(
                f"attack {self.name}: must return a tensor of shape ({b}, {d}) or ({d},), not {shape}"
            )
        return rows.copy_(result), state


attack_strategy = Registry(
    "attack",
    inputs=(
        *("honest", "own_updates", "n_byzantine", "rng", "draws", "last", "aggregate", "workers", "state"),
        *("weights", "byzantine_weights"),
    ),
    component=AttackStrategy,
)


@dataclass(frozen=True)
class Attackers:
    """The Byzantine workers of a run.

    Attributes:
        fixed: IDs of the workers that are Byzantine in every round.
        drawn: (seed, number of workers, number of Byzantine workers) if the Byzantine workers are drawn again in every
            round, otherwise None.
        start_round: first round with an attack. In earlier rounds, Byzantine workers behave like honest ones.
    """

    fixed: frozenset[int] = frozenset()
    drawn: tuple[int, int, int] | None = None
    start_round: int = 1

    def __bool__(self) -> bool:
        return bool(self.fixed or self.drawn)

    def in_round(self, round: int) -> Collection[int]:
        """Return the IDs of the workers that attack in `round` (rounds start at 1)."""
        if round < self.start_round:
            return ()
        return self.fixed if self.drawn is None else _drawn(*self.drawn, round)


def draw_attackers(seed: int, workers: int, count: int, *round: int) -> list[int]:
    """Draw the Byzantine workers of a run, or of one round. Returns their IDs in ascending order.

    Args:
        seed: seed of the draw.
        workers: number of workers.
        count: number of Byzantine workers.
        round: number of the round, if the Byzantine workers are drawn again in every round. Otherwise omitted.
    """
    return sorted(numpy_generator(seed, "attackers", *round).permutation(workers)[:count].tolist())


@lru_cache(maxsize=8)  # called once per trained worker in every round
def _drawn(seed: int, workers: int, count: int, round: int) -> frozenset[int]:
    return frozenset(draw_attackers(seed, workers, count, round))
