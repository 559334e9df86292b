from __future__ import annotations

import contextlib
import math
from collections import Counter
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import fedsim
from fedsim.asynchronous.policies import policy
from fedsim.asynchronous.race.state import Measures, RaceState
from fedsim.asynchronous.race.worker import LockedRaceWorker, ProcessResult
from fedsim.asynchronous.round_stats import RoundStats
from fedsim.core.randomness import batch_order, draw_key
from fedsim.core.rows import Layout
from fedsim.processes.process_pool import ProcessPool
from fedsim.records.record import AsyncRecord
from fedsim.rounds.evaluation import EvaluationResult
from fedsim.runs.loops.race_loop import RaceRoundResult, _race_record
from tests import components
from tests.asynchronous import race_components

COMPONENTS = "tests.asynchronous.race_components"
PARAMETERS = {
    "k_sync": {"k": 2},
    "k_async": {"k": 2},
    "basgd": {"b": 2},
    "easgd": {"alpha": 0.3, "period": 2},
    "eamsgd": {"alpha": 0.3, "period": 2},
    "fedasync": {"alpha": 0.5},
}
RACING = [registration.name for registration in policy if not registration.target.in_rounds]


@pytest.fixture(scope="module")
def session_of_one():
    """Yield a session that keeps one process."""
    with fedsim.Session() as session:
        yield session


def race(session, name, out=None, **changes):
    """Run a short race of three workers and return the result."""
    parameters = PARAMETERS.get(name, {})
    tables = {
        "mode": "race",
        "workers": 3,
        "rounds": 1,
        "model": "logistic",
        "data": "tests.components:tiny",
        "local": {"batch_size": 16, "lr": 0.05},
        "race": {"runs": 1},
        "policy": {"name": name, **parameters},
        "records": {"figures": []},
    }
    return fedsim.run({**tables, **changes}, out, session=session)


@pytest.mark.parametrize(
    "name",
    [name if place % 3 == 0 else pytest.param(name, marks=pytest.mark.slow) for place, name in enumerate(RACING)],
)
def test_every_policy_learns(session, name):
    local = {"batch_size": 40, "lr": 0.1, "momentum": 0.5 if name == "eamsgd" else 0.0}
    result = race(session, name, data="mnist5k", rounds=3, local=local)
    assert result.test_accuracy > 0.75
    for record in result.history:
        measured, asynchronous = record["race"], record["asynchronous"]
        assert measured["updates"] == sum(asynchronous["staleness"].values()) or name in ("easgd", "eamsgd")
        if not policy.get(name).target.cancels:  # a worker whose work is always cancelled is in no cohort
            assert record["cohort"] == [0, 1, 2]
        assert all(value > 0 for value in measured["samples_per_second"])
        if name != "hogwild":
            assert measured["updates_lost"] == measured["overlapped_gradients"] == 0
            assert measured["locks_taken"] > 0
    if not any(record["race"]["held_back"] for record in result.history):
        assert [sum(record["samples"]) for record in result.history] == [4000] * 3


def test_records_are_means_over_runs_and_the_model_is_of_the_first_run(session, tmp_path):
    result = race(session, "hogwild", tmp_path / "run", race={"runs": 3}, rounds=2, local={"batch_size": 4, "lr": 0.2})
    for record in result.history:
        measured = record["race"]
        accuracies = measured["test_accuracies"]
        assert record["test_accuracy"] == fmean(accuracies)
        assert record["test_loss"] == fmean(measured["test_losses"])
        assert record["train_loss"] == pytest.approx(fmean(measured["train_losses"]))
        s = math.sqrt(sum((value - fmean(accuracies)) ** 2 for value in accuracies) / 2)
        assert measured["test_accuracy_half_width"] == pytest.approx(4.302653 * s / math.sqrt(3))
        assert (measured["runs"], record["virtual_seconds"]) == (3, None)
        assert measured["updates"] == 3 * (17 + 17 + 17)
        assert record["samples"] == [68, 68, 67]
        assert record["bytes_up"] == record["bytes_down"] == 51 * 7850 * 4
    assert [record["asynchronous"]["updates"] for record in result.history] == [51, 102]
    _, test = components.tiny(None)
    inputs, targets = test.gather(torch.arange(len(test)))
    accuracy = (result.model(inputs).argmax(1) == targets).float().mean().item()
    assert accuracy == pytest.approx(result.history[-1]["race"]["test_accuracies"][0])
    assert not (tmp_path / "run" / "race.csv").exists()  # without locks the order of updates is unknown


def test_each_run_continues_from_its_own_state(session):
    """The result of FedBuff with all workers does not depend on their order, so both runs have the same losses."""
    result = race(session, "fedbuff", race={"runs": 2}, rounds=3)
    for record in result.history:
        first, second = record["race"]["test_losses"]
        assert first == pytest.approx(second, rel=1e-6)
    assert result.history[0]["test_loss"] != result.history[1]["test_loss"] != result.history[2]["test_loss"]


@pytest.mark.parametrize("sparse", [False, True])
def test_workers_with_disjoint_embedding_rows_compute_the_sequential_result(session, sparse):
    tables = {
        "data": f"{COMPONENTS}:disjoint_texts",
        "model": {"name": f"{COMPONENTS}:Bag", "sparse": sparse},
        "partition": f"{COMPONENTS}:in_thirds",
        "local": {"batch_size": 3, "lr": 0.5, "epochs": 3},
    }
    raced = race(session, "hogwild", **tables).global_row
    train, _ = race_components.disjoint_texts(None)
    model = race_components.Bag()
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(draw_key(0, "model"))
        model.embedding.reset_parameters()
    start = model.embedding.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for worker in range(3):
        for epoch in range(3):
            positions = batch_order(0, 1, worker, epoch, 20) + 20 * worker
            for batch in positions.split(3):
                optimizer.zero_grad()
                F.cross_entropy(model(train.inputs[batch]), train.targets[batch]).backward()
                optimizer.step()
    assert torch.equal(raced, Layout.of(model).read(model))
    assert not torch.equal(raced, start.flatten())


@pytest.mark.parametrize(("rounds", "buffered", "updates"), [(1, 1, 1), (2, 0, 3)])
def test_buffered_results_stay_for_the_next_round(session, rounds, buffered, updates):
    record = race(session, "fedbuff", policy={"name": "fedbuff", "k": 2}, rounds=rounds).history[-1]
    assert record["asynchronous"]["buffered"] == buffered
    assert record["asynchronous"]["updates"] == updates


@pytest.mark.parametrize("name", ["k_sync", "k_async"])
def test_a_held_back_worker_catches_up_in_the_next_round(session, name):
    """A round has 15 steps, which is odd, and an update takes two gradients."""
    history = race(session, name, rounds=3).history
    done = 0
    for round, record in enumerate(history, 1):
        done += record["race"]["updates"]
        assert record["race"]["held_back"] <= 1
        assert 10 * round <= done <= 15 * round  # if one worker is held back, the other two have finished
        assert record["asynchronous"]["updates"] * 2 + record["asynchronous"]["buffered"] == done


def test_workers_with_fewer_steps_do_not_block_others(session):
    tables = {"partition": "tests.components:uneven", "local": {"batch_size": 8, "lr": 0.05}}
    for chosen_policy in ({"name": "ssp", "s": 0}, {"name": "easgd", "synchronous": True, "period": 1}):
        record = race(session, chosen_policy["name"], policy=chosen_policy, **tables).history[0]
        assert record["samples"] == [33, 68, 102]
        assert record["race"]["held_back"] == record["asynchronous"]["buffered"] == 0


ALONE = [
    *(("hogwild", "tests.models:Normalised", buffers) for buffers in ("average", "local", "frozen")),
    *((name, "net", "average") for name in ("hogwild", "gossip", "ad_psgd")),  # the model has dropout
]


@pytest.mark.parametrize(("name", "model", "buffers"), ALONE)
def test_one_worker_alone_is_bit_identical_to_the_clock(session_of_one, name, model, buffers):
    """Policies without server locks are bit-identical to the clock; the clock replays the races of all others."""
    tables = {"workers": 1, "model": model, "buffers": buffers, "policy": name, "rounds": 2}
    tables = {**tables, "data": "tests.components:tiny", "local": {"batch_size": 16, "lr": 0.05, "momentum": 0.5}}
    on_clock = fedsim.run({**tables, "mode": "clock", "engine": "serial"})
    raced = race(session_of_one, name, **tables)
    state = raced.model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in on_clock.model.state_dict().items())
    losses = [record.train_loss for record in on_clock.history]
    assert [record.train_loss for record in raced.history] == pytest.approx(losses, rel=1e-6)


def test_a_model_that_replaces_its_parameters_is_an_error():
    with pytest.raises(fedsim.ExperimentError, match=r"model: replaces the data of linear\.weight during training"):
        race(None, "hogwild", model="tests.models:LetsGo", workers=1)


def test_a_policy_that_never_starts_a_worker_is_an_error():
    with pytest.raises(fedsim.ExperimentError) as caught:
        race(None, f"{COMPONENTS}:NeverStarting", workers=1)
    assert caught.value.lines == (
        "policy: the race cannot continue in round 1, because no worker is busy and the policy lets no worker start; "
        "use another policy",
    )


def test_staleness_and_overlaps_of_two_scripted_processes(tmp_path):
    """Worker 0 takes 3 steps and worker 1 takes 4, in an order that the script determines.

    A worker reads the counters just before the point `in` and just after the point `out`. Points that stand together
    in the script keep other workers away from these moments, and from the moments before `write` and after `written`.
    """
    script = [
        "in0 in1",
        "out0 write0",  # worker 0, step 0: nobody has written
        "written0 in0",
        "out1 write1",  # worker 1, step 0: one update since it began
        "written1 in1",
        "out0 write0",  # worker 0, step 1: one update
        "out1 write1",  # worker 1, step 1: no update, but worker 0 is writing
        "written1 in1",
        "written0 in0",
        "out1 write1",  # worker 1, step 2: the write that was in progress when it began has ended
        "written1 in1",
        "out1 write1",  # worker 1, step 3: nobody has written
        "out0 write0",  # worker 0, step 2: one update, and another write in progress
        "written0 written1",
    ]
    record = scripted_race(tmp_path, "ScriptedHogwild", script, steps=[3, 4])
    assert record["asynchronous"]["staleness"] == {"0": 3, "1": 4}
    assert record["race"]["overlapped_gradients"] == 5 / 7
    assert record["race"]["updates"] == record["asynchronous"]["updates"] == 7
    assert record["samples"] == [6, 8]


def test_staleness_of_two_scripted_processes_with_locks(tmp_path):
    """An exchange is as stale as the number of exchanges since the worker began, which is 2 for the last one."""
    exchanges = [f"out{worker} write{worker} written{worker}" for worker in (0, 1, 1, 0, 0)]
    script = ["in0 in1", exchanges[0], "in0", exchanges[1], "in1", exchanges[2], exchanges[3], "in0", exchanges[4]]
    record = scripted_race(tmp_path, "ScriptedGossip", script, steps=[3, 2])
    assert record["asynchronous"]["staleness"] == {"0": 3, "1": 1, "2": 1}
    assert record["race"]["updates_lost"] == record["race"]["overlapped_gradients"] == 0
    assert record["race"]["updates"] == 5


def scripted_race(folder, policy, script, steps):
    """Return the record of a race of two workers, which pass the points of their script in order."""
    where = race_components.Script.write(folder, script)
    return race(
        None,
        policy,
        **{"workers": 2, "model": {"name": f"{COMPONENTS}:Scripted", **where}, "process_timeout": 60.0},
        **{"data": f"{COMPONENTS}:worker_ids", "partition": f"{COMPONENTS}:in_halves"},
        **{"policy": {"name": f"{COMPONENTS}:{policy}", **where}, "local": {"steps": steps, "batch_size": 2}},
    ).history[0]


def test_lost_updates_are_counted():
    race_state = RaceState(2, torch.device("cpu"))
    with ProcessPool(2) as pool:
        counts = pool.call(race_components.count_updates, race_state, 1000, True)
        assert race_state.lost() == 0
        assert float(race_state.loss_counters[0, 0]) == 2000
        assert all(taken == 1000 >= waited for taken, waited in counts)
        for _ in range(200):  # a single attempt nearly always suffices
            pool.call(race_components.count_updates, race_state, 1000, False)
            if race_state.lost():
                break
    assert 0 < race_state.lost() < 1000 * 200


def test_lost_updates_are_the_additions_that_are_missing_from_the_counters():
    race_state = RaceState(2, torch.device("cpu"))
    race_state.add(0)
    race_state.add(1, (1, 0))  # a pair of workers has two counters
    assert race_state.lost() == 0
    race_state.loss_counters[0, :16] -= 1.0  # a quarter of an update is overwritten
    assert race_state.lost() == 0.25


def test_a_lock_that_another_process_holds_is_counted_once():
    with ProcessPool(2) as pool:
        (taken, waited, seconds), contended = pool.call(race_components.contend, RaceState(2, torch.device("cpu")))
    assert (taken, waited, seconds) == (2, 0, 0.0)
    assert contended[:2] == (1, 1)
    assert contended[2] > 0


def test_a_race_measures_the_seconds_of_a_step(monkeypatch):
    """A round of 4 steps that takes 2 seconds counts 0.5 seconds per step. They set the steps of `async_local_sgd`."""
    moments = iter([10.0, 12.0])
    monkeypatch.setattr("fedsim.asynchronous.race.worker.time", SimpleNamespace(perf_counter=lambda: next(moments)))
    worker = object.__new__(LockedRaceWorker)
    worker._dispatcher = SimpleNamespace(train=lambda slots: None, scheduler=SimpleNamespace(steps=lambda item: 4))
    worker._server, worker._round = SimpleNamespace(step_seconds=torch.ones(3)), 1
    worker._process = SimpleNamespace(working_on=lambda *place: contextlib.nullcontext())
    worker._locked, worker._may_start = lambda *slots: contextlib.nullcontext(), lambda slot: True
    worker._start = worker._partner = lambda slot: ()
    worker._arrive = lambda item, partner: None
    assert worker._work(1)
    assert worker._server.step_seconds.tolist() == [1.0, 0.5, 1.0]


def test_a_record_adds_the_measurements_of_processes_and_repetitions():
    def result(lost, accuracy, *processes):
        work = ProcessResult()
        for samples, measures in processes:
            work.add(ProcessResult(RoundStats(Counter(samples), loss_sum=6.0, loss_samples=3), Measures(*measures)))
        return RaceRoundResult(work, lost, AsyncRecord(), EvaluationResult(test_loss=1.0, test_accuracy=accuracy))

    first = result(1.5, 0.5, ({0: 30}, (4, 3, 10, 2, 0.5, 1, 2.0)), ({1: 10}, (2, 1, 6, 2, 0.25, 0, 5.0)))
    second = result(0.5, 0.75, ({0: 20, 1: 10}, (2, 0, 4, 1, 0.25, 1, 4.0)))
    record = _race_record([first, second])
    assert record.samples_per_second == [40 / 5.0, 30 / 4.0]  # a round lasts as long as in its slowest process
    assert record.train_losses == [2.0, 2.0]
    assert (record.runs, record.test_accuracies) == (2, [0.5, 0.75])
    assert (record.updates, record.updates_lost, record.lost_fraction) == (8, 2.0, 0.25)
    assert record.overlapped_gradients == 4 / 8
    assert (record.locks_taken, record.lock_contention, record.lock_seconds) == (20, 5 / 20, 1.0)
    assert record.held_back == 2


def test_the_first_line_of_output_warns_that_a_race_is_not_repeatable(cli):
    words = ("mode=race", "policy=locked", "workers=1", "model=logistic", "data=tests.components:tiny", "rounds=1")
    done = cli("run", *words, "race.runs=2", "records.figures=[]", "--out", "here")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0] == (
        "a race is not repeatable: numbers are means over 2 repetitions, and the model is that of the first one"
    )
