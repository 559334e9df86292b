"""Keys of [local] and of schedules that have no meaning in an experiment give a one-line error."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import fedsim

CLOCK = {"mode": "clock", "policy": "asgd"}
RACE = {"mode": "race", "policy": "fedasync", "engine": "processes"}
AT_WORKER = {"momentum_at": "worker", "momentum": 0.9}
BY_STEP = {"name": "cosine", "per": "step"}


def no_scheduler(optimizer):
    return optimizer


@dataclass(frozen=True)
class Rateless:
    """A client algorithm without a learning rate."""

    def start(self, rows):
        return {}

    def step(self, rows, gradients, state):
        rows.sub_(gradients)


def of_local(**keys):
    return {"local": keys}


def scheduled(schedule, **keys):
    return {"local": {"schedule": schedule, **keys}}


KEPT = of_local(algorithm="adam", keep_optimizer_state=True)
REFUSED = [
    (of_local(nesterov=True), "local.nesterov = true: needs local.momentum > 0"),
    (of_local(nesterov=True, dampening=0.9, momentum=0.9), "local.nesterov = true: needs local.dampening = 0"),
    (of_local(mu=0.1), "local.mu = 0.1: unknown key (the client algorithm is sgd); mu is a parameter of fedprox"),
    (of_local(algorithm="adam", momentum=0.9), "client algorithm is adam); momentum is a parameter of apfl, ditto, "),
    # kept state
    ({**KEPT, "sync": "gradients"}, "local.keep_optimizer_state = true: needs local steps"),
    ({**KEPT, **RACE}, "local.keep_optimizer_state = true: keeps worker state"),
    (of_local(keep_optimizer_state=True), "local.keep_optimizer_state = true: the client algorithm has no state"),
    (
        of_local(algorithm="fedprox", keep_optimizer_state=True),
        "local.keep_optimizer_state = true: only works with client algorithms such as sgd and adam",
    ),
    # momentum of the workers
    (of_local(**AT_WORKER), 'local.momentum_at = "worker": is only used with sync=gradients, not with sync=parameters'),
    ({**of_local(**AT_WORKER), **CLOCK}, 'needs sync=gradients, which policy.name = "asgd" does not support'),
    (
        {**of_local(**AT_WORKER), "sync": "gradients", "aggregate": "fltrust"},
        "compares worker gradients with a server gradient",
    ),
    ({**of_local(momentum_at="worker"), "sync": "gradients"}, 'momentum_at = "worker": needs local.momentum > 0'),
    ({**of_local(**AT_WORKER, nesterov=True), "sync": "gradients"}, "nesterov = true: needs local.momentum_at=server"),
    # local work
    (of_local(epochs=[1, 2]), "local.epochs = [1, 2]: must be 4 numbers, one per worker, not 2"),
    (of_local(epochs={"uniform": [5, 1]}), "with low <= high"),
    (of_local(steps={"choice": []}), "must be a number, a list with one number per worker, {uniform"),
    ({**of_local(steps=[1, 2, 3, 1]), "aggregate": "fltrust"}, "the server also trains; use one number for all"),
    ({**of_local(steps={"choice": [1, 2]}), **CLOCK}, "because workers send every gradient; use one number"),
    # numbers that differ between workers
    (of_local(lr=[0.1, -0.1]), "local.lr = -0.1: must be greater than or equal to 0"),
    (of_local(lr=-1), "local.lr = -1: must be greater than or equal to 0"),
    (of_local(lr=[0.1, 0.2]), "local.lr = [0.1, 0.2]: must be 4 numbers, one per worker, not 2"),
    (of_local(lr={"uniform": 0.2}), "local.lr = {uniform = 0.2}: must be a number, a list with one number per worker"),
    (of_local(lr={"uniform": [1, 2], "choice": [1]}), "must be a number, a list with one number per worker, {uniform"),
    (of_local(lr={}), "local.lr = {}: must be a number, a list with one number per worker, {uniform"),
    (of_local(momentum={"choice": [0.5, 1]}), "local.momentum = 1: must be less than 1"),
    (of_local(momentum={"uniform": [0.0, 0.5]}, nesterov=True), "local.nesterov = true: needs local.momentum > 0"),
    (of_local(algorithm="scaffold", lr={"uniform": [0.0, 0.5]}), "local.lr = 0.0: must be greater than 0"),
    (of_local(clip_norm={"low": [1.0]}), "{choice = [n, ...]} or a function of (worker, round)"),
    (of_local(batch_size=lambda client: 1), "fedsim does not pass the argument client, only worker, round"),
    (
        {**of_local(lr={"choice": [0.1]}), "sync": "gradients"},
        "with sync=gradients all steps have the same lr; use one",
    ),
    ({**of_local(momentum=[0.1] * 4), **CLOCK}, '"asgd" all steps have the same momentum; use one number for all'),
    (
        {**of_local(lr=[0.1] * 4), "aggregate": "qfedavg"},
        "the rule qfedavg needs one learning rate; use one number for all",
    ),
    (
        of_local(algorithm="dp_sgd", epochs=lambda worker, round: 1),
        "but privacy depends on the largest number; use one number for all",
    ),
    ({**of_local(accumulation_steps=2), "sync": "gradients"}, "the gradients of each batch are averaged; use a larger"),
    (
        {**of_local(accumulation_steps=2), **CLOCK, "policy": "fedasync"},
        "only works with synchronous rounds; use a larger",
    ),
    (of_local(accumulation_steps=2, algorithm="fedsam"), "computes several gradients per batch; use a larger"),
    # learning rates
    (scheduled({"name": "constant", "factor": 0.5}), "local.schedule.total_iters = 0: "),
    ({"server": {"schedule": {"factor": 0.5, "warmup": 2}}}, "server.schedule.total_iters = 0: "),
    (scheduled({"name": "one_cycle", "total_steps": 5}), "local.schedule.total_steps = 5: must be at least 6, so that"),
    (scheduled({"name": "one_cycle", "warmup": 2}), "local.schedule.warmup = 2: one_cycle begins"),
    (scheduled({"warmup": 6}), "local.schedule.warmup = 6: must be less than 6, the number of rounds"),
    (scheduled(BY_STEP), "local.schedule.T_max: is required"),
    ({"server": {"name": "bmuf", "schedule": "cosine"}}, "server.schedule: needs a learning rate "),
    ({**scheduled("cosine"), **CLOCK, "policy": "fedasync"}, "local.schedule: does not apply to asynchronous"),
    ({**scheduled(BY_STEP, steps=2), "aggregate": "qfedavg"}, 'per = "step": "qfedavg" needs one learning rate'),
    (scheduled({"name": f"{__name__}:no_scheduler"}), "local.schedule.name: the function must return a scheduler"),
    (scheduled("cosine", algorithm=f"{__name__}:Rateless"), "local.schedule: needs a learning rate `lr`, which"),
    # algorithms
    *(
        ({**of_local(algorithm=algorithm), **changes}, f'local.algorithm = "{algorithm}": ')
        for algorithm, changes in (
            *(("fedsam", {"sync": "gradients"}), ("per_fedavg", CLOCK), ("ditto", RACE), ("mimelite", RACE)),
            *((name, {**CLOCK, "policy": "fedasync"}) for name in ("fednova", "feddyn", "mime", "pfedme")),
        )
    ),
]


@pytest.mark.parametrize(("tables", "line"), REFUSED, ids=[line for _, line in REFUSED])
def test_what_has_no_meaning_is_refused_in_one_line(tables, line):
    with pytest.raises(fedsim.ExperimentError) as caught:
        fedsim.Experiment(**{"workers": 4, "rounds": 6, **tables})
    assert line in str(caught.value)
    assert len(caught.value.lines) == 1


@dataclass(frozen=True)
class Correcting(fedsim.clients.SGD):
    def correct(self, update, server, workers, population):
        update.mul_(2)


@dataclass(frozen=True)
class Keeping(Rateless):
    def worker_state(self, row):
        return {"kept": row}


@dataclass(frozen=True)
class Stepless(fedsim.clients.ClientAlgorithm):
    lr: float = 0.1


@dataclass(frozen=True)
class OnRows(Stepless):
    element_wise = False


@dataclass(frozen=True)
class Personal(fedsim.clients.SGD, fedsim.clients.PersonalModel):
    pass


@dataclass(frozen=True)
class Unrelated:
    lr: float = 0.1


@pytest.mark.parametrize(
    ("algorithm", "line"),
    [
        (Correcting, "the class defines correct; derive it from fedsim.clients.UpdateCorrection"),
        (Keeping, "the class defines worker_state; derive it from fedsim.clients.ClientAlgorithm"),
        (Stepless, "the client algorithm must define step"),
        (OnRows, "the client algorithm must define step_rows"),
        (Personal, "the client algorithm must define personal_rows"),
        (Unrelated, "a client algorithm must be a dataclass that derives from fedsim.clients.ClientAlgorithm, or a .*"),
    ],
)
def test_a_class_without_a_base_class_or_a_method_is_refused_in_one_line(algorithm, line):
    abstract = algorithm is Personal  # has no objects
    for target in (algorithm,) if abstract else (algorithm, algorithm()):
        with pytest.raises(fedsim.ExperimentError, match=f"cannot be used: {line}$") as caught:
            fedsim.Experiment(local={"algorithm": target})
        assert len(caught.value.lines) == 1


@dataclass(frozen=True)
class Corrected(fedsim.clients.SGD, fedsim.clients.UpdateCorrection):
    """SGD whose updates the server corrects."""


def test_gradients_are_not_corrected():
    with pytest.raises(fedsim.ExperimentError, match="sync=gradients|sync = .gradients"):
        fedsim.Experiment(local={"algorithm": Corrected}, sync="gradients")
    fedsim.Experiment(local={"algorithm": Corrected})


@dataclass(frozen=True)
class Forgetful(fedsim.clients.SGD):
    def message(self, row):
        return {"first": row.new_zeros(1), "second": row.new_zeros(1)}

    def finish(self, rows, state, worker):
        return {"first": rows[..., :1]}


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_a_message_that_is_left_out_is_an_error(tiny_experiment, engine):
    """Otherwise the server would add up what a worker of an earlier round has sent."""
    tables = {**tiny_experiment, "engine": engine, "local": {"algorithm": Forgetful}}
    line = r"`finish` returned the messages \['first'\], but `message` declares \['first', 'second'\]"
    with pytest.raises(fedsim.ExperimentError, match=line.replace("'", '"')):
        fedsim.run(tables)
