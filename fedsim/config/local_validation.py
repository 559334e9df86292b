"""Combinations of local work and learning-rate schedules that an experiment cannot have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fedsim.asynchronous.policies import Policy
from fedsim.clients import LRSchedule
from fedsim.clients.adapters import TrainFunction
from fedsim.errors import ExperimentError, show

if TYPE_CHECKING:
    from fedsim.config.experiment import Experiment


def check_local_work(experiment: Experiment, policy: Policy) -> Iterator[str]:
    """Settings of the local work and of learning rates that have no meaning together; one error line for each."""
    yield from _check_amount(experiment, policy)
    yield from _check_accumulation(experiment, policy)
    yield from _check_schedules(experiment, policy)
    yield from _check_train_function(experiment)


def _check_amount(experiment: Experiment, policy: Policy) -> Iterator[str]:
    key = "epochs" if experiment.local.steps is None else "steps"
    amount = getattr(experiment.local, key)
    where = f"local.{key} = {show(amount)}"
    if isinstance(amount, list):
        if len(amount) != experiment.workers:
            yield f"{where}: must be {experiment.workers} numbers, one per worker, not {len(amount)}"
        if experiment.pipeline.accepts("root"):
            rule = experiment.pipeline.name
            yield f"{where}: the rule {rule} lets the server train too, which is not in the list; use a number"
    elif isinstance(amount, dict) and not policy.in_rounds and policy.work == "gradient":
        policy_name = show(experiment.policy.name)
        yield f"{where}: with policy.name = {policy_name} a worker sends each gradient and has no rounds; use a number"


def _check_accumulation(experiment: Experiment, policy: Policy) -> Iterator[str]:
    where = f"local.accumulate = {experiment.local.accumulate}"
    if experiment.local.accumulate == 1:
        return
    if experiment.rounds_of_gradients:
        yield f"{where}: with sync={experiment.sync} each batch has its own average; use a larger local.batch_size"
    elif not policy.in_rounds:
        yield f"{where}: needs synchronous rounds; use a larger local.batch_size"
    elif not experiment.local.bind().element_wise:
        solver = show(experiment.local.solver)
        yield f"{where}: {solver} takes further gradients of each batch; use a larger local.batch_size"


def _check_train_function(experiment: Experiment) -> Iterator[str]:
    local = experiment.local
    if not isinstance(experiment.client_algorithm, TrainFunction):
        return
    settings = {
        "clip_norm": local.clip_norm is not None,
        "accumulate": local.accumulate > 1,
        'schedule.per = "step"': local.schedule.per == "step",
    }
    for key in (key for key, given in settings.items() if given):
        yield f"local.{key}: the function {show(local.solver)} takes the steps of a round itself; omit it"


def _check_schedules(experiment: Experiment, policy: Policy) -> Iterator[str]:
    local, server = experiment.local, experiment.server
    yield from _check_schedule(
        experiment.local_schedule, local.bind().with_lr, local.params, policy, f"the solver {show(local.solver)}"
    )
    yield from _check_schedule(
        server.schedule.schedule(experiment.rounds),
        partial(replace, server.bind()),
        server.params,
        policy,
        f"the server optimizer {show(server.optimizer)}",
    )
    if local.schedule.per == "step":
        needing = experiment.pipeline.name if experiment.pipeline.accepts("local_lr") else None
        needing = local.solver if experiment.exchanges else needing
        if needing is not None:
            yield f'local.schedule.per = "step": {show(needing)} uses one learning rate for a round; use per=round'


def _check_schedule(
    schedule: LRSchedule | None, with_lr: Callable[..., Any], params: Mapping[str, Any], policy: Policy, owner: str
) -> Iterator[str]:
    """Check the schedule of the learning rate of its `owner`, which has these parameters."""
    if schedule is None:
        return
    if not policy.in_rounds:
        yield f"{schedule.place}: asynchronous policies have no rounds in common; omit it"
        return
    try:
        with_lr(lr=schedule.rate(params["lr"], 1))
    except ExperimentError as error:
        yield from error.lines
    except (KeyError, TypeError):
        yield f"{schedule.place}: needs a learning rate `lr`, which {owner} does not have; omit it"
