"""Checks of combinations of settings: invalid combinations, and keys without effect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial, reduce
from typing import Any

import numpy as np
import torch

from fedsim.asynchronous.policies import Policy
from fedsim.clients import CohortGradient, LRSchedule, UpdateCorrection, exchanges, needs_local_steps
from fedsim.clients.adapters import TrainFunction
from fedsim.config.engines import SETTINGS_OF_ENGINES, traits_of
from fedsim.config.schema import DIRECTIONS, OWN, Clock
from fedsim.config.settings import Settings
from fedsim.core.base_table import ComponentTable
from fedsim.core.learning_task import correct_of
from fedsim.core.objects import ObjectName, may_change, names_in
from fedsim.core.randomness import preserve_random_state
from fedsim.errors import ExperimentError, show
from fedsim.hints.meanings import nearest
from fedsim.processing import check_order
from fedsim.system.devices import free_memory

LARGE = 1_000_000  # with more workers than this, lists of workers are compared with the free memory
MOST_LISTED = 10_000_000  # maximum length of such a list, which takes seconds to draw
BYTES_PER_WORKER = 100  # memory per worker for such lists
# values that are also right for engines that do not use the key
TRUE_OF_ANY_ENGINE = {"processes": 1, "cuda_graphs": False}
LACKS_LOCAL_TESTS = "needs tests of individual workers; add data.local_test_fraction=0.2"
NOT_IN_ROUNDS = ("data", "partition", "model", "records")  # tables whose objects are used before the first round only


def problems_with(experiment: Settings) -> list[str]:
    """Return one error line for each invalid combination of settings, after each table has been checked by itself."""
    policy = experiment.policy.component
    if lines := list(_check_sizes(experiment)):  # the other checks may need more memory than there is
        return lines
    lines = [
        *_check_engine(experiment),
        *check_worker_tests(experiment),
        *_check_sync(experiment),
        *_check_local_work(experiment, policy),
        *_check_mode(experiment, policy),
        *_check_numbers_of_tests(experiment),
        *_check_workers(experiment),
        *_check_privacy(experiment),
        *_check_secure(experiment),
        *_check_groups(experiment),
        *_check_fragments(experiment),
        *(() if experiment.in_rounds or experiment.mode == "rounds" else _check_policy(experiment, policy)),
    ]
    if lines:  # the checks below need settings that agree with each other
        return lines
    sizes = experiment.cohort_size, experiment.seed, experiment.rounds
    component_checks: list[Callable[[], object]] = [
        *_checks_of_schedules(experiment),
        partial(experiment.sampling.component.check, experiment.workers, experiment.cohort_size),
        partial(policy.check, experiment.cohort_size),
        *([partial(experiment.policy.topology.component.check, *sizes)] if policy.uses_topology else []),
        partial(check_order, experiment.chain, "processors"),
        partial(check_order, experiment.downlink_chain, "downlink"),
        *_checks_of_rules(experiment),
    ]
    if experiment.privacy.target_epsilon is None:  # otherwise the noise is not known yet
        component_checks.append(partial(experiment.privacy.component.check, experiment.expected_updates))
    for check in component_checks:
        try:
            check()
        except ExperimentError as error:
            lines += error.lines
    return lines


def warnings_about(experiment: Settings) -> list[str]:
    """Return one line for each setting without effect, or with an effect that users rarely intend."""
    return [*settings_without_effect(experiment), *rarely_intended(experiment), *frozen_statistics(experiment)]


def rarely_intended(experiment: Settings) -> list[str]:
    """Return one line for each setting with an effect that users rarely intend, without creating the model."""
    attack, lines = experiment.attack, list[str | None]()
    # otherwise the numbers of workers and attackers vary between rounds
    if experiment.cohort_size == experiment.workers:
        lines.append(attack.component.weakness(experiment.workers, attack.count(experiment.workers)))
    attacks = [(attack, experiment.workers, "workers"), (experiment.top_attack, experiment.group_count, "groups")]
    lines.extend(
        f"{table.place}.fraction = {table.fraction:g}: is less than one of {n} {units}, so there is no attack; use a "
        f"larger fraction, or more {units}"
        for table, n, units in attacks
        if table.fraction and n and not table.count(n)
    )
    lines.extend(
        f"{table.place}.name is unset: the Byzantine {units} train like honest {units}; write "
        f"{table.place}.name=sign_flipping, or {table.place}.name=none if this is intended"
        for table, n, units in attacks
        if table.count(n) and "name" not in table.model_fields_set
    )
    lines += [large_delta(experiment), _warning_about_neighbours(experiment)]
    return [line for line in lines if line]


def _warning_about_neighbours(experiment: Settings) -> str | None:
    """Return a line if the rule of a worker on a graph ignores that its neighbours have different weights."""
    policy, rule, graph = experiment.policy.component, experiment.rule, experiment.policy.topology.component
    if not policy.uses_topology or policy.locking == "pair" or rule.is_mean or rule.accepts_weights:
        return None
    weights = graph.mixing_matrix(experiment.workers, experiment.seed)
    if np.ptp(weights[weights > 0]) < 1e-6:
        return None
    return f"{experiment.aggregate.setting}: takes no weights, so all models count equally, despite {graph.place}"


def warnings_about_objects(experiment: Settings, *, resumed: bool = False) -> list[str]:
    """Return one line for each Python object that may keep a state between rounds, which checkpoints do not contain.

    `resumed`: whether the run continues after a checkpoint.
    """
    what = "starts with a new copy here" if resumed else "starts with a new copy when the run is resumed"
    tables = experiment.model_dump(exclude_unset=True).items()
    objects: list[tuple[str, str, Any]] = [
        (key, name, name.target) for key, table in tables for name in names_in(table)
    ]
    components = [table for table in experiment.tables() if isinstance(table, ComponentTable)]
    for component in components:
        name = getattr(component, component.named_by)
        if isinstance(name, str) and ":" in name and not isinstance(name, ObjectName):  # an import path
            objects.append((component.place, name, component.registration.target))
    return [
        f"{key}: {show(name)} {what}, because checkpoints do not contain attributes and variables of Python objects; "
        'if the results depend on them, use the input "state" of rules and attacks instead'
        for key, name, target in objects
        if key.partition(".")[0] not in NOT_IN_ROUNDS and may_change(target)
    ]


def large_delta(experiment: Settings) -> str | None:
    """Return a warning line if delta exceeds 1 / workers. Return None otherwise, or without differential privacy."""
    delta, workers = experiment.privacy.delta, experiment.workers
    if experiment.protects is None or delta <= 1 / workers:
        return None
    return (
        f"privacy.delta = {delta:g}: is larger than 1 / workers = {1 / workers:.2g}, so the guarantee is empty: it "
        "would allow publishing all data of one worker; set a smaller delta, such as the default of 1e-5"
    )


def frozen_statistics(experiment: Settings) -> list[str]:
    """Return a line if `buffers` freezes running statistics of the model, which is created to look for them."""
    if experiment.buffers != "frozen":
        return []
    with preserve_random_state(torch.device("cpu")):
        names = [name for name, _ in experiment.model.component().named_buffers() if name.endswith("running_mean")]
    if not names:
        return []
    shown = f"{names[0]}, ..." if len(names) > 1 else names[0]
    private = experiment.privacy.component.active  # which refuses all other treatments of buffers
    remedy = (
        "a model without buffers, such as a ResNet with model.norm=group"
        if private
        else "buffers=average or buffers=local"
    )
    return [
        f'buffers = "frozen": running statistics ({shown}) are never updated, so '
        f"tests use their initial values; use {remedy}"
    ]


def settings_without_effect(*experiments: Settings) -> Iterator[str]:
    """Yield one warning line for each key that has no effect in any experiment that sets it to another value."""
    default, unused = _default(type(experiments[0])), [dict[str, str]() for _ in experiments]
    for experiment, settings in zip(experiments, unused, strict=True):
        for setting, keys in _unused_keys(experiment):
            settings |= {key: setting for key in sorted(keys) if key not in settings}
    for key in dict.fromkeys(key for settings in unused for key in settings):
        usual = reduce(getattr, key.split("."), default)
        neutral = usual, TRUE_OF_ANY_ENGINE.get(key, usual)
        values = (reduce(getattr, key.split("."), experiment) for experiment in experiments)
        changed = [settings for settings, value in zip(unused, values, strict=True) if value not in neutral]
        if changed and all(key in settings for settings in changed):
            yield f"{key} has no effect with {changed[0][key]}; omit it"


@cache
def _default(kind: type[Settings]) -> Settings:
    return kind()


def _unused_keys(experiment: Settings) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield pairs of a setting and the keys that have no effect because of it."""
    mode, policy = experiment.mode, experiment.policy.component
    processes = min(experiment.processes or experiment.cohort_size, experiment.cohort_size)
    used = traits_of(experiment.engine).settings(processes)
    batched = {"batched"} if experiment.distributed.trainer == "batched" else set()
    yield f"engine={experiment.engine}", SETTINGS_OF_ENGINES - used - batched
    yield f"mode={mode}", {"clock", "race"} - {mode}
    if not policy.uses_topology:
        yield f"policy={experiment.policy.name}", {"policy.topology"}
    if mode == "race":
        yield "mode=race", {"batched", "worker_state_memory"}
    if mode != "clock":
        yield f"mode={mode}", {"attack.slowdown"}
    attack = experiment.attack.component
    if experiment.in_rounds or policy.uses_topology or not attack.alters_rows or attack.row_by_row:
        where = experiment.attack.setting if attack.row_by_row else f"policy={experiment.policy.name}"
        yield where, {"attack.knows"}
    rule_keys = {
        "aggregate.f": experiment.aggregate.takes_f or experiment.records.updates,  # `fedsim replay` uses it
        "aggregate.root_samples": experiment.rule.accepts("root"),
        "aggregate.root_every": experiment.rule.accepts("root") or experiment.in_rounds,
    }
    yield f"aggregate.rule={experiment.rule.name}", {key for key, is_used in rule_keys.items() if not is_used}
    if experiment.in_rounds:
        yield from _unused_in_rounds(experiment, ranks="distributed" in used)
    else:
        yield (
            f"policy={experiment.policy.name}",
            {"sync", "switch_after_round", "processors", "downlink", "aggregate.weights"}
            | {"sampling", "sampling.dropout_rate"}
            | ({"server"} if not policy.uses_server_optimizer else set()),
        )
    yield from _unused_by_values(experiment)


def _unused_in_rounds(experiment: Settings, *, ranks: bool) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield pairs of a setting and the keys that have no effect because of it, for a run in synchronous rounds.

    `ranks`: whether the engine's processes are ranks of `torch.distributed`.
    """
    sync, rule = experiment.sync, experiment.rule
    reason = experiment.needs_rows if experiment.rounds_of_gradients else f"sync={sync}"
    if reason and ranks:
        yield f"{reason}, because ranks do not average gradients", {"distributed.hook"}
    yield f"sync={sync}", {"switch_after_round"} if sync != "post_local" else ()
    yield f"sync={sync}", {"server"} if sync == "gradients" else ()
    yield "policy=sync", {"aggregate.root_every"}
    if not rule.accepts_weights:
        yield f"aggregate.rule={rule.name}", {"aggregate.weights"}


def _unused_by_values(experiment: Settings) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield pairs of a setting and the keys that have no effect because of its value."""
    attack, stop, algorithm = experiment.attack, experiment.stop, experiment.local.component
    feedback = any(processor.error_feedback for processor in experiment.processors)
    keeps_state = experiment.buffers == "local" or feedback or algorithm.worker_state(torch.zeros(2))
    function = f"local.algorithm={experiment.local.algorithm}, which performs the steps itself"
    by_function = {"local.clip_norm", "local.accumulation_steps", "local.schedule.per"}
    of_clock = {f"clock.{key}" for key in Clock.model_fields if key != "replay_log"}
    of_attack = {f"attack.{key}" for key in ("name", "start_round", "before_processors", "knows", "slowdown")}
    private = f"privacy.mechanism={experiment.privacy.mechanism}"
    top_attack = experiment.top_attack
    attacked = not experiment.groups or top_attack.fraction or top_attack.count(experiment.group_count)
    uses: list[tuple[Any, str, set[str]]] = [  # (whether the keys are used, the setting, the keys)
        (experiment.protects, private, {"privacy.delta", "privacy.accountant"}),
        (experiment.clock.replay_log is None, "clock.replay_log", of_clock),
        (keeps_state, "workers without state", {"worker_state_memory"}),
        (not isinstance(algorithm, TrainFunction), function, by_function),
        (attack.count(experiment.workers) or attack.fraction, "no Byzantine workers (set attack.f)", of_attack),
        (experiment.groups, "groups unset", {"group_rounds", "top_aggregate", "top_attack"}),
        (
            attacked,
            "no Byzantine groups (set top_attack.f)",
            {"top_attack.name", "top_attack.start_round", "top_attack.resample"},
        ),
        (experiment.processors, "processors unset", {"attack.before_processors"}),
        (attack.fraction or attack.f, "attack.f and attack.fraction unset", {"attack.resample", "attack.by_class"}),
        (experiment.model.lora.rank, "model.lora.rank=0", {"model.lora.alpha", "model.lora.targets"}),
        (experiment.data.local_test_fraction, "data.local_test_fraction unset", {"worker_evaluation"}),
        (stop.active, "stop.patience and stop.target unset", {"stop.metric", "stop.mode"}),
        (stop.patience is not None, "stop.patience unset", {"stop.min_delta"}),
        (experiment.checkpoint.every != 0, "checkpoint.every=0", {"checkpoint.keep"}),
        (experiment.planned_settings, "no schedule over all rounds and no target_epsilon", {"planned_rounds"}),
    ]
    yield from ((setting, keys) for used, setting, keys in uses if not used)


def _needs_local_steps(experiment: Settings, setting: str, instead: str) -> str:
    remedy = "omit it" if experiment.local.component.setting else "use another algorithm"
    where = experiment.local.steps_setting
    return f"{where}: needs local steps, so it does not work with {setting}; {remedy}, or {instead}"


def _check_sizes(experiment: Settings) -> Iterator[str]:
    workers, cohort, attack = experiment.workers, experiment.cohort_size, experiment.attack
    lists = []
    if cohort > LARGE:
        key = "workers" if experiment.cohort is None else "cohort"
        lists.append((f"{key} = {cohort}: data about the workers of a cohort", cohort))
    if workers > LARGE and attack.workers is None and attack.count(workers):
        key = "fraction" if attack.f is None else "f"
        lists.append((f"attack.{key} = {getattr(attack, key)}: drawing from {workers} workers", workers))
    if workers > LARGE and experiment.groups is not None:
        lists.append((f"groups: a list of {workers} workers", workers))
    for line, count in lists:
        needed, free = count * BYTES_PER_WORKER, free_memory()
        if needed > free:
            yield (
                f"{line} takes {needed / 1e9:,.1f} GB, but only {free / 1e9:,.1f} GB of memory are free; use fewer "
                "workers"
            )
        elif count > MOST_LISTED:
            yield f"{line} takes very long; use at most {MOST_LISTED:,} workers"
    if cohort > workers:
        yield f"cohort = {cohort}: must be at most {workers}, the number of workers"


def _check_engine(experiment: Settings) -> Iterator[str]:
    name, traits = show(experiment.engine), traits_of(experiment.engine)
    if traits.ranks and not experiment.in_rounds:
        yield f"{experiment.policy.setting}: the engine {name} only supports synchronous rounds; use another engine"
    elif experiment.mode == "race" and traits.races_on is None:
        yield f"engine = {name}: mode=race needs engine=processes or engine=auto"
    if traits.spawns and experiment.start_method == "fork":
        yield f'start_method = "fork": the engine {name} spawns its processes; use engine=processes'


def problem_with_worker_tests(experiment: Settings) -> str | None:
    """Return why an experiment has no tests of individual workers, and what to change. None if it has such tests."""
    if not experiment.in_rounds:
        return f"needs synchronous rounds, unlike {experiment.policy.setting}; use test_loss"
    return None if experiment.data.local_test_fraction else LACKS_LOCAL_TESTS


def check_worker_tests(experiment: Settings) -> Iterator[str]:
    """Yield an error line for each setting that prevents the requested tests of individual workers."""
    every, where = (
        experiment.worker_evaluation.every,
        f"data.local_test_fraction = {show(experiment.data.local_test_fraction)}",
    )
    if not experiment.data.local_test_fraction:
        return
    if experiment.data.local_test_fraction == OWN and not hasattr(experiment.partition.component, "column"):
        yield f"{where}: needs a partition by owners, so that each worker has test samples; use partition=natural"
    if not experiment.in_rounds:
        yield f"{where}: is only used with synchronous rounds; omit it"
    if experiment.attack.resample:
        yield (
            f"{where}: tests only workers that never attack, but with attack.resample every worker may attack; remove "
            "data.local_test_fraction or attack.resample"
        )
    for round in experiment.records.updates:
        if round % every == 0:
            yield (
                f"records.updates: the updates of round {round} cannot be stored, because the worker test after this "
                "round overwrites them; omit this round"
            )


def _check_sync(experiment: Settings) -> Iterator[str]:
    sync, count, algorithm = experiment.sync, experiment.switch_after_round, experiment.local.component
    if experiment.aggregate.nonfinite == "exclude" and isinstance(algorithm, CohortGradient):
        yield (
            f"{experiment.local.setting}: averages the gradients of all workers before any worker can be excluded, so "
            'aggregate.nonfinite = "exclude" is not supported; use aggregate.nonfinite = "error", or another client '
            "algorithm"
        )
    if experiment.downlink and experiment.rounds_of_gradients:
        yield (
            "downlink: workers that send gradients need the global model in each step, so it does not work with "
            f"sync={sync}; omit it, or use sync=parameters"
        )
    if sync == "post_local" and count is None:
        yield 'sync = "post_local": needs switch_after_round, the last round that aggregates gradients'
    if sync == "post_local" and (count or 0) > experiment.rounds:
        yield f"switch_after_round = {count}: must be at most {experiment.rounds}, the number of rounds"
    if experiment.rounds_of_gradients and needs_local_steps(algorithm):
        yield _needs_local_steps(experiment, f"sync={sync}", "sync=parameters")
    if algorithm.alters_gradients:
        setting = experiment.local.steps_setting
        if not experiment.in_rounds:
            yield f"{setting}: needs sync=gradients, which {experiment.policy.setting} does not support; omit it"
        elif sync != "gradients":
            yield f"{setting}: is only used with sync=gradients, not with sync={sync}; omit it"
        elif experiment.rule.accepts("root"):
            yield (
                f"{setting}: the rule {experiment.rule.name} compares worker gradients with a server gradient, which "
                "has no momentum; use another rule"
            )


def _check_local_work(experiment: Settings, policy: Policy) -> Iterator[str]:
    local, rule, policy_setting = experiment.local, experiment.rule, experiment.policy.setting
    mode, sends_gradients = (f"sync={experiment.sync}", experiment.rounds_of_gradients > 0)
    if not experiment.in_rounds:
        mode, sends_gradients = policy_setting, experiment.sends_gradients
    private = local.component.sample_noise is not None
    for key, (form, numbers) in local.varying.items():
        where = f"local.{key} = {show(getattr(local, key))}"
        if form == "list" and len(numbers) != experiment.workers:
            yield f"{where}: must be {experiment.workers} numbers, one per worker, not {len(numbers)}"
        reasons = {
            f"with the rule {rule.name} the server also trains": rule.accepts("root") and form in ("list", "function"),
            f"the rule {rule.name} needs one learning rate": key == "lr" and rule.accepts("local_lr"),
            f"with {mode} all steps have the same {key}": key in local.params and sends_gradients,
            f"{mode} has no rounds, because workers send every gradient": form != "list" and experiment.sends_gradients,
            "privacy depends on the largest number": form == "function" and key in local.alternatives and private,
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), ""):
            yield f"{where}: differs between workers or rounds, but {reason}; use one number for all"
    reasons = {
        f"with sync={experiment.sync} the gradients of each batch are averaged": experiment.rounds_of_gradients,
        "only works with synchronous rounds": not experiment.in_rounds,
        f"{show(local.algorithm)} computes several gradients per batch": local.component.gradients_per_step > 1,
        f"{local.steps_setting} needs one batch per step": not local.component.element_wise,
        f"{show(local.algorithm)} adds noise to each batch": local.component.sample_noise is not None,
    }
    by_function = isinstance(experiment.local.component, TrainFunction)
    if by_function and experiment.task.params.get("class_weights"):
        yield f"task.class_weights: {experiment.local.setting} computes the loss itself; omit it"
    reason = next((reason for reason, holds in reasons.items() if holds), "")
    if local.accumulation_steps > 1 and not by_function and reason:
        yield f"local.accumulation_steps = {local.accumulation_steps}: {reason}; use a larger local.batch_size"
    if local.schedule.per == "step" and not by_function and (exchanges(local.component) or rule.accepts("local_lr")):
        needing = local.algorithm if exchanges(local.component) else rule.name
        yield f'local.schedule.per = "step": {show(needing)} needs one learning rate per round; use per=round'
    for schedule in (experiment.local_schedule, experiment.server_schedule):
        if schedule is not None and not experiment.in_rounds:
            yield f"{schedule.place}: does not apply to asynchronous policies, whose workers share no rounds; omit it"


def _checks_of_rules(experiment: Settings) -> list[Callable[[], object]]:
    """Return checks that raise ExperimentError if a rule cannot aggregate the updates of a full cohort or group.

    There is one check for each number of updates that a rule may have to aggregate.
    """
    cohort, lr = experiment.cohort_size, experiment.local_lr
    if not experiment.in_rounds:
        return [] if experiment.rule.is_mean else list(_checks_of_combinations(experiment))
    if experiment.groups is None:
        return [partial(experiment.rule.dry_run, cohort, lr)]
    sizes = np.minimum(np.bincount(experiment.grouping), cohort).tolist()
    numbers = sorted(set(zip(sizes, experiment.f_of_groups(experiment.byzantine), strict=True)))
    place = "aggregate.rule, in a group of {}"
    checks = [partial(experiment.aggregate.pipeline(f).dry_run, size, lr, place=place) for size, f in numbers]
    return [
        *checks,
        partial(experiment.top.rule.dry_run, experiment.group_count, lr, place="top_aggregate.rule, with {} groups"),
    ]


def _checks_of_combinations(experiment: Settings) -> Iterator[Callable[[], object]]:
    """Yield a check for each number of vectors that the rule combines with an asynchronous policy."""
    policy, rule, lr = experiment.policy.component, experiment.rule, experiment.local_lr
    where, n = f"policy={experiment.policy.name}", experiment.cohort_size
    if not policy.uses_topology:
        sizes = policy.sizes(n)
        models = torch.zeros(1, 8, dtype=torch.double) if sizes == (1,) else None
        for size in sizes:
            place = f"aggregate.rule, which combines {{}} of {n} vectors with {where}"
            yield partial(rule.dry_run, size, lr, place=place, models=models)
        return
    graph, sizes_and_f = experiment.policy.topology.component, set()
    for round in graph.checked_rounds(experiment.rounds):
        counts = graph.adjacency(n, experiment.seed, round).sum(1).tolist()
        pairs = zip(counts, experiment.f_on_graph(experiment.byzantine, round), strict=True)
        sizes_and_f |= {(1 if policy.locking == "pair" else count, f) for count, f in pairs if count}
    place = f"aggregate.rule, which combines {{}} models, a worker's and its neighbours', with {where}"
    for count, f in sorted(sizes_and_f):
        weights = torch.full((count + 1,), 1 / (count + 1), dtype=torch.double) if rule.accepts_weights else None
        yield partial(experiment.aggregate.pipeline(f).dry_run, count + 1, lr, weights, place=place, own=0)


def _checks_of_schedules(experiment: Settings) -> Iterator[Callable[[], object]]:
    """Yield a check for each learning-rate schedule, which raises ExperimentError if the first rate is invalid."""
    local, server = experiment.local, experiment.server

    def check(schedule: LRSchedule, with_lr: Callable[..., Any], params: dict[str, Any], owner: str) -> None:
        try:
            with_lr(lr=schedule.rate(params["lr"], 1))
        except (KeyError, TypeError):
            line = f"{schedule.place}: needs a learning rate `lr`, which {owner} does not have; omit it"
            raise ExperimentError(line) from None

    if schedule := experiment.local_schedule:
        owner = f"the client algorithm {show(local.algorithm)}"
        yield partial(check, schedule, local.component.having, local.params | local.largest, owner)
    if schedule := experiment.server_schedule:
        owner = f"the server optimizer {show(server.name)}"
        yield partial(check, schedule, partial(replace, server.component), server.params, owner)


def _check_mode(experiment: Settings, policy: Policy) -> Iterator[str]:
    mode, clock, where = experiment.mode, experiment.clock, experiment.policy.setting
    if mode == "rounds" and not experiment.in_rounds:
        yield f"{where}: needs mode=clock or mode=race"
    if mode == "race" and experiment.in_rounds:
        yield f"{where}: mode=race needs an asynchronous policy, such as policy=hogwild"
    if mode == "race" and experiment.aggregate.nonfinite == "stop":
        yield (
            'aggregate.nonfinite = "stop": returns the model of the previous round, which a race does not keep; use '
            '"error", "exclude" or "keep"'
        )
    if mode != "clock":
        return
    if clock.departures and (experiment.in_rounds or experiment.cohort_size < experiment.workers):
        yield "clock.departures: only works with an asynchronous policy and without a cohort; omit it"
    elif clock.departures:
        for name in clock.departures:
            if not re.fullmatch("0|[1-9][0-9]*", name) or int(name) >= experiment.workers:
                yield f"clock.departures.{name}: the key must be a worker ID from 0 to {experiment.workers - 1}"
    if clock.replay_log is not None and (experiment.in_rounds or policy.locking != "server"):
        yield (
            f"clock.replay_log = {show(clock.replay_log)}: needs a policy that locks the server's model, which {where} "
            "does not; omit it, or use another policy"
        )


def _check_numbers_of_tests(experiment: Settings) -> Iterator[str]:
    """Yield an error line for each metric label that is used twice, and for each invalid setting of early stopping."""
    stop, labels = experiment.stop, [table.component.label for table in experiment.metrics]
    for label in dict.fromkeys(label for label in labels if labels.count(label) > 1):
        remedy = 'give each a different label, as in {name = "top_k", label = "top_5"}'
        yield f"metrics: {labels.count(label)} metrics are called {show(label)}; {remedy}"
    if not stop.active:
        return
    where, label = f"stop.metric = {show(stop.metric)}", stop.metric.removeprefix("metrics.")
    if experiment.mode == "race":
        yield "stop: does not work with mode=race, whose runs are not reproducible; omit it"
    if label == stop.metric and stop.metric not in DIRECTIONS:
        hint = nearest(stop.metric, [*DIRECTIONS, *(f"metrics.{known}" for known in labels)])
        yield f"{where}: no such metric; {hint}"
    elif label != stop.metric and stop.mode is None:
        yield f'{where}: needs stop.mode, "max" if higher values are better, otherwise "min"'
    if label.endswith("_accuracy") and label in DIRECTIONS and correct_of(experiment.task.component) is None:
        yield f"{where}: the task {experiment.task.name} has no accuracy; use stop.metric=test_loss or one of `metrics`"
    elif label.startswith("validation_") and not experiment.data.validation_fraction:
        yield f"{where}: needs data.validation_fraction; set it to 0.1, or use stop.metric=test_accuracy"
    elif stop.metric.startswith("worker_") and (problem := problem_with_worker_tests(experiment)):
        yield f"{where}: {problem}"


def _check_workers(experiment: Settings) -> Iterator[str]:
    """Yield an error line for each invalid setting of Byzantine workers, aggregation weights and cohort sampling."""
    workers, attack, weights = experiment.workers, experiment.attack, experiment.aggregate.weights
    listed, count, strategy = attack.workers or [], attack.count(workers), experiment.sampling.component
    if len(set(listed)) < len(listed) or any(worker >= workers for worker in listed):
        yield f"attack.workers = {show(listed)}: must be distinct worker IDs from 0 to {workers - 1}"
    elif count >= workers:
        key = "workers" if attack.f is None else "f"
        yield f"attack.{key} = {show(getattr(attack, key))}: must be fewer than {workers}, the number of workers"
    if attack.resample and attack.by_class is not None:
        yield f"attack.by_class = {attack.by_class}: does not work with attack.resample; remove one of the two"
    if attack.slowdown is not None and attack.resample:
        yield "attack.slowdown: needs the same Byzantine workers in all rounds; remove attack.resample"
    if attack.start_round > experiment.rounds:
        yield f"attack.start_round = {attack.start_round}: must be at most {experiment.rounds}, the number of rounds"
    if isinstance(weights, list) and len(weights) != workers:
        yield f"aggregate.weights = {show(weights)}: must be {workers} numbers, one per worker, not {len(weights)}"
    elif isinstance(weights, list) and weights.count(0) >= experiment.cohort_size:
        where, cohort = f"aggregate.weights = {show(weights)}", experiment.cohort_size
        yield f"{where}: all weights of a cohort of {cohort} workers can be zero; use fewer than {cohort} zeros"
    if "losses" in strategy.accepts and experiment.buffers == "local":
        yield (
            f"{strategy.place}: needs losses of the global model, but with buffers=local the workers do not receive "
            "its buffers; use buffers=average, or another strategy"
        )


def _check_groups(experiment: Settings) -> Iterator[str]:
    """Yield an error line for each setting that does not work with groups."""
    if experiment.groups is None:
        return
    try:
        top = experiment.top
    except ExperimentError as error:
        yield from error.lines
        return
    algorithm, row, strategy = experiment.local.component, torch.zeros(2), experiment.sampling.component
    one_server = algorithm.server_state(row), algorithm.message(row), algorithm.starts_from_current
    refused = {
        **{
            key: reduce(getattr, key.split("."), experiment)
            for key in ("downlink", "aggregate.secure", "records.updates")
        },
        f"mode={experiment.mode}": experiment.mode != "rounds",
        f"sync={experiment.sync}": experiment.sync != "parameters",
        experiment.local.setting: any(one_server) or isinstance(algorithm, (UpdateCorrection, CohortGradient)),
        "local.fragments": experiment.local.fragments.active,
        experiment.privacy.setting: experiment.privacy.component.active,
        'aggregate.weights = "inverse_probability"': experiment.aggregate.weights == "inverse_probability",
        experiment.aggregate.setting: experiment.rule.accepts("root"),
        experiment.top_aggregate.setting: top.rule.accepts("root") or top.rule.accepts("losses"),
        strategy.place: "losses" in strategy.accepts,
        experiment.top_attack.setting: top.attack.name != "none" and not top.attack.component.alters_rows,
    }
    for setting in (setting for setting, is_set in refused.items() if is_set):
        yield f"{setting}: does not work with groups, each of which has a server of its own; omit one of the two"
    rounds, every = experiment.rounds, experiment.group_rounds
    if rounds % every:
        fit = f"rounds={-(-rounds // every) * every}"
        yield f"rounds = {rounds}: the global model changes only every group_rounds={every} rounds; use {fit}"
    yield from map(_at_top, _check_workers(top))


def _at_top(line: str) -> str:
    """Return an error line about the attack or the rule of the top level, whose workers are the groups."""
    return re.sub(r"^(attack|aggregate)\b", r"top_\1", line).replace(" worker", " group")


def _check_fragments(experiment: Settings) -> Iterator[str]:
    """Yield an error line for each setting that does not work with workers that keep their own models."""
    if not experiment.local.fragments.active:
        return
    rule, attack = experiment.rule, experiment.attack
    if experiment.cohort_size < experiment.workers or experiment.sampling != type(experiment.sampling)():
        yield (
            "local.fragments: workers keep their own models, so all must take part in each round; omit cohort and "
            "sampling"
        )
    changing = {
        experiment.aggregate.setting: any(map(rule.accepts, ("state", "last", "root"))),
        attack.setting: attack.count(experiment.workers) and {"state", "last"} & attack.component.accepts.keys(),
    }
    for setting in (setting for setting, is_set in changing.items() if is_set):
        yield f"{setting}: compares the updates of several rounds, which local.fragments divides; omit one of the two"
    if not experiment.in_rounds:
        yield f"local.fragments: needs synchronous rounds, which {experiment.policy.setting} does not have; omit it"


def _check_privacy(experiment: Settings) -> Iterator[str]:
    """Yield an error line for each setting under which more than clipped updates with noise would be released."""
    mechanism, algorithm, rule = experiment.privacy.component, experiment.local.component, experiment.rule
    private, by_samples, weights = mechanism.active, algorithm.sample_noise is not None, experiment.aggregate.weights
    protects, target = experiment.protects is not None, experiment.privacy.target_epsilon
    where, strategy = experiment.privacy.setting if private else experiment.local.setting, experiment.sampling.component
    if target is not None and not protects:
        yield (
            f"privacy.target_epsilon = {target:g}: nothing adds noise; set privacy.mechanism=central privacy.clip=1.0, "
            "or local.algorithm=dp_sgd"
        )
    if protects and experiment.task.params.get("class_weights") == "balanced":
        yield f'task.class_weights = "balanced": counts samples, which {where} must not reveal; write numbers instead'
    if protects and not experiment.in_rounds:
        yield f"{where}: needs synchronous rounds, which {experiment.policy.setting} does not have; use policy=sync"
    if private and experiment.rounds_of_gradients:
        yield f"{where}: protects updates, but with sync={experiment.sync} workers send gradients; use sync=parameters"
    if private and by_samples:
        yield f"{where}: protects workers, but {experiment.local.setting} protects samples; use only one of the two"
    if private and (algorithm.message(torch.zeros(2)) or isinstance(algorithm, CohortGradient)):
        yield (
            f"{experiment.local.setting}: workers send more than their updates, which {where} does not protect; use "
            "another client algorithm, such as sgd"
        )
    if protects and "losses" in strategy.accepts:
        yield f"{strategy.place}: uses losses of workers, which {where} does not protect; use sampling.name=uniform"
    if protects and rule.accepts("losses"):
        yield (
            f"aggregate.rule = {show(rule.name)}: uses losses of workers, which {where} does not protect; use "
            "aggregate.rule=mean"
        )
    elif mechanism.at_server and not rule.linear_by_weights:
        yield (
            f"aggregate.rule = {show(rule.name)}: must be a mean, because {where} adds noise to a sum; use "
            "aggregate.rule=mean, or privacy.mechanism=local"
        )
    elif mechanism.at_server and not rule.accepts("weight_total"):
        yield (
            f"aggregate.rule = {show(rule.name)}: must divide by its input `weight_total`, the expected number of "
            f"updates, because {where} hides their actual number; add this input, or use aggregate.rule=mean"
        )
    if mechanism.at_server and weights not in (None, "uniform"):
        yield f"aggregate.weights = {show(weights)}: must be uniform with {where}, which clips equally; omit it"
    elif mechanism.at_server and rule.needs_weights and weights is None:
        yield (
            f"{experiment.aggregate.setting}: weights workers by their samples, but {where} clips equally and needs "
            "equal weights; use aggregate.rule=mean, or add aggregate.weights=uniform"
        )
    if protects:
        yield from _check_private_stops(experiment, where)


def _check_private_stops(experiment: Settings, where: str) -> Iterator[str]:
    """Yield an error line for each setting under which private values of workers decide when the run ends.

    `where` is the setting that protects workers or their samples.
    """
    stop, labels = experiment.stop, [table.component.label for table in experiment.metrics]
    public = {"epsilon", *labels, *(f"validation_{label}" for label in labels)}  # the labels are those of test metrics
    is_private = stop.metric.startswith("metrics.") and stop.metric.removeprefix("metrics.") not in public
    if stop.active and (is_private or stop.metric in ("train_loss", "worker_accuracy", "worker_loss")):
        yield (
            f"stop.metric = {show(stop.metric)}: is not computed from test or validation samples, so the end of a run "
            f"would reveal values of workers that {where} does not protect; use stop.metric=test_loss"
        )
    if experiment.protects == "worker" and experiment.aggregate.nonfinite == "stop":
        yield (
            f'aggregate.nonfinite = "stop": the end of the run would depend on single updates, which {where} does not '
            "protect; use aggregate.nonfinite=exclude"
        )


def _check_secure(experiment: Settings) -> Iterator[str]:
    """Yield an error line for each setting that needs more than sums of updates, if `aggregate.secure` is set."""
    if not experiment.aggregate.secure:
        return
    attack, aggregate = experiment.attack, experiment.aggregate
    where, policy, strategy = "aggregate.secure = true", experiment.policy.setting, experiment.sampling.component
    if not experiment.in_rounds:
        yield f"{where}: needs sums of updates, but {policy} applies single updates; use policy=sync"
    elif not experiment.rule.linear_by_weights:
        yield (
            f"{where}: allows only sums, but the rule {experiment.rule.name} needs each update; use aggregate.rule=mean"
        )
    if aggregate.nonfinite == "exclude":
        yield f'{where}: the server sees no single update to exclude; use aggregate.nonfinite = "error"'
    if attack.count(experiment.workers) and (attack.component.needs_honest or "aggregate" in attack.component.accepts):
        yield (
            f"{where}: attackers see no updates of honest workers, which {attack.setting} needs; use an attack such as "
            "sign_flipping"
        )
    if "losses" in strategy.accepts:
        yield f"{where}: the server sees no losses of workers, which {strategy.place} needs; use sampling.name=uniform"
    for processor in experiment.processors:
        if not getattr(processor.registration.target, "sums", False):
            yield f"{where}: updates of the processor {processor.name} cannot be summed while encrypted; omit it"
    if experiment.processors and experiment.privacy.component.at_server:
        yield (
            f"{where}: the server cannot clip processed updates, which {experiment.privacy.setting} needs; omit "
            "processors"
        )
    if experiment.records.updates:
        yield f"{where}: the server sees no updates to record; omit records.updates"


def _check_policy(experiment: Settings, policy: Policy) -> Iterator[str]:
    """Yield an error line for each setting that the asynchronous `policy` does not support."""
    where, algorithm = experiment.policy.setting, experiment.local.component
    yield from _check_combination(experiment, policy)
    if experiment.cohort_size < experiment.workers and not (policy.allows_sampling and experiment.mode == "clock"):
        yield f"cohort = {experiment.cohort}: with mode={experiment.mode} and {where} all workers take part; omit it"
    if isinstance(algorithm, (UpdateCorrection, CohortGradient)) or algorithm.starts_from_current:
        yield (
            f"{experiment.local.setting}: needs rounds that aggregate a cohort, which {where} does not have; use "
            "policy=sync"
        )
    elif policy.work == "gradient" and needs_local_steps(algorithm):
        yield _needs_local_steps(experiment, where, "policy=sync")
    elif experiment.mode == "race" and exchanges(algorithm):
        yield (
            f"{experiment.local.steps_setting}: keeps worker state or exchanges more than parameters with the server, "
            "which a race does not support; use mode=clock"
        )
    if policy.needs_momentum and not algorithm.start(torch.zeros(1)):
        yield f"{where}: needs momentum; set local.momentum"


def _check_combination(experiment: Settings, policy: Policy) -> Iterator[str]:
    """Yield an error line for each setting of the rule or attack that the asynchronous `policy` does not support."""
    where, rule, attack, mode = experiment.policy.setting, experiment.rule, experiment.attack, experiment.mode
    alters = attack.component.alters_rows and attack.count(experiment.workers) > 0
    stages = [  # (setting, whether it is used, whether it keeps a state)
        (experiment.aggregate.setting, not rule.is_mean, rule.accepts("state")),
        (attack.setting, alters, "state" in attack.component.accepts),
    ]
    for setting, is_used, keeps_state in stages if mode == "race" else ():
        if is_used and policy.locking == "nothing":
            yield f"{setting}: needs a lock in a race, but {where} has none; use policy=locked or mode=clock"
        elif is_used and keeps_state:
            yield f"{setting}: keeps a state between updates, which a race does not support; use mode=clock"
    if mode == "race" and experiment.records.updates:
        log = " and, to repeat a race, clock.replay_log=RUN/race.csv" if policy.locking == "server" else ""
        yield f"records.updates: is not supported in a race; use mode=clock{log}"
    if rule.accepts("losses"):
        yield f"{experiment.aggregate.setting}: needs losses of a cohort, but {where} has no cohorts; use policy=sync"
    if policy.uses_topology and rule.accepts("root"):
        yield f"{experiment.aggregate.setting}: needs a server with samples, but {where} has no server; omit it"
    if alters and attack.knows == "buffer" and policy.sizes(experiment.cohort_size) == (1,):
        yield f'attack.knows = "buffer": {where} has no buffer, because it uses each result at once; use knows=latest'
    if alters and "aggregate" in attack.component.accepts and rule.accepts("models"):
        yield f"{attack.setting}: cannot be tuned against {rule.name}, which needs start models; use another attack"
    if alters and "weights" in attack.component.accepts and not policy.uses_topology:
        yield f"{attack.setting}: needs a policy on a graph, such as policy=d_psgd"
