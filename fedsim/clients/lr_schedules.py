"""Learning-rate schedules: PyTorch's schedulers as pure functions of the round, or of the step within a round.

A schedule is a function from an optimizer to a scheduler of `torch.optim.lr_scheduler`. The simulator passes a
dummy optimizer, steps it and the scheduler, and reads the learning rates. The learning rates are therefore PyTorch's,
and schedulers need not be stored in checkpoints or sent to processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from fedsim.core.numbers import (
    Example,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
)
from fedsim.core.registry import Registration, Registry
from fedsim.errors import ExperimentError, one_line

LARGEST_RATE = torch.finfo(torch.float32).max  # optimizers fail with larger learning rates

LENGTHS = ("T_max", "total_steps")  # parameters that replace the input `length`

lr_schedule = Registry("learning-rate schedule", inputs=("optimizer", "length"))


@lr_schedule("constant")
def constant(optimizer: Optimizer, *, factor: PositiveFraction = 1.0, total_iters: NonNegativeInt = 0) -> LRScheduler:
    """Multiply the learning rate by `factor` in the first `total_iters` rounds, like PyTorch's `ConstantLR`.

    A `factor` below 1 requires `total_iters` >= 1.
    """
    if factor < 1 and not total_iters:
        raise ExperimentError(
            f"total_iters = 0: must be at least 1, because factor = {factor:g} applies to the first total_iters rounds"
        )
    return lr_scheduler.ConstantLR(optimizer, factor, total_iters)


@lr_schedule("step")
def step(
    optimizer: Optimizer, *, step_size: Annotated[PositiveInt, Example(10)], gamma: PositiveFloat = 0.1
) -> LRScheduler:
    """Multiply the learning rate by `gamma` after every `step_size` rounds, like PyTorch's `StepLR`."""
    return lr_scheduler.StepLR(optimizer, step_size, gamma)


@lr_schedule("multi_step")
def multi_step(
    optimizer: Optimizer, *, milestones: Annotated[list[PositiveInt], Example([10, 20])], gamma: PositiveFloat = 0.1
) -> LRScheduler:
    """Multiply the learning rate by `gamma` after each of the rounds `milestones`, like PyTorch's `MultiStepLR`."""
    return lr_scheduler.MultiStepLR(optimizer, milestones, gamma)


@lr_schedule("exponential")
def exponential(optimizer: Optimizer, *, gamma: Annotated[PositiveFloat, Example(0.99)]) -> LRScheduler:
    """Multiply the learning rate by `gamma` after each round, like PyTorch's `ExponentialLR`."""
    return lr_scheduler.ExponentialLR(optimizer, gamma)


@lr_schedule("linear")
def linear(
    optimizer: Optimizer,
    *,
    start_factor: PositiveFraction = 1 / 3,
    end_factor: Fraction = 1.0,
    total_iters: PositiveInt = 5,
) -> LRScheduler:
    """Change the learning rate linearly in `total_iters` rounds, like PyTorch's `LinearLR`.

    The factor of the initial learning rate changes from `start_factor` to `end_factor`.
    """
    return lr_scheduler.LinearLR(optimizer, start_factor, end_factor, total_iters)


@lr_schedule("cosine")
def cosine(
    optimizer: Optimizer,
    length: int | None,
    *,
    T_max: PositiveInt | None = None,  # noqa: N803
    eta_min: NonNegativeFloat = 0.0,
) -> LRScheduler:
    """Decay the learning rate to `eta_min` along a cosine, like PyTorch's `CosineAnnealingLR`.

    The decay takes `T_max` rounds (by default all rounds).

    The schedule is from Loshchilov and Hutter 2017.
    """
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max or _required(length, "T_max"), eta_min)


@lr_schedule("one_cycle")
def one_cycle(
    optimizer: Optimizer,
    length: int | None,
    *,
    total_steps: PositiveInt | None = None,
    pct_start: Fraction = 0.3,
    anneal_strategy: Literal["cos", "linear"] = "cos",
    div_factor: PositiveFloat = 25.0,
    final_div_factor: PositiveFloat = 1e4,
    three_phase: bool = False,
) -> LRScheduler:
    """Raise the learning rate to its maximum and lower it again, like PyTorch's `OneCycleLR`.

    The maximum is the configured learning rate, and the cycle takes `total_steps` rounds (by default all rounds). The
    schedule is from Smith and Topin 2019.
    """
    total = total_steps or _required(length, "total_steps")
    if length is not None and total < length:
        raise ExperimentError(f"total_steps = {total}: must be at least {length}, so that the schedule covers the run")
    return lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=optimizer.param_groups[0]["lr"],
        total_steps=total,
        pct_start=pct_start,
        anneal_strategy=anneal_strategy,
        cycle_momentum=False,
        div_factor=div_factor,
        final_div_factor=final_div_factor,
        three_phase=three_phase,
    )


def _required(length: int | None, key: str) -> int:
    """Return `length`. If it is None, raise an ExperimentError that says that the setting `key` is required."""
    if length is None:
        raise ExperimentError(f"{key}: is required, because the number of steps differs between rounds")
    return length


@dataclass(frozen=True)
class LRSchedule:
    """Learning-rate schedule over the rounds of a run, or over the steps of each round.

    Args:
        make: function that returns the scheduler, with its parameters bound.
        takes: which of the inputs "optimizer" and "length" the function accepts.
        length: number of rounds or steps of the schedule. None if unknown.
        warmup: number of rounds or steps in which the rate grows linearly before the schedule starts: lr / warmup,
            2 lr / warmup, ..., lr (Goyal et al. 2017).
        per: what the schedule counts, "round" or "step".
        place: table of the experiment that contains the schedule, for error messages.

    >>> from fedsim.clients.lr_schedules import LRSchedule, exponential
    >>> from functools import partial
    >>> schedule = LRSchedule(partial(exponential, gamma=0.5), ("optimizer",), length=4, warmup=2)
    >>> [schedule.rate(0.1, round) for round in range(1, 5)]
    [0.05, 0.1, 0.1, 0.05]
    """

    make: Callable[..., LRScheduler]
    takes: tuple[str, ...]
    length: int | None
    warmup: int = 0
    per: Literal["round", "step"] = "round"
    place: str = "local.schedule"

    @classmethod
    def of(cls, registration: Registration, params: dict[str, Any], **settings: Any) -> LRSchedule:
        """Create a learning-rate schedule.

        Args:
            registration: component that creates the PyTorch scheduler.
            params: parameters of the component.
            settings: `length`, `warmup`, `per` and `place` of the schedule.
        """
        return cls(registration.bind(params), tuple(registration.takes), **settings)

    def rate(self, lr: float, round: int, step: int = 0) -> float:
        """Return the learning rate in `step` (from 0) of `round` (from 1), for the initial learning rate `lr`.

        Raises ExperimentError if the PyTorch scheduler cannot be created, or ends before this round or step.
        """
        position = round - 1 if self.per == "round" else step
        known, further = self._known.setdefault(lr, ([], self.rates(lr)))
        while len(known) <= position:
            number = len(known) + 1
            try:
                rate = next(further)
                if not abs(rate) <= LARGEST_RATE:
                    limit = f"must be at most {LARGEST_RATE:.1e}"
                    raise ExperimentError(f"name: the learning rate of {self.per} {number} is {rate:g}; {limit}")
            except ExperimentError as error:
                raise ExperimentError(*(f"{self.place}.{line}" for line in error.lines)) from None
            except Exception as error:
                place = f"{self.place}.name: cannot compute the learning rate of {self.per} {number}"
                ended = self.per == "round" and self.length is not None and number > self.length
                remedy = f"; set planned_rounds to the number of rounds, not to {self.length}" if ended else ""
                raise ExperimentError(f"{place}: {one_line(error)}{remedy}") from error
            known.append(rate)
        return known[position]

    def is_factor(self, round: int, step: int) -> bool:
        """Whether each rate up to `step` of `round` is proportional to the initial learning rate."""
        self.rate(1.0, round, step)
        self.rate(2.0, round, step)
        pairs = zip(self._known[1.0][0], self._known[2.0][0], strict=False)
        return all(abs(2 * one - two) <= 1e-9 * two for one, two in pairs)

    @cached_property
    def _known(self) -> dict[float, tuple[list[float], Iterator[float]]]:
        """Map each initial learning rate to the rates computed so far and an iterator over the following rates."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_known"}

    def rates(self, lr: float) -> Iterator[float]:
        """Yield the learning rates of all rounds or steps in order, for the initial learning rate `lr`."""
        optimizer = torch.optim.SGD([torch.zeros(0)], lr=lr)
        scheduler = self._scheduler(optimizer)
        while True:
            yield float(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()

    def _scheduler(self, optimizer: Optimizer) -> LRScheduler:
        warmup, length = self.warmup, self.length
        if length is not None and warmup >= length:
            raise ExperimentError(f"warmup = {warmup}: must be less than {length}, the number of {self.per}s")
        first = lr_scheduler.LinearLR(optimizer, 1 / warmup, total_iters=warmup - 1) if warmup else None
        inputs = {"optimizer": optimizer, "length": None if length is None else length - warmup}
        scheduler = self.make(**{name: inputs[name] for name in self.takes})
        if not isinstance(scheduler, LRScheduler):
            kind = type(scheduler).__name__
            raise ExperimentError(f"name: the function must return a scheduler of torch.optim.lr_scheduler, not {kind}")
        if first is None:
            return scheduler
        if isinstance(scheduler, lr_scheduler.OneCycleLR):
            raise ExperimentError(
                f"warmup = {warmup}: one_cycle begins with its own warm-up; omit it, and set pct_start in its table"
            )
        return lr_scheduler.SequentialLR(optimizer, [first, scheduler], [warmup])
