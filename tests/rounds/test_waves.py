"""Large cohorts are trained in waves, and give the results of cohorts whose updates are all stored, up to rounding."""

from __future__ import annotations

import pytest
import torch

import fedsim
from fedsim import Callback, ExperimentError
from fedsim.config.load import load_experiment
from fedsim.engines import auto
from fedsim.errors import DivergedError, FedsimWarning
from fedsim.runs import checks
from fedsim.training import task as tasks
from tests.engines.test_contract import ALL_CASES, ATTACKED, ROUNDING, TOGETHER, assert_close, merged, without_times
from tests.lethal import order
from tests.waves import in_waves

TWO = {"processes": 2, "batched": {"stack_size": 2}}
MORE = {
    "a worker without weight, left out": {
        "attack": {"name": "nan", "workers": [1]},
        "aggregate": {"weights": [1.0, 0.0, 5.0], "nonfinite": "exclude"},
    },
    "attackers of each kind": {**ATTACKED, "attack": {"name": "sign_flipping", "fraction": 0.3}},
    "a whole cohort that does not report": {"workers": 5, "cohort": 3, "rounds": 4, "sampling.dropout_rate": 0.6},
    "workers on a clock": {"workers": 5, "cohort": 4, "mode": "clock", "clock": {"slowdown": "lognormal"}},
    "workers that are tested": {
        **{"workers": 5, "cohort": 3, "data.local_test_fraction": 0.3, "worker_evaluation": {"fine_tune": 1}},
        **{"local": {"algorithm": "ditto", "batch_size": 16}},
    },
    "local privacy": {"workers": 5, "privacy": {"mechanism": "local", "clip": 0.3, "noise": 0.1}},
    "residuals": {
        **{
            "workers": 5,
            "cohort": 3,
            "rounds": 3,
            "processors": [{"name": "top_k", "ratio": 0.1, "error_feedback": True}],
        }
    },
}
OWN = {**ALL_CASES, **MORE}


def is_added_up(names):
    tables = {"workers": 3, **merged(*names, cases=OWN)}
    return load_experiment(tables).stores_updates is None


LONG = {  # tested with `-m slow`
    *(
        "scaffold with full gradients",
        "virtual shards of uneven sizes, under attack",
        "workers with the highest losses",
    ),
    *("private updates, processed, under attack", "clipped gradients of samples", "a residual network", "one worker"),
    *("mimelite, samples seen differently", "features of normalised models", "accumulated gradients", "per_fedavg"),
    *("numbers that differ between workers", "a transformer with dropout", "a character LSTM", "apfl", "dropout"),
    *("low-rank adapters", "fednova", "given weights", "partial cohorts of uneven shards", "personal parameters first"),
}


def cases():
    """List combinations of cases in which sums of updates are enough, and with `-m slow` each case alone."""
    together = [names for names in [*TOGETHER, *((name,) for name in MORE)] if is_added_up(names)]
    alone = [(name,) for name in ALL_CASES if is_added_up((name,)) and (name,) not in together]
    slow = {*alone, *(names for names in together if names[0] in LONG)}
    return [
        pytest.param(names, marks=pytest.mark.slow if names in slow else (), id=" and ".join(names))
        for names in [*together, *alone]
    ]


@pytest.mark.parametrize("names", cases())
def test_waves_agree_with_all_updates_at_once(names, tiny_experiment, session):
    """Sums are rounded in the same way in one process and in two, one worker after another and in stacks."""
    tables = {**tiny_experiment, **merged(*names, cases=OWN), "precision": "float64"}
    stored = fedsim.run({**tables, "engine": "serial"})
    with in_waves():
        serial = fedsim.run({**tables, "engine": "serial"})
        processes = fedsim.run({**tables, "engine": "processes", "processes": 2}, session=session)
    assert_close(stored, serial, ROUNDING)
    assert_same(serial, processes)


@pytest.mark.parametrize(
    "names",
    [
        ("partial cohorts of uneven shards", "several local epochs", "buffers averaged"),
        ("scaffold", "processed updates"),
        ("ditto with BatchNorm",),
        ("worker state of rows left out", "rows left out in turn"),
        ("workers that are tested",),
    ],
)
def test_stacks_do_not_depend_on_the_number_of_processes(names, tiny_experiment, session):
    tables = {**tiny_experiment, **merged(*names, cases=OWN), "precision": "float64", "engine": "batched"}
    stored = fedsim.run({**tables, "engine": "serial"})
    with in_waves():
        alone = fedsim.run({**tables, **TWO, "processes": 1})
        two = fedsim.run({**tables, **TWO}, session=session)
    assert_close(stored, alone, ROUNDING)
    assert_same(alone, two)


def assert_same(ours, theirs):
    assert torch.equal(ours.global_row, theirs.global_row)
    assert without_times(ours.history) == without_times(theirs.history)
    for name, value in ours.model.state_dict().items():
        assert torch.equal(value, theirs.model.state_dict()[name]), name


class Shapes(Callback):
    """Callback that notes how many rows the run has, and how it says that it is computed."""

    def on_start(self, run):
        self.rows, self.how = len(run.engine.shared.cohort.rows), run.metadata.how


@pytest.mark.parametrize(
    ("engine", "rows"),
    [
        ({"engine": "serial"}, 1),
        ({"engine": "processes", "processes": 2}, 2),
        ({"engine": "batched", "processes": 1, "batched": {"stack_size": 3}}, 3),
        ({"engine": "batched", **TWO}, 4),
    ],
)
def test_there_are_as_many_rows_as_are_trained_at_once(engine, rows, tiny_experiment, session):
    shapes = Shapes()
    with in_waves():
        fedsim.run({**tiny_experiment, "workers": 9, "rounds": 1, **engine}, session=session, callbacks=[shapes])
    assert shapes.rows == rows


def test_the_choice_depends_on_the_size_of_all_updates_together(tiny_experiment, monkeypatch):
    tables, shapes = {**tiny_experiment, "rounds": 1, "model": "logistic"}, Shapes()
    nbytes = 3 * 4 * 7_850
    monkeypatch.setattr(tasks, "STORED_BYTES", nbytes)
    fedsim.run(tables, callbacks=[shapes])
    assert (shapes.rows, "updates" in shapes.how) == (3, False)
    monkeypatch.setattr(tasks, "STORED_BYTES", nbytes - 1)
    fedsim.run(tables, callbacks=[shapes])
    reason = "because all of them would take 94.2 kB"
    assert (shapes.rows, shapes.how["updates"]) == (1, f"updates are added up as workers finish, {reason}")
    fedsim.run({**tables, "aggregate": "median"}, callbacks=[shapes])
    reason = 'because of aggregate.rule = "median"'
    assert (shapes.rows, shapes.how["updates"]) == (3, f"all updates are stored (94.2 kB), {reason}")


def test_large_models_are_not_stacked_in_waves(tiny_experiment, monkeypatch):
    """A stack would not fit into the caches. Other runs of the session do not decide this."""
    monkeypatch.setattr(auto, "STACK_BYTES_ON_CPU", 0)
    tables, ways = {**tiny_experiment, "workers": 8, "rounds": 1, "engine": "auto", "processes": 1}, []
    with in_waves(), fedsim.Session() as session:
        for rule in ("mean", "median", "mean"):
            shapes = Shapes()
            fedsim.run({**tables, "aggregate": rule}, session=session, callbacks=[shapes])
            ways.append((shapes.how["engine"], shapes.rows))
    assert ways == [("serial", 1), ("batched", 8), ("serial", 1)]


@pytest.mark.parametrize(
    ("tables", "setting", "remedy"),
    [
        ({"aggregate": "krum"}, 'aggregate.rule = "krum"', "aggregate.rule=weighted_mean"),
        ({"aggregate": "tests.components:drawn_mean"}, "aggregate.rule = ", "aggregate.rule=weighted_mean"),
        ({"attack": {"name": "alie", "f": 1}}, 'attack.name = "alie"', "attack.name=label_flipping"),
        ({"attack": {"name": "sign_flipping", "of": "mean", "f": 1}}, 'attack.name = "sign_flipping"', "attack.name="),
        ({"attack": {"name": "gaussian", "f": 1}}, 'attack.name = "gaussian"', "attack.name=label_flipping"),
        ({"sync": "gradients"}, 'sync = "gradients"', "sync=parameters"),
        ({"local": {"algorithm": "mime"}}, 'local.algorithm = "mime"', "local.algorithm=scaffold"),
        ({"records": {"updates": [1]}}, "records.updates", r"records.updates=\[\]"),
    ],
)
def test_the_memory_error_names_what_needs_all_updates(tables, setting, remedy, monkeypatch, tiny_experiment):
    monkeypatch.setattr(checks, "free_memory", lambda: 1.0)
    monkeypatch.setattr(checks, "_check_parameters", lambda *arguments: None)
    table = {**tiny_experiment, "workers": 7, **tables}
    with (
        in_waves(),
        pytest.raises(
            ExperimentError, match=f", or {remedy}.*because {setting}.* needs the updates of all workers at once"
        ),
    ):
        fedsim.run(table)
    with pytest.raises(ExperimentError, match="or a smaller model$"):  # small updates are always stored
        fedsim.run(table)


@pytest.mark.parametrize(
    "attack",
    [{"name": "nan"}, {"name": "inf"}, {"name": "free_rider"}, {"name": "sign_flipping"}, {"name": "backdoor"}],
)
def test_attackers_that_look_at_nobody_are_trained_in_waves(attack):
    assert fedsim.Experiment(attack={**attack, "f": 1}).stores_updates is None


def test_a_dry_run_says_which_way_is_taken(cli):
    words = ["run", "--dry-run", "workers=40", "model.name=logistic"]
    with in_waves():
        first = cli(*words).stdout.splitlines()[0]
        assert first == "# updates are added up as workers finish, because all of them would take 1.26 MB"
        first = cli(*words, "aggregate.rule=median").stdout.splitlines()[0]
        assert first == '# all updates are stored (1.26 MB), because of aggregate.rule = "median"'
    assert "updates" not in cli(*words).stdout.splitlines()[0]


@pytest.mark.parametrize("nonfinite", ["error", "stop"])
def test_a_round_that_diverges_names_all_workers_and_changes_no_state(nonfinite, tiny_experiment):
    """The states of workers in earlier waves do not change either."""
    states = []

    class Look(Callback):
        def on_start(self, run):
            self.run = run

        def on_round(self, record):
            states.append(self.run.engine.states.tensors())

    tables = {
        **{**tiny_experiment, "workers": 7, "aggregate": {"nonfinite": nonfinite}},
        **{"attack": {"name": "nan", "workers": [1, 5], "start_round": 2}},
        "local": {"algorithm": "tests.components:Counting"},
    }
    with in_waves():
        if nonfinite == "error":
            with pytest.raises(DivergedError, match=r"2 of 7 updates contain NaN or infinity \(from workers 1, 5\)"):
                fedsim.run(tables)
            return
        result = fedsim.run(tables, callbacks=[Look()])
    assert "from workers 1, 5" in result.history[1].diverged
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_run_is_resumed_with_the_same_bits(tiny_experiment, tmp_path):
    """The resumed part has two processes, and keeps worker states in files."""
    tables = {**tiny_experiment, "workers": 5, "cohort": 3, "local": {"algorithm": "scaffold"}}
    tables |= {"checkpoint": {"every": 1}}
    more = {"engine": "processes", "processes": 2, "worker_state_memory": 1}
    with in_waves():
        whole = fedsim.run({**tables, "rounds": 4})
        fedsim.run({**tables, "rounds": 2}, tmp_path / "run")
        assert_same(whole, fedsim.run({**tables, **more, "rounds": 4}, tmp_path / "run", resume=True))


def test_a_round_that_loses_a_process_is_repeated_from_the_old_states(tiny_experiment, tmp_path):
    tables = {
        **{**tiny_experiment, "workers": 5, "model": {"name": "tests.lethal:Mortal", "folder": str(tmp_path)}},
        **{"local": {"algorithm": "scaffold"}, "engine": "processes", "processes": 2},
    }

    class Kill(Callback):
        def on_round(self, record):
            if record.round == 1:
                order(tmp_path, "train")

    with in_waves():
        expected = fedsim.run({**tables, "engine": "serial", "processes": None})
        with pytest.warns(FedsimWarning, match="round 2 is repeated"):
            repeated = fedsim.run(tables, callbacks=[Kill()])
    assert_same(expected, repeated)
