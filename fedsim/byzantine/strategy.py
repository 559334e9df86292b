"""What an attack is, and how one is bound to its parameters.

An attack on rows is a function of what it names among these, and gives the Byzantine rows [b, d], or one row [d] where
all of them are the same. It changes nothing that it is given.

    honest       [h, d], h >= 1: the updates of this round's honest workers. Where there are none, an attack that takes
                 them does not take place, unless its attribute `needs_honest` is false; then h may be 0
    own          [b, d]: the updates of the Byzantine workers, had they followed the protocol
    n_byzantine  b >= 1
    rng          a NumPy generator, for this attack in this round alone: for a few numbers, on the host
    draws        Draws, for this attack in this round alone: for tensors as long as a row, on the device of the rows
    last         [d], the aggregated update of the round before; None in the first round
    aggregate    a callable: what the rule in use makes of Byzantine rows [b, d], which it leaves unchanged, together
                 with the honest ones, [d]

An attack on data is a frozen dataclass: its fields configure it, it is called for the rows as above, and it has a
method `poison` (see `Poison`). Where the attacker wants something in particular of the global model, it has a method
`goal` (see `Goal`), on which his success is measured.

An attack that does nothing for some numbers of workers is a frozen dataclass with a method `weakness(n, f)`: one line
that says so for f Byzantine workers among n, or None. Runs and `fedsim.attack` show it as a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fedsim.errors import ExperimentError, show
from fedsim.randomness import Draws, numpy_generator
from fedsim.registry import Plug, Registry, taken_by_name

attack_strategy = Registry("attack", given=("honest", "own", "n_byzantine", "rng", "draws", "last", "aggregate"))

Aggregate = Callable[[Tensor], Tensor]


GIVEN_TO_POISON = "inputs", "targets", "classes", "draws", "rng"


class Poison(Protocol):
    """What a Byzantine worker trains on in place of a batch.

    It takes by name what it wants of inputs [batch, ...], targets int64 [batch], the number of classes, and, to draw
    from, `draws` on the device of the inputs or a NumPy generator `rng`, functions of (seed, round, worker, step).
    """

    def __call__(self, **given: Any) -> tuple[Tensor, Tensor]:
        """Poisoned (inputs, targets); what is given stays as it is, and may be returned."""


class Goal(Protocol):
    """What the attacker wants of the global model: accuracy on what this gives is the attack's success rate."""

    def __call__(self, inputs: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Of a test batch the samples that count, as the attacker would show them, and the answers he wants.

        They may be fewer than the batch has, or none.
        """


@dataclass(frozen=True)
class BoundAttack:
    """An attack with its parameters: call it for the Byzantine rows.

    Attributes:
        takes: what it wants to be given; `aggregate` and `last` need not be at hand for an attack that does not.
        needs_aggregate: whether it cannot do without `aggregate`.
        poison_takes: what its method `poison` wants to be given, if it has one.
        poison: how it changes training batches, or None where it leaves the data alone.
        goal: what its success is measured on, or None where it wants nothing in particular.
    """

    function: Callable[..., Tensor]
    name: str
    takes: tuple[str, ...]
    needs_aggregate: bool
    poison_takes: tuple[str, ...] = ()

    @property
    def poison(self) -> Poison | None:
        return getattr(self.function, "poison", None)

    @property
    def goal(self) -> Goal | None:
        return getattr(self.function, "goal", None)

    @property
    def alters_rows(self) -> bool:
        """Whether it makes other rows of what was trained, so that poisoned data is not all there is to it.

        An attack on data does so where it has an attribute of this name that says so.
        """
        return getattr(self.function, "alters_rows", self.poison is None)

    @property
    def needs_honest(self) -> bool:
        """Whether it is computed from honest rows, so that a cohort without an honest worker is not attacked.

        An attack that takes `honest` needs such rows, unless it has an attribute of this name that says otherwise.
        """
        return getattr(self.function, "needs_honest", "honest" in self.takes)

    def weakness(self, n: int, f: int) -> str | None:
        """Why this attack does nothing with f Byzantine workers among n, as one line; None if it does something."""
        told = getattr(self.function, "weakness", None)
        line = told(n, f) if told and f else None
        return line and f"{self.name}: {line}"

    def __call__(
        self,
        honest: Tensor,
        own: Tensor,
        *,
        seed: int = 0,
        moment: tuple[int, ...] = (),
        last: Tensor | None = None,
        aggregate: Aggregate | None = None,
    ) -> Tensor:
        """The Byzantine rows, a new tensor with the shape [b, d], dtype and device of `own`.

        Random draws are a function of the seed and the moment: (round,) or (round, step).

        Raises ExperimentError where the attack cannot be made of what it is given.
        """
        rows = own.new_empty(own.shape)
        if not len(own):
            return rows
        if self.needs_aggregate and aggregate is None:
            raise ExperimentError(f"aggregate: the attack {self.name} needs the rule that it is to be tuned against")
        menu = {"honest": honest, "own": own, "n_byzantine": len(own)}
        menu |= {"last": last, "aggregate": aggregate}
        if "rng" in self.takes:
            menu["rng"] = numpy_generator(seed, "attack", *moment)
        if "draws" in self.takes:
            menu["draws"] = Draws.of(seed, "attack", *moment, device=own.device)
        made = self.function(**{name: menu[name] for name in self.takes})
        shape = tuple(getattr(made, "shape", ()))
        if shape not in (own.shape, own.shape[1:]):
            b, d = own.shape
            raise ExperimentError(f"attack {self.name}: must give rows of shape ({b}, {d}) or ({d},), not {shape}")
        return rows.copy_(made)


def bind_attack(plug: Plug, params: dict[str, Any]) -> BoundAttack:
    """The attack `plug` with checked `params`, ready to be called and to be pickled to other processes.

    Raises ExperimentError where its method `poison` takes what is not in `GIVEN_TO_POISON`.
    """
    function = plug.bind(params)
    poison = getattr(function, "poison", None)
    try:
        poison_takes = taken_by_name(poison, GIVEN_TO_POISON) if poison else ()
    except TypeError as error:
        raise ExperimentError(f"attack.name = {show(plug.name)}: its poison cannot be used: {error}") from None
    return BoundAttack(
        function=function,
        name=plug.name,
        takes=tuple(plug.takes),
        needs_aggregate=plug.takes.get("aggregate", False),
        poison_takes=tuple(poison_takes),
    )
