"""Combinations of settings: those that an experiment cannot have, and keys that have no effect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch

from fedsim.asynchronous.policies import Policy
from fedsim.clients import LRSchedule, exchanges, needs_local_steps
from fedsim.clients.adapters import TrainFunction
from fedsim.config.schema import DIRECTIONS, Clock
from fedsim.core.learning_task import correct_of
from fedsim.core.randomness import preserve_random_state
from fedsim.core.suggestions import nearest
from fedsim.engines import Engine, engine
from fedsim.errors import ExperimentError, show
from fedsim.system.devices import free_memory

if TYPE_CHECKING:
    from fedsim.config.experiment import Experiment

LARGE = 1_000_000  # workers from which lists of them are compared with the free memory
BYTES_PER_WORKER = 100  # of such lists
SETTINGS_OF_ENGINES = {
    "processes",
    "start_method",
    "timeout",
    "process_retries",
    "batched",
    "cuda_graphs",
    "distributed",
}
TRUE_OF_ANY_ENGINE = {"processes": 1, "cuda_graphs": False}  # also of one that does not use the key


def problems_with(experiment: Experiment) -> list[str]:
    """Return one error line for each combination of settings that does not work; each table is valid by itself."""
    engine_class, policy = engine.get(experiment.engine).target, experiment.policy.component
    lines = [
        *_check_sizes(experiment),
        *_check_engine(experiment, engine_class),
        *_check_worker_tests(experiment),
        *_check_sync(experiment),
        *_check_local_work(experiment, policy),
        *_check_mode(experiment, policy),
        *_check_numbers_of_tests(experiment),
        *_check_workers(experiment),
        *(() if experiment.in_rounds or experiment.mode == "rounds" else _check_policy(experiment, policy)),
    ]
    own_checks: list[Callable[[], object]] = [
        *_checks_of_schedules(experiment),
        partial(experiment.sampling.component.check, experiment.workers, experiment.cohort_size),
        partial(policy.check, experiment.cohort_size),
        partial(experiment.rule.dry_run, experiment.cohort_size, experiment.local_lr),
    ]
    for check in () if lines else own_checks:
        try:
            check()
        except ExperimentError as error:
            lines += error.lines
    return lines


def warnings_about(experiment: Experiment) -> list[str]:
    """Return one line for each setting that has no effect, or an effect that few users intend."""
    attack, lines = experiment.attack, list[str | None](settings_without_effect(experiment))
    if experiment.cohort_size == experiment.workers:  # otherwise n and f differ between rounds
        lines.append(attack.component.weakness(experiment.workers, attack.count(experiment.workers)))
    if (attack.fraction or attack.workers) and "name" not in attack.model_fields_set:
        lines.append(
            "attack.name is unset: the Byzantine workers train as the others do; write attack.name=sign_flipping, or "
            "attack.name=none if that is meant"
        )
    if experiment.buffers == "frozen":
        lines.append(_warning_about_statistics(experiment))
    return [line for line in lines if line]


def _warning_about_statistics(experiment: Experiment) -> str | None:
    with preserve_random_state(torch.device("cpu")):
        names = [name for name, _ in experiment.model.component().named_buffers() if name.endswith("running_mean")]
    if not names:
        return None
    shown = f"{names[0]}, ..." if len(names) > 1 else names[0]
    return (
        f'buffers = "frozen": running statistics ({shown}) are never updated, so a '
        "new BatchNorm is tested with mean 0 and variance 1; use buffers=average or buffers=local"
    )


def settings_without_effect(experiment: Experiment) -> Iterator[str]:
    """Yield one line for each key with another value than its default that the experiment does not use."""
    default = type(experiment)()
    for setting, keys in _unused_keys(experiment):
        for key in sorted(keys):
            value, usual = (reduce(getattr, key.split("."), each) for each in (experiment, default))
            if value not in (usual, TRUE_OF_ANY_ENGINE.get(key, usual)):
                yield f"{key} has no effect with {setting}; omit it"


def _unused_keys(experiment: Experiment) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield settings of an experiment, each with the keys that are not used with it."""
    mode, sync, attack, stop = experiment.mode, experiment.sync, experiment.attack, experiment.stop
    policy, rule, algorithm = experiment.policy.component, experiment.rule, experiment.local.component
    processes = min(experiment.processes or experiment.cohort_size, experiment.cohort_size)
    used = engine.get(experiment.engine).target.traits.settings(processes)
    yield (
        f"engine={experiment.engine}",
        SETTINGS_OF_ENGINES - used - {"batched" if experiment.distributed.trainer == "batched" else ""},
    )
    yield f"mode={mode}", {"clock", "race"} - {mode}
    if mode == "race":
        yield "mode=race", {"batched", "worker_state_memory"}
    if experiment.in_rounds:
        reason = experiment.needs_rows if experiment.rounds_of_gradients else f"sync={sync}"
        if reason and "distributed" in used:
            yield f"{reason}, for which ranks send no means of gradients", {"distributed.hook"}
        yield f"sync={sync}", {"gradient_rounds"} if sync != "post_local" else ()
        yield f"sync={sync}", {"server"} if sync == "gradients" else ()
        rule_keys = {"aggregate.root_samples": rule.accepts("root"), "aggregate.weights": rule.accepts_weights}
        yield f"aggregate.rule={rule.name}", {key for key, is_used in rule_keys.items() if not is_used}
    else:
        yield (
            f"policy={experiment.policy.name}",
            {"sync", "gradient_rounds", "processors", "sampling", "sampling.client_dropout", "records.updates"}
            | {f"aggregate.{key}" for key in ("rule", "f", "weights", "root_samples")}
            | ({"server"} if not policy.uses_server_optimizer else set()),
        )
    if experiment.clock.replay_log is not None:
        yield "clock.replay_log", {f"clock.{key}" for key in Clock.model_fields if key != "replay_log"}
    feedback = any(processor.error_feedback for processor in experiment.processors)
    if not (experiment.buffers == "local" or feedback or algorithm.worker_state(torch.zeros(2))):
        yield "workers that keep no state", {"worker_state_memory"}
    if isinstance(algorithm, TrainFunction):
        function = f"local.algorithm={experiment.local.algorithm}, which takes the steps of a round itself"
        yield function, {"local.clip_norm", "local.accumulate", "local.schedule.per"}
    if not attack.count(experiment.workers):
        yield "no Byzantine workers (attack.fraction or attack.workers)", {"attack.name", "attack.start_round"}
    if not attack.fraction:
        yield "attack.fraction unset", {"attack.resample", "attack.by_class"}
    if not experiment.data.local_test_fraction:
        yield "data.local_test_fraction unset", {"worker_evaluation"}
    if not stop.active:
        yield "stop.patience and stop.target unset", {"stop.metric", "stop.mode"}
    if stop.patience is None:
        yield "stop.patience unset", {"stop.min_delta"}
    if experiment.checkpoint.every == 0:
        yield "checkpoint.every=0", {"checkpoint.keep"}


def what_needs_rows(experiment: Experiment) -> str | None:
    """Return the setting because of which ranks exchange a gradient of each worker.

    None if they may average gradients.
    """
    local, aggregate, rule = experiment.local, experiment.aggregate, experiment.rule
    settings = {
        f"aggregate.rule = {show(rule.name)}": not rule.linear_by_weights,
        experiment.attack.setting: experiment.attack.name != "none",
        "processors": experiment.processors,
        "data.local_test_fraction": experiment.data.local_test_fraction,
        "local.clip_norm": local.clip_norm is not None,
        _client_setting(experiment): experiment.local.component.alters_gradients,
        'aggregate.nonfinite = "exclude"': aggregate.nonfinite == "exclude",
        f"distributed.trainer = {show(experiment.distributed.trainer)}": experiment.distributed.trainer != "serial",
        "records.updates": experiment.records.updates,
    }
    return next((setting for setting, holds in settings.items() if holds), None)


def _client_setting(experiment: Experiment) -> str:
    """Return the setting that makes workers do more than step along gradients."""
    return experiment.local.component.setting or experiment.local.setting


def _needs_local_steps(experiment: Experiment, setting: str, instead: str) -> str:
    client_remedy = "omit it" if experiment.local.keep_state else "use another algorithm"
    client = _client_setting(experiment)
    return f"{client}: needs local steps, so it does not work with {setting}; {client_remedy}, or {instead}"


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
    name, traits = show(experiment.engine), engine_class.traits
    if experiment.mode == "race" and traits.races_on is None:
        yield f"engine = {name}: mode=race needs engine=spawn or engine=auto"
    elif traits.ranks and not experiment.in_rounds:
        yield f"{experiment.policy.setting}: the engine {name} only runs synchronous rounds; use another engine"


def _check_worker_tests(experiment: Experiment) -> Iterator[str]:
    every, where = (
        experiment.worker_evaluation.every,
        f"data.local_test_fraction = {experiment.data.local_test_fraction}",
    )
    if not experiment.data.local_test_fraction:
        return
    if not experiment.in_rounds:
        yield f"{where}: needs synchronous rounds; omit it"
    if experiment.attack.resample:
        yield (
            f"{where}: tests workers that never attack, and with attack.resample any worker may; omit one of the two"
        )
    for round in experiment.records.updates:
        if round % every == 0 or round == experiment.rounds:
            yield f"records.updates: workers are tested after round {round}, which overwrites its updates; omit it"


def _check_sync(experiment: Experiment) -> Iterator[str]:
    sync, count, algorithm = experiment.sync, experiment.gradient_rounds, experiment.local.component
    if experiment.aggregate.nonfinite == "exclude" and algorithm.has("receive_gradients"):
        yield (
            f"{experiment.local.setting}: sends the mean of all gradients before workers can be excluded, so it does "
            'not work with aggregate.nonfinite = "exclude"; use "error" or another client algorithm'
        )
    if sync == "post_local" and count is None:
        yield 'sync = "post_local": needs gradient_rounds, the number of rounds before parameters are averaged'
    if sync == "post_local" and (count or 0) > experiment.rounds:
        yield f"gradient_rounds = {count}: must be at most rounds, {experiment.rounds}"
    if experiment.rounds_of_gradients and needs_local_steps(algorithm):
        yield _needs_local_steps(experiment, f"sync={sync}", "sync=parameters")
    if algorithm.alters_gradients:
        setting = _client_setting(experiment)
        if not experiment.in_rounds:
            yield f"{setting}: needs rounds of gradients, and {experiment.policy.setting} has none; omit it"
        elif sync != "gradients":
            yield f"{setting}: needs sync=gradients, not {sync}; omit it"
        elif experiment.rule.accepts("root"):
            yield (
                f"{setting}: the rule {experiment.rule.name} compares it with a gradient of the server, which has "
                "no momentum; use another rule"
            )


def _check_local_work(experiment: Experiment, policy: Policy) -> Iterator[str]:
    local, rule, policy_setting = experiment.local, experiment.rule, experiment.policy.setting
    key = "epochs" if local.steps is None else "steps"
    amount = getattr(local, key)
    where = f"local.{key} = {show(amount)}"
    if isinstance(amount, list) and len(amount) != experiment.workers:
        yield f"{where}: must be {experiment.workers} numbers, one per worker, not {len(amount)}"
    if isinstance(amount, list) and rule.accepts("root"):
        yield f"{where}: the rule {rule.name} lets the server train too, which is not in the list; use a number"
    if isinstance(amount, dict) and not experiment.in_rounds and policy.work == "gradient":
        yield f"{where}: with {policy_setting} a worker sends each gradient and has no rounds; use a number"
    reasons = {
        f"with sync={experiment.sync} each batch has its own average": experiment.rounds_of_gradients,
        "needs synchronous rounds": not experiment.in_rounds,
        f"{show(local.algorithm)} takes further gradients of each batch": not local.component.element_wise,
    }
    by_function = isinstance(experiment.local.component, TrainFunction)
    if local.accumulate > 1 and not by_function and (reason := next((r for r, holds in reasons.items() if holds), "")):
        yield f"local.accumulate = {local.accumulate}: {reason}; use a larger local.batch_size"
    if local.schedule.per == "step" and not by_function and (exchanges(local.component) or rule.accepts("local_lr")):
        needing = local.algorithm if exchanges(local.component) else rule.name
        yield f'local.schedule.per = "step": {show(needing)} uses one learning rate for a round; use per=round'
    for schedule in (experiment.local_schedule, experiment.server_schedule):
        if schedule is not None and not experiment.in_rounds:
            yield f"{schedule.place}: asynchronous policies have no rounds in common; omit it"


def _checks_of_schedules(experiment: Experiment) -> Iterator[Callable[[], object]]:
    """Yield, for each schedule of a learning rate, a check of the first rate by the component that gets it."""
    local, server = experiment.local, experiment.server

    def check(schedule: LRSchedule, with_lr: Callable[..., Any], params: dict[str, Any], owner: str) -> None:
        try:
            with_lr(lr=schedule.rate(params["lr"], 1))
        except (KeyError, TypeError):
            line = f"{schedule.place}: needs a learning rate `lr`, which {owner} does not have; omit it"
            raise ExperimentError(line) from None

    if schedule := experiment.local_schedule:
        yield partial(
            check, schedule, local.component.with_lr, local.params, f"the client algorithm {show(local.algorithm)}"
        )
    if schedule := experiment.server_schedule:
        owner = f"the server optimizer {show(server.name)}"
        yield partial(check, schedule, partial(replace, server.component), server.params, owner)


def _check_mode(experiment: Experiment, policy: Policy) -> Iterator[str]:
    mode, clock, where = experiment.mode, experiment.clock, experiment.policy.setting
    if mode == "rounds" and not experiment.in_rounds:
        yield f"{where}: needs mode=clock or mode=race"
    if mode == "race" and experiment.in_rounds:
        yield f"{where}: mode=race needs an asynchronous policy, such as policy=hogwild"
    if mode == "race" and experiment.aggregate.nonfinite == "stop":
        yield 'aggregate.nonfinite = "stop": a race has no model of the round before; use "error", "exclude" or "keep"'
    if mode != "clock":
        return
    if clock.departures and (experiment.in_rounds or experiment.cohort_size < experiment.workers):
        yield "clock.departures: need an asynchronous policy and no cohort"
    elif clock.departures:
        for name in clock.departures:
            if not re.fullmatch("0|[1-9][0-9]*", name) or int(name) >= experiment.workers:
                yield f"clock.departures.{name}: must be a worker, from 0 to {experiment.workers - 1}"
    if clock.replay_log is not None and (experiment.in_rounds or policy.locking != "server"):
        yield f"clock.replay_log = {show(clock.replay_log)}: needs a policy that locks the server, and {where} does not"


def _check_numbers_of_tests(experiment: Experiment) -> Iterator[str]:
    """Check the labels of metrics, and the number by which a run ends early."""
    stop, labels = experiment.stop, [each.component.label for each in experiment.metrics]
    for label in dict.fromkeys(label for label in labels if labels.count(label) > 1):
        yield f"metrics: {labels.count(label)} metrics are called {show(label)}; give each another `label`"
    if not stop.active:
        return
    where, label = f"stop.metric = {show(stop.metric)}", stop.metric.removeprefix("metrics.")
    if experiment.mode == "race":
        yield "stop: does not work with mode=race, whose runs are not repeatable; omit it"
    if label == stop.metric and stop.metric not in DIRECTIONS:
        hint = nearest(stop.metric, [*DIRECTIONS, *(f"metrics.{each}" for each in labels)])
        yield f"{where}: no such number of a round; {hint}"
    elif label != stop.metric and stop.mode is None:
        yield f'{where}: needs stop.mode, "max" if a higher value is better, or "min"'
    if label.endswith("_accuracy") and label in DIRECTIONS and correct_of(experiment.task.component) is None:
        yield f"{where}: the task {experiment.task.name} has no accuracy; use stop.metric=test_loss or a metric"
    elif label.startswith("validation_") and not experiment.data.validation_fraction:
        yield f"{where}: needs data.validation_fraction; set it to 0.1, or use stop.metric=test_accuracy"


def _check_workers(experiment: Experiment) -> Iterator[str]:
    """Check the Byzantine workers, the weights of workers, and how cohorts are drawn."""
    workers, attack, weights = experiment.workers, experiment.attack, experiment.aggregate.weights
    listed, count, strategy = attack.workers or [], attack.count(workers), experiment.sampling.component
    if len(set(listed)) < len(listed) or any(worker >= workers for worker in listed):
        yield f"attack.workers = {show(listed)}: must be different workers, from 0 to {workers - 1}"
    elif count >= workers:
        yield f"attack.workers: {count} of {workers} workers are Byzantine; at least one must be honest"
    if attack.resample and attack.by_class is not None:
        yield f"attack.by_class = {attack.by_class}: does not go with attack.resample; omit one of them"
    if attack.start_round > experiment.rounds:
        yield f"attack.start_round = {attack.start_round}: must be at most rounds, {experiment.rounds}"
    if isinstance(weights, list) and len(weights) != workers:
        yield f"aggregate.weights = {show(weights)}: must be {workers} numbers, one per worker, not {len(weights)}"
    elif isinstance(weights, list) and weights.count(0) >= experiment.cohort_size:
        where, cohort = f"aggregate.weights = {show(weights)}", experiment.cohort_size
        yield f"{where}: too many zeros: all weights of a cohort of {cohort} can be zero"
    if "losses" in strategy.accepts and experiment.buffers == "local":
        yield f"{strategy.place}: computes losses of the global model, whose buffers are not sent with buffers=local"


def _check_policy(experiment: Experiment, policy: Policy) -> Iterator[str]:
    """Check what an asynchronous policy does not support."""
    where, algorithm = experiment.policy.setting, experiment.local.component
    attack, bound = experiment.attack.setting, experiment.attack.component
    attacks = experiment.attack.name != "none" and experiment.attack.count(experiment.workers)
    if attacks and bound.poison is None:
        yield (
            f"{attack}: needs the rows of a cohort, and {where} has no cohort; use an attack on data, such as "
            "label_flipping"
        )
    elif attacks and bound.alters_rows:
        yield (
            f"{attack}: with these parameters it also alters rows, which {where} does not support; use parameters "
            "that alter only data"
        )
    if experiment.cohort_size < experiment.workers and not (policy.allows_sampling and experiment.mode == "clock"):
        yield f"cohort = {experiment.cohort}: with mode={experiment.mode} and {where} all workers work; omit it"
    if algorithm.has("correct") or algorithm.has("receive_gradients") or algorithm.starts_from_current:
        yield (
            f"{experiment.local.setting}: needs rounds in which a cohort is aggregated, and {where} has none; use "
            "policy=sync"
        )
    elif policy.work == "gradient" and needs_local_steps(algorithm):
        yield _needs_local_steps(experiment, where, "policy=sync")
    elif experiment.mode == "race" and exchanges(algorithm):
        yield (
            f"{_client_setting(experiment)}: keeps worker state or exchanges more than rows with the server, which a "
            "race does not support; use mode=clock"
        )
    if policy.needs_momentum and not algorithm.start(torch.zeros(1)):
        yield f"{where}: needs momentum; set local.momentum"
