"""What in an experiment does not go together, each as the line that a user sees."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from fedsim.asynchronous.policies import Policy
from fedsim.engines import Engine, engine
from fedsim.errors import ExperimentError, show
from fedsim.randomness import random_state_kept
from fedsim.sections import Aggregate, Checkpoint, Distributed, Hook, Server
from fedsim.system.devices import free_memory
from fedsim.system.precision import PRECISIONS

if TYPE_CHECKING:
    from fedsim.experiment import Experiment

LARGE = 1_000_000  # from so many on it is asked whether a list of them fits into memory
MEMBER_BYTES = 100  # of lists, for each in them


def problems_with(experiment: Experiment) -> list[str]:
    """What does not go together in an experiment whose tables are right each by itself: a line for each."""
    lines = _problems_with_size(experiment)
    if experiment.cohort is not None and experiment.cohort > experiment.workers:
        lines.append(f"cohort = {experiment.cohort}: must be at most workers, {experiment.workers}")
    engine_class = engine.get(experiment.engine).target
    settings = engine_class.settings(_most_processes(experiment))
    if engine_class.one_process and experiment.processes not in (None, 1):
        lines.append(
            f'processes = {experiment.processes}: the engine "{experiment.engine}" uses one process; '
            "for more use engine=spawn"
        )
    if "timeout" not in settings and not engine_class.ranks and _given(experiment, "timeout"):
        lines.append(
            f'timeout = {experiment.timeout}: the engine "{experiment.engine}" waits for no other process; omit it'
        )
    lines.extend(_problems_with_ranks(experiment, engine_class))
    if experiment.batched.width is not None and not engine_class.stacks:
        lines.append(
            f'batched.width = {experiment.batched.width}: the engine "{experiment.engine}" does not stack rows; omit '
            "batched.width, or use engine=batched"
        )
    if experiment.cuda_graphs and "cuda_graphs" not in settings:
        lines.append(f'cuda_graphs = true: needs engine=batched, not "{experiment.engine}"; omit it')
    if experiment.sync == "gradients" and experiment.server != Server():
        lines.append(
            f'server.optimizer = "{experiment.server.optimizer}": with sync = "gradients" the local solver takes the '
            "step (local.*); omit [server]"
        )
    lines.extend(_problems_with_losses(experiment, engine_class))
    lines.extend(_problems_with_idle_keys(experiment))
    lines.extend(_problems_with_rounds(experiment))
    lines.extend(_problems_with_time(experiment))
    lines.extend(_problems_with_weights(experiment))
    lines.extend(_problems_with_attackers(experiment))
    return lines


def warnings_about(experiment: Experiment) -> list[str]:
    """What is allowed in an experiment, but has no effect or an effect that few users mean: a line for each."""
    lines = []
    if experiment.cohort_size == experiment.workers:  # else n and f differ from round to round
        lines.append(experiment.attack.bind().weakness(experiment.workers, experiment.attack.count(experiment.workers)))
    if experiment.buffers == "server":
        lines.append(_warning_about_statistics(experiment))
    return [line for line in lines if line]


def _warning_about_statistics(experiment: Experiment) -> str | None:
    """That running statistics are never updated, if the model has any."""
    with random_state_kept(torch.device("cpu")):
        names = [name for name, _ in experiment.model.bind()().named_buffers() if name.endswith("running_mean")]
    if not names:
        return None
    shown = f"{names[0]}, ..." if len(names) > 1 else names[0]
    return (
        f'buffers = "server": running statistics ({shown}) are never updated, so a '
        "new BatchNorm is tested with mean 0 and variance 1; use buffers=average or buffers=local"
    )


def _problems_with_size(experiment: Experiment) -> list[str]:
    """With lists that would fill the memory before anything has begun."""
    lines = []
    if experiment.cohort_size > LARGE:
        key = "workers" if experiment.cohort is None else "cohort"
        named = f"{key} = {experiment.cohort_size}"
        lines.extend(_beyond_memory(f"{named}: what is kept of every member of a cohort", experiment.cohort_size))
    if experiment.workers > LARGE and experiment.attack.workers is None and experiment.attack.count(experiment.workers):
        named = f"attack.fraction = {experiment.attack.fraction}"
        lines.extend(_beyond_memory(f"{named}: to draw from {experiment.workers} workers", experiment.workers))
    return lines


def _beyond_memory(what: str, count: int) -> list[str]:
    needed, free = count * MEMBER_BYTES, free_memory()
    if needed <= free:
        return []
    return [f"{what} takes {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB of memory are free"]


def _problems_with_ranks(experiment: Experiment, engine_class: type[Engine]) -> list[str]:
    """With the programs that a launcher has started, or with what is said of them where there are none."""
    if not engine_class.ranks:
        if experiment.distributed == Distributed():
            return []
        return [f'distributed: needs engine=distributed, not "{experiment.engine}"; omit [distributed]']
    where, lines = f'engine = "{experiment.engine}"', []
    if experiment.processes not in (None, 1):
        lines.append(
            f"processes = {experiment.processes}: {where} has as many processes as the launcher starts; omit it"
        )
    if _given(experiment, "timeout"):
        lines.append(f"timeout = {experiment.timeout}: {where} uses distributed.timeout instead")
    if not experiment.policy.bind().in_rounds:
        lines.append(
            f"policy.name = {show(experiment.policy.name)}: {where} only runs synchronous rounds; use another engine"
        )
    if experiment.batched.width is not None and experiment.distributed.inner != "batched":
        lines.append(
            f"batched.width = {experiment.batched.width}: {where} stacks rows only with distributed.inner=batched"
        )
    lines.extend(_problems_with_hook(experiment))
    return lines


def _problems_with_hook(experiment: Experiment) -> list[str]:
    hook = experiment.distributed.hook
    if hook == Hook():
        return []
    where = f"distributed.hook = {show(hook.name)}"
    if not experiment.rounds_of_gradients:
        return [f'{where}: applies to gradients, and sync = "{experiment.sync}" averages none; omit it']
    reason = what_needs_rows(experiment)
    return [f"{where}: ranks exchange rows of single workers here ({reason}); omit it"] if reason else []


def what_needs_rows(experiment: Experiment) -> str | None:
    """What in an experiment keeps ranks from averaging gradients as they compute them, row by row or not at all."""
    rule, precision = experiment.pipeline, PRECISIONS[experiment.precision]
    if not rule.linear_by_weights:
        return f"aggregate.rule = {show(rule.name)}"
    if experiment.attack.name != "none":
        return f"attack.name = {show(experiment.attack.name)}"
    if experiment.aggregate.nonfinite == "exclude":
        return 'aggregate.nonfinite = "exclude"'
    if precision.scales_losses:
        return f"precision = {show(precision.name)}, which scales each worker's loss"
    if experiment.distributed.inner != "serial":
        return f"distributed.inner = {show(experiment.distributed.inner)}"
    if experiment.records.updates:
        return "records.updates"
    return None


def _problems_with_idle_keys(experiment: Experiment) -> list[str]:
    """With what is about something that the experiment does not have."""
    lines, aggregate, checkpoint = [], experiment.aggregate, experiment.checkpoint
    if aggregate.root_samples != Aggregate().root_samples and not experiment.pipeline.takes("root"):
        lines.append(
            f"aggregate.root_samples = {aggregate.root_samples}: the rule {experiment.pipeline.name} uses no samples "
            "of the server; omit it"
        )
    if checkpoint.every == 0 and checkpoint.keep != Checkpoint().keep:
        lines.append(
            f"checkpoint.keep = {checkpoint.keep}: with checkpoint.every = 0 there are no checkpoints; omit it"
        )
    return lines


def _problems_with_losses(experiment: Experiment, engine_class: type[Engine]) -> list[str]:
    """With what becomes of a round that loses a process."""
    policy, retries = experiment.on_worker_failure, experiment.worker_retries
    given = _given(experiment, "on_worker_failure", "worker_retries")
    if engine_class.ranks:
        why = f'with engine = "{experiment.engine}" a lost rank ends the run'
        return [f"{key} = {show(value)}: {why}; omit it" for key, value in given.items()]
    if "worker_retries" not in engine_class.settings(_most_processes(experiment)):
        why = f'the engine "{experiment.engine}" uses one process, so it cannot lose one'
        return [f"{key} = {show(value)}: {why}; omit it" for key, value in given.items()]
    if policy == "abort" and "worker_retries" in given:
        return [f'worker_retries = {retries}: with on_worker_failure = "abort" no round is repeated; omit it']
    if policy == "drop" and not experiment.policy.bind().in_rounds:
        return [
            'on_worker_failure = "drop": needs synchronous rounds, and policy.name = '
            f'{show(experiment.policy.name)} has none; use "retry" or "abort" (clock.departures '
            "makes workers leave)"
        ]
    return []


def _given(experiment: Experiment, *keys: str) -> dict[str, Any]:
    """Those of the keys whose values are not the defaults."""
    fields, values = type(experiment).model_fields, {key: getattr(experiment, key) for key in keys}
    return {key: value for key, value in values.items() if value != fields[key].default}


def _most_processes(experiment: Experiment) -> int:
    """With how many processes an engine may work at most: a cohort keeps no more of them busy."""
    return min(experiment.processes or experiment.cohort_size, experiment.cohort_size)


def _problems_with_rounds(experiment: Experiment) -> list[str]:
    """With which rounds aggregate what."""
    lines, count = [], experiment.gradient_rounds
    if experiment.sync == "post_local" and count is None:
        lines.append(
            'sync = "post_local": needs gradient_rounds, the number of rounds after which parameters are averaged'
        )
    if experiment.sync != "post_local" and count is not None:
        lines.append(f'gradient_rounds = {count}: needs sync = "post_local", not "{experiment.sync}"; omit it')
    elif count is not None and count > experiment.rounds:
        lines.append(f"gradient_rounds = {count}: must be at most rounds, {experiment.rounds}")
    if experiment.rounds_of_gradients and experiment.anchored:
        lines.append(
            f'local.solver = "{experiment.local.solver}": needs local steps, so it does not work with '
            f'sync = "{experiment.sync}"; use another solver'
        )
    return lines


def _problems_with_weights(experiment: Experiment) -> list[str]:
    weights = experiment.aggregate.weights
    if weights is None:
        return []
    pipeline = experiment.pipeline
    where = f"aggregate.weights = {show(weights)}"
    if not pipeline.takes_weights:
        return [f"{where}: the rule {pipeline.name} takes no weights; omit them"]
    if isinstance(weights, list) and len(weights) != experiment.workers:
        return [f"{where}: must be {experiment.workers} numbers, one per worker, not {len(weights)}"]
    if isinstance(weights, list) and weights.count(0) >= experiment.cohort_size:
        return [f"{where}: too many zeros: all weights of a cohort of {experiment.cohort_size} can be zero"]
    return []


def _problems_with_time(experiment: Experiment) -> list[str]:
    """What does not go with the mode."""
    lines, policy = [], experiment.policy.bind()
    named = f"policy.name = {show(experiment.policy.name)}"
    if experiment.mode == "rounds" and not policy.in_rounds:
        lines.append(f"{named}: needs mode=clock or mode=race")
    if experiment.mode == "race" and policy.in_rounds:
        lines.append(f'{named}: mode="race" needs an asynchronous policy, such as policy=hogwild')
    for table, mode in (("clock", "clock"), ("race", "race")):
        if experiment.mode != mode and _given(experiment, table):
            lines.append(f"{table}: needs mode={mode}; omit [{table}]")
    if experiment.mode != "rounds" and not policy.in_rounds:
        lines.extend(_problems_with_policy(experiment, policy, named))
    if experiment.mode == "race" and not policy.in_rounds:
        lines.extend(_problems_with_race(experiment, policy, named))
    lines.extend(_problems_with_departures(experiment, policy))
    lines.extend(_problems_with_log(experiment, policy, named))
    return lines


def _problems_with_race(experiment: Experiment, policy: Policy, named: str) -> list[str]:
    """What processes that race leave no room for."""
    lines = []
    if engine.get(experiment.engine).target.racing is None:
        lines.append(f'engine = {show(experiment.engine)}: mode="race" needs engine=spawn or engine=auto')
    if experiment.batched.width is not None:
        lines.append(f"batched.width = {experiment.batched.width}: a race does not stack rows; omit it")
    if experiment.compile and policy.locking == "nothing":
        lines.append(f"compile = true: {named} does not compile, since other processes change the row; omit it")
    return lines


def _problems_with_log(experiment: Experiment, policy: Policy, named: str) -> list[str]:
    """What a log of a race leaves no room for on the clock."""
    if experiment.clock.log is None:
        return []
    lines, fields = [], type(experiment.clock).model_fields
    if policy.in_rounds or policy.locking != "server":
        lines.append(
            f"clock.log = {show(experiment.clock.log)}: {named} has no log; a log needs a policy that locks the server"
        )
    timed = [key for key in fields if key != "log" and getattr(experiment.clock, key) != fields[key].default]
    lines.extend(f"clock.{key}: with clock.log no work takes time; omit it" for key in timed)
    return lines


def _problems_with_policy(experiment: Experiment, policy: Policy, named: str) -> list[str]:
    """What an asynchronous policy leaves no room for."""
    defaults, lines = type(experiment).model_fields, []
    out = {"sync": "workers are not synchronised", "aggregate": "it applies updates itself"}
    if not policy.steps_server:
        out["server"] = "it updates the global row itself"
    for key, reason in out.items():
        allowed = defaults[key].default
        if key == "aggregate":
            allowed = Aggregate(nonfinite=experiment.aggregate.nonfinite)
        if getattr(experiment, key) != allowed:
            lines.append(f"{named}: {reason}; omit {key}")
    if experiment.records.updates:
        lines.append(f"{named}: has no synchronous rounds, so no updates to record; omit records.updates")
    if experiment.attack.name != "none" and experiment.attack.bind().poison is None:
        lines.append(
            f"attack.name = {show(experiment.attack.name)}: needs the rows of a cohort, and {named} has no cohort; "
            "use an attack on data, such as label_flipping"
        )
    elif experiment.attack.name != "none" and experiment.attack.bind().alters_rows:
        lines.append(
            f"attack.name = {show(experiment.attack.name)}: also alters rows with these parameters, which {named} "
            "does not support; use parameters that alter only data"
        )
    if experiment.cohort_size < experiment.workers and not (policy.samples and experiment.mode == "clock"):
        lines.append(f"cohort = {experiment.cohort}: with mode={experiment.mode} and {named} all workers work; omit it")
    if policy.work == "gradient" and PRECISIONS[experiment.precision].scales_losses:
        lines.append(
            f"precision = {show(experiment.precision)}: {named} uses gradients without loss "
            "scaling; use another precision"
        )
    if policy.work == "gradient" and experiment.anchored:
        lines.append(
            f"local.solver = {show(experiment.local.solver)}: needs local steps, so it does not work "
            f"with {named}; use another solver"
        )
    if policy.needs_momentum and not experiment.local.bind().start(torch.zeros(1)):
        lines.append(f"{named}: needs momentum; set local.momentum")
    try:
        policy.check(experiment.cohort_size)
    except ExperimentError as error:
        lines.extend(error.lines)
    return lines


def _problems_with_departures(experiment: Experiment, policy: Policy) -> list[str]:
    departures = experiment.clock.departures
    if not departures:
        return []
    if policy.in_rounds or experiment.cohort_size < experiment.workers:
        return ["clock.departures: need an asynchronous policy and no cohort"]
    wrong = [name for name in departures if not re.fullmatch("0|[1-9][0-9]*", name) or int(name) >= experiment.workers]
    return [f"clock.departures.{name}: must be a worker, from 0 to {experiment.workers - 1}" for name in wrong]


def _problems_with_attackers(experiment: Experiment) -> list[str]:
    listed, count = experiment.attack.workers or [], experiment.attack.count(experiment.workers)
    if len(set(listed)) < len(listed) or any(worker >= experiment.workers for worker in listed):
        return [f"attack.workers = {show(listed)}: must be different workers, from 0 to {experiment.workers - 1}"]
    if count >= experiment.workers:
        return [f"attack.workers: {count} of {experiment.workers} workers are Byzantine; at least one must be honest"]
    if experiment.attack.name != "none" and not count:
        return [
            f"attack.name = {show(experiment.attack.name)}: no worker attacks; set attack.fraction or attack.workers"
        ]
    return []
