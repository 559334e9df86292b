"""Classes and functions that are not valid client algorithms or schedules raise a one-line error."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import fedsim


def no_scheduler(optimizer):
    return optimizer


@dataclass(frozen=True)
class Rateless:
    """A client algorithm without a learning rate."""

    def start(self, rows):
        return {}

    def step(self, rows, gradients, state):
        rows.sub_(gradients)


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
    tables = {**tiny_experiment, "engine": engine, "processes": 1, "local": {"algorithm": Forgetful}}
    line = r"`finish` returned the messages \['first'\], but `message` declares \['first', 'second'\]"
    with pytest.raises(fedsim.ExperimentError, match=line.replace("'", '"')):
        fedsim.run(tables)
