"""Engines of users: subclasses of `Engine`, which an experiment names by import path."""

import pytest

import fedsim
from fedsim.config.engines import EngineTraits
from fedsim.engines import Engine
from fedsim.errors import ExperimentError
from fedsim.training.sequential import RowTrainer


class InPool(Engine):
    traits = EngineTraits(frozenset({"processes"}), pool_from=2)


class Reversed(RowTrainer):
    """Trainer that begins with the last worker."""

    def train(self, members, meanwhile=lambda: None):
        super().train(members[::-1], meanwhile)


class OwnTrainers(InPool):
    def trainers(self, task, shared):
        return Reversed, {"order": "reversed"}


class FewerArguments(Engine):
    def __init__(self, processes, threads):
        super().__init__(processes, threads, timeout=300.0, start_method="fork")


class NoTraits(Engine):
    traits = None


class OnlyTraits:
    traits = EngineTraits()


class Following(fedsim.Callback):
    def on_start(self, run):
        self.metadata = run.engine.metadata()


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("engine", [InPool, OwnTrainers])
def test_an_own_engine_equals_serial(tiny_experiment, engine, processes):
    path, following = f"{__name__}:{engine.__name__}", Following()
    result = fedsim.run(tiny_experiment, engine=path, processes=processes, callbacks=[following])
    assert following.metadata["processes"] == processes
    assert ("start_method" in following.metadata) == (processes == 2)
    assert ("order" in following.metadata) == (engine is OwnTrainers)
    assert result.global_row.equal(fedsim.run(tiny_experiment, engine="serial").global_row)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "FewerArguments",
            r"the constructor of FewerArguments must take \(processes, threads, timeout, start_method\)",
        ),
        ("NoTraits", "the attribute traits of an engine must be a fedsim.config.engines.EngineTraits"),
        ("OnlyTraits", "an engine must be a class that derives from fedsim.engines.Engine"),
        ("test_an_own_engine_equals_serial", "an engine must be a class that derives from fedsim.engines.Engine"),
    ],
)
def test_what_cannot_be_an_engine_is_refused_in_one_line(name, line):
    with pytest.raises(ExperimentError, match=f'^engine = "{__name__}:{name}": cannot be used: {line}$'):
        fedsim.load_experiment(engine=f"{__name__}:{name}")
