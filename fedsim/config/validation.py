"""Combinations of settings that an experiment cannot have. Each check yields error lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from fedsim.asynchronous.policies import Policy
from fedsim.config.local_validation import check_local_work
from fedsim.config.overrides import SETTINGS
from fedsim.config.sampling import check_sampling
from fedsim.config.schema import Aggregate, Checkpoint, Hook, Server
from fedsim.config.task_tables import check_evaluation, check_metrics, check_stop
from fedsim.core.randomness import preserve_random_state
from fedsim.engines import Engine, engine
from fedsim.errors import ExperimentError, show
from fedsim.system.devices import free_memory

if TYPE_CHECKING:
    from fedsim.config.experiment import Experiment

LARGE = 1_000_000  # workers from which lists of them are compared with the free memory
BYTES_PER_WORKER = 100  # of such lists
ENGINE_OF_SETTING = {"processes": "spawn", "batched": "batched", "cuda_graphs": "batched", "distributed": "distributed"}


def problems_with(experiment: Experiment) -> list[str]:
    """One error line for each combination of settings that does not work; each table is valid by itself."""
    engine_class, policy = engine.get(experiment.engine).target, experiment.policy.bind()
    lines = [
        *_check_sizes(experiment),
        *_check_engine(experiment, engine_class),
        *_check_unused_keys(experiment),
        *check_evaluation(experiment),
        *_check_full_gradients(experiment),
        *_check_sync(experiment),
        *check_local_work(experiment, policy),
        *_check_mode(experiment, policy),
        *_check_weights(experiment),
        *check_metrics(experiment),
        *check_stop(experiment),
        *check_sampling(experiment, policy),
        *_check_attackers(experiment),
    ]
    if not policy.in_rounds and experiment.mode != "rounds":
        lines += _check_policy(experiment, policy)
    if not policy.in_rounds and experiment.mode == "race":
        lines += _check_race(experiment, engine_class)
    return lines


def warnings_about(experiment: Experiment) -> list[str]:
    """One line for each setting that has no effect, or an effect that few users intend."""
    lines = []
    if experiment.cohort_size == experiment.workers:  # otherwise n and f differ between rounds
        lines.append(experiment.attack.bind().weakness(experiment.workers, experiment.attack.count(experiment.workers)))
    attack = experiment.attack
    if (attack.fraction or attack.workers) and "name" not in attack.model_fields_set:
        lines.append(
            "attack.name is unset: the Byzantine workers train as the others do; write attack.name=sign_flipping, or "
            "attack.name=none if that is meant"
        )
    if experiment.buffers == "server":
        lines.append(_warning_about_statistics(experiment))
    return [line for line in lines if line]


def _warning_about_statistics(experiment: Experiment) -> str | None:
    with preserve_random_state(torch.device("cpu")):
        names = [name for name, _ in experiment.model.bind()().named_buffers() if name.endswith("running_mean")]
    if not names:
        return None
    shown = f"{names[0]}, ..." if len(names) > 1 else names[0]
    return (
        f'buffers = "server": running statistics ({shown}) are never updated, so a '
        "new BatchNorm is tested with mean 0 and variance 1; use buffers=average or buffers=local"
    )


def _given(experiment: Experiment, *keys: str) -> dict[str, Any]:
    """The keys whose values are not the defaults, with these values."""
    fields = type(experiment).model_fields
    return {key: value for key in keys if (value := getattr(experiment, key)) != fields[key].default}


def _check_sizes(experiment: Experiment) -> Iterator[str]:
    workers, cohort, attack = experiment.workers, experiment.cohort_size, experiment.attack
    lists = []
    if cohort > LARGE:
        key = "workers" if experiment.cohort is None else "cohort"
        lists.append((f"{key} = {cohort}: the data about each member of a cohort", cohort))
    if workers > LARGE and attack.workers is None and attack.count(workers):
        lists.append((f"attack.fraction = {attack.fraction}: to draw from {workers} workers", workers))
    for line, count in lists:
        needed, free = count * BYTES_PER_WORKER, free_memory()
        if needed > free:
            yield f"{line} takes {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB of memory are free"
    if cohort > workers:
        yield f"cohort = {cohort}: must be at most workers, {workers}"


def _check_engine(experiment: Experiment, engine_class: type[Engine]) -> Iterator[str]:
    name, distributed = show(experiment.engine), experiment.distributed
    processes = min(experiment.processes or experiment.cohort_size, experiment.cohort_size)
    used = engine_class.traits.settings(processes)
    if distributed.inner == "batched":
        used = used | {"batched"}
    given = _given(experiment, *sorted(SETTINGS))
    for key, value in given.items():
        if key not in used and (key, value) not in (("processes", 1), ("cuda_graphs", False)):
            where = key if key == "distributed" else f"{key} = {show(value)}"
            where = f"batched.width = {value.width}" if key == "batched" else where
            instead = f", or use engine={ENGINE_OF_SETTING[key]}" if key in ENGINE_OF_SETTING else ""
            instead = ", or use distributed.timeout" if key == "timeout" and "distributed" in used else instead
            yield f"{where}: the engine {name} does not use it; omit it{instead}"
    if "distributed" in used:
        if not experiment.policy.bind().in_rounds:
            yield (
                f"policy.name = {show(experiment.policy.name)}: the engine {name} only runs synchronous rounds; use "
                "another engine"
            )
        if distributed.hook != Hook():
            yield from _check_hook(experiment)


def _check_hook(experiment: Experiment) -> Iterator[str]:
    where = f"distributed.hook = {show(experiment.distributed.hook.name)}"
    if not experiment.rounds_of_gradients:
        yield f"{where}: applies to gradients, and sync = {show(experiment.sync)} averages none; omit it"
    elif reason := what_needs_rows(experiment):
        yield f"{where}: needs averaged gradients, and {reason} needs the gradient of each worker; omit it"


def what_needs_rows(experiment: Experiment) -> str | None:
    """The setting because of which ranks exchange a gradient of each worker; None if they may average gradients."""
    rule = experiment.pipeline
    if not rule.linear_by_weights:
        return f"aggregate.rule = {show(rule.name)}"
    if experiment.attack.name != "none":
        return f"attack.name = {show(experiment.attack.name)}"
    if experiment.processors:
        return "processors"
    if experiment.data.worker_test:
        return "data.worker_test"
    if experiment.local.clip_norm is not None:
        return "local.clip_norm"
    if experiment.client_algorithm.alters_gradients:
        return _client_setting(experiment)
    if experiment.aggregate.nonfinite == "exclude":
        return 'aggregate.nonfinite = "exclude"'
    if experiment.distributed.inner != "serial":
        return f"distributed.inner = {show(experiment.distributed.inner)}"
    return "records.updates" if experiment.records.updates else None


def _check_unused_keys(experiment: Experiment) -> Iterator[str]:
    aggregate, checkpoint, rule = experiment.aggregate, experiment.checkpoint, experiment.pipeline
    if aggregate.root_samples != Aggregate().root_samples and not rule.accepts("root"):
        yield (
            f"aggregate.root_samples = {aggregate.root_samples}: the rule {rule.name} uses no samples of the server; "
            "omit it"
        )
    if _given(experiment, "worker_state_memory"):
        feedback = any(processor.error_feedback for processor in experiment.processors)
        kept = experiment.buffers == "local" or feedback or experiment.client_algorithm.worker_state(torch.zeros(2))
        reason = "a race keeps its state in shared memory" if experiment.mode == "race" else "workers keep no state"
        if not kept or experiment.mode == "race":
            yield f"worker_state_memory = {experiment.worker_state_memory}: {reason}; omit it"
    if checkpoint.every == 0 and checkpoint.keep != Checkpoint().keep:
        yield f"checkpoint.keep = {checkpoint.keep}: with checkpoint.every = 0 there are no checkpoints; omit it"


def _check_full_gradients(experiment: Experiment) -> Iterator[str]:
    if experiment.aggregate.nonfinite == "exclude" and experiment.client_algorithm.has("receive_gradients"):
        yield (
            f"local.solver = {show(experiment.local.solver)}: sends the mean of all gradients before workers can be "
            'excluded, so it does not work with aggregate.nonfinite = "exclude"; use "error" or another solver'
        )


def _check_sync(experiment: Experiment) -> Iterator[str]:
    sync, count = experiment.sync, experiment.gradient_rounds
    if sync == "post_local" and count is None:
        yield 'sync = "post_local": needs gradient_rounds, the number of rounds before parameters are averaged'
    if sync != "post_local" and count is not None:
        yield f"gradient_rounds = {count}: needs sync=post_local, not {sync}; omit it"
    elif count is not None and count > experiment.rounds:
        yield f"gradient_rounds = {count}: must be at most rounds, {experiment.rounds}"
    if sync == "gradients" and experiment.server != Server():
        yield (
            f"server.optimizer = {show(experiment.server.optimizer)}: with sync=gradients the local solver takes the "
            "step (local.*); omit [server]"
        )
    if experiment.rounds_of_gradients and experiment.needs_local_steps:
        yield _needs_local_steps(experiment, f"sync={sync}", "sync=parameters")
    if experiment.client_algorithm.alters_gradients:
        policy, setting = experiment.policy, _client_setting(experiment)
        if not policy.bind().in_rounds:
            yield f"{setting}: needs rounds of gradients, and policy.name = {show(policy.name)} has none; omit it"
        elif sync != "gradients":
            yield f"{setting}: needs sync=gradients, not {sync}; omit it"
        elif experiment.pipeline.accepts("root"):
            yield (
                f"{setting}: the rule {experiment.pipeline.name} compares it with a gradient of the server, which has "
                "no momentum; use another rule"
            )


def _client_setting(experiment: Experiment) -> str:
    """The setting that makes workers do more than step along gradients."""
    return experiment.client_algorithm.setting or f"local.solver = {show(experiment.local.solver)}"


def _needs_local_steps(experiment: Experiment, setting: str, instead: str) -> str:
    other = "omit it" if experiment.local.keep_state else "use another solver"
    return (
        f"{_client_setting(experiment)}: needs local steps, so it does not work with {setting}; {other}, or {instead}"
    )


def _check_weights(experiment: Experiment) -> Iterator[str]:
    weights, cohort, rule = experiment.aggregate.weights, experiment.cohort_size, experiment.pipeline
    where = f"aggregate.weights = {show(weights)}"
    if weights is not None and not rule.accepts_weights:
        yield f"{where}: the rule {rule.name} takes no weights; omit them"
    elif isinstance(weights, list) and len(weights) != experiment.workers:
        yield f"{where}: must be {experiment.workers} numbers, one per worker, not {len(weights)}"
    elif isinstance(weights, list) and weights.count(0) >= cohort:
        yield f"{where}: too many zeros: all weights of a cohort of {cohort} can be zero"


def _check_attackers(experiment: Experiment) -> Iterator[str]:
    workers, attack = experiment.workers, experiment.attack
    listed, count = attack.workers or [], attack.count(workers)
    if len(set(listed)) < len(listed) or any(worker >= workers for worker in listed):
        yield f"attack.workers = {show(listed)}: must be different workers, from 0 to {workers - 1}"
    elif count >= workers:
        yield f"attack.workers: {count} of {workers} workers are Byzantine; at least one must be honest"
    elif attack.name != "none" and not count:
        yield f"attack.name = {show(attack.name)}: no worker attacks; set attack.fraction or attack.workers"
    for key in ("redraw", "holding"):
        value = getattr(attack, key)
        if value not in (False, None) and not attack.fraction:
            yield f"attack.{key} = {show(value)}: needs attack.fraction"
    if attack.redraw and attack.holding is not None:
        yield f"attack.holding = {attack.holding}: does not go with attack.redraw; omit one of them"
    if attack.start_round > experiment.rounds:
        yield f"attack.start_round = {attack.start_round}: must be at most rounds, {experiment.rounds}"


def _check_mode(experiment: Experiment, policy: Policy) -> Iterator[str]:
    mode, clock, where = experiment.mode, experiment.clock, f"policy.name = {show(experiment.policy.name)}"
    if mode == "rounds" and not policy.in_rounds:
        yield f"{where}: needs mode=clock or mode=race"
    if mode == "race" and policy.in_rounds:
        yield f"{where}: mode=race needs an asynchronous policy, such as policy=hogwild"
    if mode == "race" and experiment.aggregate.nonfinite == "stop":
        yield 'aggregate.nonfinite = "stop": a race has no model of the round before; use "error", "exclude" or "keep"'
    for table in ("clock", "race"):
        if mode != table and _given(experiment, table):
            yield f"{table}: needs mode={table}; omit [{table}]"
    if clock.departures and (policy.in_rounds or experiment.cohort_size < experiment.workers):
        yield "clock.departures: need an asynchronous policy and no cohort"
    elif clock.departures:
        for name in clock.departures:
            if not re.fullmatch("0|[1-9][0-9]*", name) or int(name) >= experiment.workers:
                yield f"clock.departures.{name}: must be a worker, from 0 to {experiment.workers - 1}"
    if clock.log is not None:
        if policy.in_rounds or policy.locking != "server":
            yield f"clock.log = {show(clock.log)}: needs a policy that locks the server, and {where} does not"
        fields = type(clock).model_fields
        timed = [key for key in fields if key != "log" and getattr(clock, key) != fields[key].default]
        yield from (f"clock.{key}: with clock.log no work takes time; omit it" for key in timed)


def _check_policy(experiment: Experiment, policy: Policy) -> Iterator[str]:
    """Settings of synchronous rounds that an asynchronous policy does not use."""
    where = f"policy.name = {show(experiment.policy.name)}"
    unused = {"sync": "workers are not synchronised", "aggregate": "the policy applies updates itself"}
    unused["processors"] = "they are applied to the updates of a cohort"
    if not policy.uses_server_optimizer:
        unused["server"] = "the policy updates the global row itself"
    for key, reason in unused.items():
        default = type(experiment).model_fields[key].default
        if key == "aggregate":
            default = Aggregate(nonfinite=experiment.aggregate.nonfinite)
        if getattr(experiment, key) != default:
            yield f"{key}: is not used with {where}, since {reason}; omit it"
    if experiment.records.updates:
        yield f"records.updates: {where} has no synchronous rounds, so no updates to record; omit it"
    if experiment.attack.name != "none":
        attack, bound = f"attack.name = {show(experiment.attack.name)}", experiment.attack.bind()
        if bound.poison is None:
            yield (
                f"{attack}: needs the rows of a cohort, and {where} has no cohort; use an attack on data, such as "
                "label_flipping"
            )
        elif bound.alters_rows:
            yield (
                f"{attack}: with these parameters it also alters rows, which {where} does not support; use parameters "
                "that alter only data"
            )
    if experiment.cohort_size < experiment.workers and not (policy.allows_sampling and experiment.mode == "clock"):
        yield f"cohort = {experiment.cohort}: with mode={experiment.mode} and {where} all workers work; omit it"
    algorithm = experiment.client_algorithm
    if algorithm.has("correct") or algorithm.has("receive_gradients") or algorithm.starts_from_current:
        solver = f"local.solver = {show(experiment.local.solver)}"
        yield f"{solver}: needs rounds in which a cohort is aggregated, and {where} has none; use policy=sync"
    elif policy.work == "gradient" and experiment.needs_local_steps:
        yield _needs_local_steps(experiment, where, "policy=sync")
    elif experiment.mode == "race" and experiment.exchanges:
        yield (
            f"{_client_setting(experiment)}: keeps worker state or exchanges more than rows with the server, which a "
            "race does not support; use mode=clock"
        )
    if policy.needs_momentum and not experiment.local.bind().start(torch.zeros(1)):
        yield f"{where}: needs momentum; set local.momentum"
    try:
        policy.check(experiment.cohort_size)
    except ExperimentError as error:
        yield from error.lines


def _check_race(experiment: Experiment, engine_class: type[Engine]) -> Iterator[str]:
    if engine_class.traits.races_on is None:
        yield f"engine = {show(experiment.engine)}: mode=race needs engine=spawn or engine=auto"
    elif experiment.batched.width is not None:
        yield f"batched.width = {experiment.batched.width}: a race does not stack rows; omit it"
