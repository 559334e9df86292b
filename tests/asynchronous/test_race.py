from __future__ import annotations

import math
from statistics import fmean

import pytest
import torch
import torch.nn.functional as F

import fedsim
from fedsim.asynchronous.policies import policy
from fedsim.asynchronous.track import Track
from fedsim.engines.crew import Crew
from fedsim.randomness import batch_order, draw_key
from fedsim.rows import Layout
from tests import plugs
from tests.asynchronous import racing_plugs

PLUGS = "tests.asynchronous.racing_plugs"
PARAMETERS = {
    "k_sync": {"k": 2},
    "k_async": {"k": 2},
    "easgd": {"alpha": 0.3, "period": 2},
    "eamsgd": {"alpha": 0.3, "period": 2},
    "fedasync": {"alpha": 0.5},
}
RACING = [plug.name for plug in policy if not plug.target.in_rounds]


@pytest.fixture(scope="module")
def workshop():
    """Three processes, one for each of three workers, kept from test to test."""
    with fedsim.Workshop() as workshop:
        yield workshop


@pytest.fixture(scope="module")
def workshop_of_one():
    """The process of a worker that races alone."""
    with fedsim.Workshop() as workshop:
        yield workshop


def race(workshop, name, out=None, **changes):
    """A short race of three workers."""
    given = PARAMETERS.get(name, {})
    tables = {
        "mode": "race",
        "workers": 3,
        "rounds": 1,
        "model": "logistic",
        "data": "tests.plugs:tiny",
        "local": {"batch_size": 16, "lr": 0.05},
        "race": {"runs": 1},
        "policy": {"name": name, **given},
    }
    return fedsim.run({**tables, **changes}, out, workshop=workshop)


@pytest.mark.parametrize("name", RACING)
def test_every_policy_ends_its_rounds_and_learns(workshop, name):
    local = {"batch_size": 40, "lr": 0.1, "momentum": 0.5 if name == "eamsgd" else 0.0}
    result = race(workshop, name, data="mnist5k", rounds=2, local=local)
    assert result.test_accuracy > 0.75
    for record in result.history:
        measured, asynchronous = record["race"], record["asynchronous"]
        assert measured["updates"] == sum(asynchronous["staleness"].values()) or name in ("easgd", "eamsgd")
        if not policy.get(name).target.cancels:  # else whoever is late for everything has done nothing
            assert record["cohort"] == [0, 1, 2]
        assert all(value > 0 for value in measured["samples_per_second"])
        if name != "hogwild":
            assert measured["updates_lost"] == measured["torn_reads"] == 0
            assert measured["locks_taken"] > 0
    if not any(record["race"]["held_back"] for record in result.history):
        assert [sum(record["samples"]) for record in result.history] == [4000, 4000]


def test_the_record_tells_of_all_runs_and_the_model_is_the_first_ones(workshop, tmp_path):
    result = race(workshop, "hogwild", tmp_path / "run", race={"runs": 3}, rounds=2, local={"batch_size": 4, "lr": 0.2})
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
    _, test = plugs.tiny(None)
    inputs, targets = test.gather(torch.arange(len(test)))
    accuracy = (result.model(inputs).argmax(1) == targets).float().mean().item()
    assert accuracy == pytest.approx(result.history[-1]["race"]["test_accuracies"][0])
    assert not (tmp_path / "run" / "race.csv").exists()  # without locks there is no order to be told


def test_runs_go_on_from_where_they_were_themselves(workshop):
    """A policy of which all orders come to the same shows that nothing of one run is left to the other."""
    result = race(workshop, "fedbuff", race={"runs": 2}, rounds=3)
    for record in result.history:
        first, second = record["race"]["test_losses"]
        assert first == pytest.approx(second, rel=1e-6)
    assert result.history[0]["test_loss"] != result.history[1]["test_loss"] != result.history[2]["test_loss"]


def test_increments_under_the_lock_are_exact_and_without_it_are_not(workshop):
    """However long it takes from the reading to the writing."""
    locked = race(workshop, f"{PLUGS}:Counting").history[0]
    assert locked["asynchronous"]["held"] == locked["race"]["updates"] == 15
    unlocked = race(workshop, f"{PLUGS}:CountingWithoutLock", local={"batch_size": 4}).history[0]
    assert unlocked["race"]["updates"] == 51
    assert unlocked["asynchronous"]["held"] < 51


def test_shared_rows_keep_their_address_to_the_end(workshop):
    race(workshop, "hogwild", model=f"{PLUGS}:Pinned", rounds=2, race={"runs": 2})


@pytest.mark.parametrize("sparse", [False, True])
def test_workers_with_embedding_rows_of_their_own_arrive_exactly_where_they_would_in_turn(workshop, sparse):
    tables = {
        "data": f"{PLUGS}:disjoint_texts",
        "model": {"name": f"{PLUGS}:Bag", "sparse": sparse},
        "partition": f"{PLUGS}:in_thirds",
        "local": {"batch_size": 3, "lr": 0.5, "epochs": 3},
    }
    raced = race(workshop, "hogwild", **tables).global_row
    train, _ = racing_plugs.disjoint_texts(None)
    model = racing_plugs.Bag()
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


def test_a_sparse_embedding_goes_with_plain_sgd_alone(workshop):
    tables = {"data": f"{PLUGS}:disjoint_texts", "model": {"name": f"{PLUGS}:Bag", "sparse": True}}
    with pytest.raises(fedsim.ExperimentError) as caught:
        race(workshop, "hogwild", local={"momentum": 0.5}, **tables)
    assert caught.value.lines == (
        "local: embedding.weight is a sparse embedding, and without locks its unused rows must stay as they are; leave "
        "out local.momentum and local.weight_decay",
    )


@pytest.mark.parametrize(("rounds", "held", "updates"), [(1, 1, 1), (2, 0, 3)])
def test_what_waits_in_a_buffer_is_on_record_and_goes_on_in_the_next_round(workshop, rounds, held, updates):
    record = race(workshop, "fedbuff", policy={"name": "fedbuff", "k": 2}, rounds=rounds).history[-1]
    assert record["asynchronous"]["held"] == held
    assert record["asynchronous"]["updates"] == updates


@pytest.mark.parametrize("name", ["k_sync", "k_async"])
def test_whoever_is_held_back_at_the_end_of_a_round_makes_up_for_it_in_the_next(workshop, name):
    """15 steps a round: an odd number, so that of two gradients an update one is left over."""
    history = race(workshop, name, rounds=3).history
    done = 0
    for round, record in enumerate(history, 1):
        done += record["race"]["updates"]
        assert record["race"]["held_back"] <= 1
        assert 10 * round <= done <= 15 * round  # where one is held back, the two others have ended
        assert record["asynchronous"]["updates"] * 2 + record["asynchronous"]["held"] == done


def test_workers_with_less_to_do_hold_nobody_back(workshop):
    tables = {"partition": "tests.plugs:uneven", "local": {"batch_size": 8, "lr": 0.05}}
    for given in ({"name": "ssp", "s": 0}, {"name": "easgd", "synchronous": True, "period": 1}):
        record = race(workshop, given["name"], policy=given, **tables).history[0]
        assert record["samples"] == [33, 68, 102]
        assert record["race"]["held_back"] == record["asynchronous"]["held"] == 0


def test_two_processes_can_have_three_workers(workshop):
    with fedsim.Workshop() as other:
        for name in ("hogwild", "k_sync", "ssp", "gossip", "fedasync"):
            result = race(other, name, processes=2, rounds=2)
            assert result.history[-1]["cohort"] == [0, 1, 2] or name == "k_sync"


NEUTRAL = [
    *("hogwild", "locked", "asgd", "staleness_aware", "dc_asgd", "ssp", "gossip", "ad_psgd"),
    *({"name": "fedasync", "alpha": 1.0}, {"name": "k_sync", "k": 1}, {"name": "k_async", "k": 1}),
    {"name": "fedbuff", "k": 1},
]


def plain_sgd(momentum_lasts):
    """Two rounds of one worker, written out."""
    train, _ = plugs.tiny(None)
    inputs, targets = fedsim.dataset_split(train, 1, "iid", seed=0)[0].gather(torch.arange(len(train)))
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(draw_key(0, "model"))
        model = fedsim.models.Net(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for round in (1, 2):
        if not momentum_lasts:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        order = batch_order(0, round, 0, 0, len(train))
        for batch in order.split(16):
            optimizer.zero_grad()
            images = inputs[batch].contiguous(memory_format=torch.channels_last)
            F.cross_entropy(model(images), targets[batch]).backward()
            optimizer.step()
    return Layout.of(model).read(model)


def test_one_worker_alone_is_plain_sgd_to_the_bit(workshop_of_one):
    expected = {lasts: plain_sgd(lasts) for lasts in (True, False)}
    for given in NEUTRAL:
        name = given if isinstance(given, str) else given["name"]
        local = {"batch_size": 16, "lr": 0.05, "momentum": 0.5}
        model = {"name": "net", "dropout": 0.0}
        tables = {"workers": 1, "rounds": 2, "local": local, "model": model, "policy": given}
        row = race(workshop_of_one, name, **tables).global_row
        lasts = policy.get(name).target.work == "gradient"
        assert torch.equal(row, expected[lasts]), given


def test_one_worker_alone_has_the_dropout_and_the_buffers_of_the_clock(workshop_of_one):
    models = [("net", "average"), *(("tests.plugs:Normalised", buffers) for buffers in ("average", "local", "server"))]
    for model, buffers in models:
        tables = {"workers": 1, "model": model, "buffers": buffers, "policy": {"name": "hogwild"}, "rounds": 2}
        tables = {**tables, "data": "tests.plugs:tiny", "local": {"batch_size": 16, "lr": 0.05, "momentum": 0.5}}
        on_clock = fedsim.run({**tables, "mode": "clock", "engine": "serial"}).model.state_dict()
        raced = race(workshop_of_one, "hogwild", **tables).model.state_dict()
        assert all(torch.equal(raced[name], value) for name, value in on_clock.items()), (model, buffers)


def test_a_model_that_lets_go_of_the_shared_row_is_told_so():
    with pytest.raises(fedsim.ExperimentError, match=r"model: replaces the data of linear\.weight as it trains"):
        race(None, "hogwild", model="tests.plugs:LetsGo", workers=1)


def test_where_nobody_may_ever_begin_a_line_says_so():
    with pytest.raises(fedsim.ExperimentError) as caught:
        race(None, f"{PLUGS}:NeverStarting", workers=1)
    assert caught.value.lines == ("policy: in round 1 of the race nobody is at work and nobody may begin",)


def test_lost_updates_are_counted_and_under_a_lock_there_are_none():
    track = Track.of(2, torch.device("cpu"))
    with Crew(2) as crew:
        counts = crew.call(racing_plugs.add_to_track, track, 3000, True)
        assert track.lost() == 0
        assert float(track.canaries[0, 0]) == 6000
        assert all(taken == 3000 >= waited for taken, waited in counts)
        for _ in range(50):  # once is nearly always enough
            crew.call(racing_plugs.add_to_track, track, 20_000, False)
            if track.lost():
                break
    assert 0 < track.lost() < 20_000 * 50


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"engine": "serial"}, 'engine = "serial": mode="race" needs engine=spawn or engine=auto'),
        ({"engine": "batched"}, 'engine = "batched": mode="race" needs engine=spawn or engine=auto'),
        (
            {"compile": True},
            'compile = true: policy.name = "hogwild" does not compile, since other processes change the row; omit it',
        ),
        ({"race": {"runs": 0}}, "race.runs = 0: must be greater than 0"),
        ({"clock": {"base": 2.0}}, "clock: needs mode=clock; omit [clock]"),
        ({"cohort": 2}, 'cohort = 2: with mode=race and policy.name = "hogwild" all workers work; omit it'),
        ({"policy": "sync"}, 'policy.name = "sync": mode="race" needs an asynchronous policy, such as policy=hogwild'),
    ],
)
def test_what_does_not_go_with_a_race_is_told_in_a_line(tables, line):
    with pytest.raises(fedsim.ExperimentError) as caught:
        fedsim.Experiment(**{"mode": "race", "policy": "hogwild", **tables})
    assert any(each.startswith(line) for each in caught.value.lines), caught.value.lines


def test_the_first_line_says_that_a_race_is_not_repeatable_and_how_many_runs_there_are(cli):
    words = ("mode=race", "policy=locked", "workers=1", "model=logistic", "data=tests.plugs:tiny", "rounds=1")
    done = cli("run", *words, "race.runs=2", "--out", "here")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0] == (
        "a race is not repeatable: it is run 2 times, numbers are means, and the model kept is the first run's"
    )
