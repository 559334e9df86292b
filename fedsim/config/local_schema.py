"""The table [local] of an experiment, and the tables of learning-rate schedules."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat

from fedsim.clients import ClientAlgorithm, KeptState, LRSchedule, as_algorithm, lr_schedule, solver
from fedsim.clients.adapters import TrainFunction
from fedsim.core.base_table import PlugTable
from fedsim.core.objects import Name

Amount = Annotated[int, Field(gt=0, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


def _check_work(value: Any) -> Any:
    """Check an amount of local work: n, [n, ...], {uniform = [low, high]} or {choice = [n, ...]}."""
    form, values = "one", [value]
    if isinstance(value, list) and value:
        form, values = "list", value
    elif isinstance(value, dict) and len(value) == 1 and isinstance(next(iter(value.values())), list):
        ((form, values),) = value.items()
    if form not in ("one", "list", "uniform", "choice") or not values or any(type(n) is not int for n in values):
        raise ValueError("an integer, a list of integers, {uniform = [low, high]} or {choice = [n, ...]}")
    if min(values) < 1 or max(values) >= 2**63:
        raise ValueError("greater than 0" if min(values) < 1 else "less than 2^63")
    if form == "uniform" and not (len(values) == 2 and values[0] <= values[1]):
        raise ValueError("{uniform = [low, high]} with low <= high")
    return value


LocalWork = Annotated[int | list[int] | dict[str, list[int]], BeforeValidator(_check_work)]


class ServerSchedule(PlugTable):
    """How the learning rate changes over the rounds; in the first `warmup` rounds it grows linearly."""

    place, named_by, registry = "server.schedule", "name", lr_schedule

    name: Name = "constant"
    warmup: Count = 0
    """Rounds, or steps, in which the learning rate first grows linearly."""

    def schedule(self, length: int | None, per: Literal["round", "step"] = "round") -> LRSchedule | None:
        """The schedule, of so many rounds or steps; None if the learning rate is constant."""
        if self == type(self)():
            return None
        settings = {"length": length, "warmup": self.warmup, "per": per, "place": self.place}
        return LRSchedule.of(self.plug, self.params, **settings)


class LocalSchedule(ServerSchedule):
    """How the learning rate of the local solver changes over the rounds, or over the steps of each round."""

    place = "local.schedule"

    per: Literal["round", "step"] = "round"
    """Whether the learning rate changes over the rounds, or over the steps of each round."""


class Local(PlugTable):
    """The work of a worker between two synchronizations: `epochs` or `steps`, not both.

    Each is a number, a list with one for each worker, or drawn for each worker and round: {uniform = [1, 5]} draws an
    integer from 1 to 5, {choice = [1, 5, 20]} one of these.
    """

    place, named_by, registry = "local", "solver", solver
    alternatives = ("epochs", "steps")

    solver: Name = "sgd"
    epochs: LocalWork | None = None
    """Epochs over the worker's shard in a round; 1 if neither epochs nor steps are given."""
    steps: LocalWork | None = None
    """Steps of the solver in a round, instead of epochs."""
    batch_size: Amount = 10
    """Samples of a batch."""
    drop_last: bool = False
    """Whether an epoch leaves out a last batch that is smaller than `batch_size`; a shard smaller than a batch is still
    one batch."""
    accumulate: Amount = 1
    """Batches whose mean gradient is one step; the last step of a round may take fewer."""
    clip_norm: PositiveFloat | None = None
    """The largest L2 norm of a worker's gradient, which is scaled to it before weight decay and momentum. Unset: none.
    """
    keep_state: bool = False
    """Whether a worker's solver continues with its state (momentum, ...) of its last round."""
    schedule: LocalSchedule = LocalSchedule()
    """How the parameter `lr` of the solver changes."""

    def bind(self) -> ClientAlgorithm:
        plug = self.plug
        algorithm = TrainFunction(plug, self.params) if plug.takes else as_algorithm(plug.bind(self.params))
        return KeptState(algorithm) if self.keep_state else algorithm

    @classmethod
    def completed(cls, table: dict[str, Any]) -> dict[str, Any]:
        given = [key for key in cls.alternatives if table.get(key) is not None]
        if len(given) > 1:
            raise cls.not_both()
        return table if given else {**table, "epochs": 1}
