"""Personal parameters and models against plain PyTorch loops, which parts are not sent, and MOON."""

from __future__ import annotations

import copy
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedsim
from fedsim.clients.algorithm import PERSONAL_BUFFERS, state_at_first
from fedsim.clients.capabilities import personal_model
from fedsim.core.randomness import sample_cohort
from fedsim.core.recorded_features import recorded_features
from fedsim.core.rows import ColumnSpans, Layout
from fedsim.data import ListedShards, hold_out
from fedsim.records.reader import Run
from tests import components, models
from tests.matrix import in_turn
from tests.textbook import Federation, finished, start_of

WORKERS, COHORT, ROUNDS, BATCH = 5, 3, 4, 16
SGD = {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.01}
PERCEPTRON = {"name": "tests.models:sized", "hidden": [8]}
HEAD = {"personal": ["2.*"]}  # the last layer of PERCEPTRON


@pytest.fixture
def tables():
    return {
        **{"rounds": ROUNDS, "workers": WORKERS, "cohort": COHORT, "engine": "serial", "precision": "float64"},
        **{"model": PERCEPTRON, "data": "tests.components:tiny", "local": {"batch_size": BATCH, **SGD}},
    }


def reference(factory, personal, phases=lambda names, epoch_steps, steps: [(names, steps)], epochs=1):
    """Compute federated averaging by hand. Parameters and buffers whose name is `personal` stay with the workers.

    `phases` returns pairs of (names of the trained parameters, number of steps), applied in order.
    """
    federation = Federation(factory, components.tiny, WORKERS, BATCH)
    model, shards = federation.model, federation.shards
    shared = copy.deepcopy(model.state_dict())
    personal_states = {}
    for round in range(1, ROUNDS + 1):
        cohort, trained = sample_cohort(0, round, WORKERS, COHORT).tolist(), []
        for worker in cohort:
            model.load_state_dict({**shared, **personal_states.get(worker, {})})
            model.train()
            batches = [batch for epoch in range(epochs) for batch in federation.epoch(round, worker, epoch)]
            names, todo = [name for name, _ in model.named_parameters()], iter(batches)
            for moving, steps in phases(names, len(batches) // epochs, len(batches)):
                moved = [p for name, p in model.named_parameters() if name in moving]
                optimizer = torch.optim.SGD(moved, **SGD)
                for _ in range(steps):
                    x, y = next(todo)
                    model.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
            state = copy.deepcopy(model.state_dict())
            personal_states[worker] = {name: value for name, value in state.items() if personal(name)}
            trained.append(state)
        sizes = torch.tensor([len(shards[worker]) for worker in cohort], dtype=torch.double)
        for name in shared:
            if not personal(name):
                stacked = torch.stack([state[name] for state in trained])
                shared[name] = torch.tensordot(sizes / sizes.sum(), stacked, 1)
    row = torch.cat([shared[name].flatten() for name, _ in model.named_parameters()])
    names = [entry.name for entry in Layout.of(model).parameters if personal(entry.name)]
    return (
        row,
        {worker: torch.cat([state[name].flatten() for name in names]) for worker, state in personal_states.items()},
        personal_states,
    )


def assert_is(reference_of, tables):
    """Check the global row and the personal parameters of a run against the reference, and return the run."""
    run = finished(tables)
    expected, personal_rows, _ = reference_of
    assert torch.allclose(run.row, expected, rtol=0, atol=1e-12)
    assert run.states.keys() == personal_rows.keys()
    for worker, personal in personal_rows.items():
        assert torch.allclose(run.states[worker]["personal"], personal, rtol=0, atol=1e-12), worker
    return run


@pytest.mark.parametrize(("params", "epochs", "first"), [({}, 2, 1), ({"head_epochs": 2}, 3, 2)])
def test_fedrep_trains_the_head_and_then_the_rest(params, epochs, first, tables):
    def phases(names, epoch_steps, steps):
        head = [name for name in names if name.startswith("2.")]
        return [(head, first * epoch_steps), (set(names) - set(head), steps - first * epoch_steps)]

    tables["local"] |= {"algorithm": "fedrep", "epochs": epochs, **HEAD, **params}
    by_hand = reference(lambda: models.sized(hidden=(8,)), lambda name: name.startswith("2."), phases, epochs)
    assert_is(by_hand, tables)


def test_fedrep_by_steps_is_fedrep_by_epochs_of_as_many_steps(tables):
    """An epoch of each worker has three batches."""
    by_epochs = {**tables["local"], "algorithm": "fedrep", **HEAD, "epochs": 2}
    by_steps = {**tables["local"], "algorithm": "fedrep", **HEAD, "steps": 6, "head_steps": 3}
    rows = [finished({**tables, "local": local}).row for local in (by_epochs, by_steps)]
    assert torch.equal(*rows)


NORMALISED = {  # local settings and personal layers; the first two entries mean the same
    "fedbn": ({"algorithm": "fedbn"}, ("layers.2.",)),
    "fedper": ({"algorithm": "fedper", "personal": ["layers.2.weight", "layers.2.bias"]}, ("layers.2.",)),
    "lg_fedavg": ({"algorithm": "lg_fedavg", "personal": ["layers.[12].*"]}, ("layers.1.", "layers.2.")),
}


@in_turn(("name", "buffers"), NORMALISED, ["average", "local", "frozen"])
def test_the_statistics_of_personal_normalisation_layers_are_personal(name, buffers, tables):
    local, layers = NORMALISED[name]
    by_hand = reference(models.Normalised, lambda name: name.startswith(layers))
    tables |= {"model": "tests.models:Normalised", "buffers": buffers}
    tables["local"] |= local
    run = assert_is(by_hand, tables)
    width = run.algorithm.personal_columns.others(len(run.row)).width
    assert {record.bytes_up for record in run.records} == {COHORT * 8 * width}
    for worker, personal_state in by_hand[2].items():
        buffers = [personal_state[f"layers.2.{name}"].flatten().double() for name in ("running_mean", "running_var")]
        assert torch.allclose(run.states[worker]["personal.buffers"][:32], torch.cat(buffers), rtol=0, atol=1e-12)


def test_the_statistics_of_a_layer_without_parameters_are_personal_too():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2, affine=False), torch.nn.Linear(2, 1))
    for algorithm in (fedsim.clients.FedBN(), fedsim.clients.LGFedAvg(personal=["[01].*"]), fedsim.clients.LocalOnly()):
        assert algorithm.for_model(model).personal_buffers.width == 5
    assert fedsim.clients.FedPer(personal=["2.*"]).for_model(model).personal_buffers.width == 0


def test_local_only_averages_nothing_and_sends_nothing(tables):
    tables["local"] |= {"algorithm": "local_only"}
    run = assert_is(reference(lambda: models.sized(hidden=(8,)), lambda name: True), tables)
    assert torch.equal(run.row, run.start)
    assert {(record.bytes_up, record.bytes_down) for record in run.records} == {(0, 0)}


@pytest.mark.parametrize("algorithm", ["fedper", "fedrep"])
def test_personal_columns_are_not_sent_or_processed_and_attackers_cannot_send_them(algorithm, tables):
    tables |= {"aggregate": {"rule": "krum", "f": 0}}
    tables |= {"attack": {"name": "gaussian", "fraction": 0.4, "before_processors": True}}
    tables |= {"processors": [{"name": "gaussian_noise", "std": 0.1}, {"name": "top_k", "k": 50}]}
    tables["local"] |= {"algorithm": algorithm, "epochs": 2, **HEAD}
    run = finished(tables)
    columns = run.algorithm.personal_columns
    others = columns.others(len(run.row))
    assert torch.equal(columns.of(run.row), columns.of(run.start))
    assert not columns.of(run.updates).any()
    assert others.of(run.updates).count_nonzero(1).tolist() == [50] * COHORT
    plain = finished({**tables, "local": {"batch_size": BATCH, **SGD}}).records
    saved = COHORT * 90 * 8
    assert [record.bytes_down for record in run.records] == [record.bytes_down - saved for record in plain]
    # 50 values and their positions
    assert [record.bytes_up for record in run.records] == [record.bytes_up for record in plain]
    without = finished({**tables, "processors": []}).records
    assert {record.bytes_up for record in without} == {COHORT * 8 * others.width}


def test_columns_of_entries_join_neighbours_and_have_others():
    layout = Layout.of(models.sized(hidden=(8,)))
    columns = ColumnSpans.of_entries(layout.parameters[1:3])
    assert columns.spans == ((784 * 8, 784 * 8 + 8 + 80),)
    assert columns.others(layout.d).spans == ((0, 784 * 8), (784 * 8 + 88, layout.d))
    assert ColumnSpans.of_entries(layout.parameters).others(layout.d).width == 0


@pytest.mark.parametrize(
    "changes", [{"processors": ["sign"]}, {"aggregate": {"rule": "krum", "f": 0}}, {"server": "adam"}]
)
def test_settings_without_a_meaning_for_local_only_are_an_error(changes, tables):
    tables["local"] |= {"algorithm": "local_only"}
    with pytest.raises(fedsim.ExperimentError, match=f"^{next(iter(changes))}.*local_only"):
        fedsim.run({**tables, **changes})


PAIR, SHORT, LR = 2, 3, 0.1  # cohort size, rounds, learning rate
TABLES = {
    **{"workers": WORKERS, "cohort": PAIR, "rounds": SHORT, "model": "tests.models:Normalised"},
    **{
        "data": {"name": "tests.components:tiny", "local_test_fraction": 0.25},
        "partition": "shards",
        "precision": "float64",
    },
    **{"worker_evaluation": {"fine_tune": 1}, "records": {"figures": []}},
}
ENGINES = {
    "serial": {"engine": "serial"},
    "batched": {"engine": "batched", "processes": 1, "batched": {"stack_size": 3}},
    "processes": {"engine": "processes", "processes": 2},
}


class Workers(Federation):
    """The workers of the experiment `TABLES`: their batches, test samples and cohorts."""

    def __init__(self):
        super().__init__(models.Normalised, components.tiny, WORKERS, BATCH, "shards")
        trains, self.tests = hold_out(ListedShards.of_arrays([shard.numpy() for shard in self.shards]), 0.25, seed=0)
        self.shards = [trains.of(worker) for worker in range(WORKERS)]
        self.cohorts = [sample_cohort(0, round, WORKERS, PAIR).tolist() for round in range(1, SHORT + 1)]

    def test_loss(self, model, worker):
        inputs, targets = self.train.gather(self.tests.of(worker))
        with torch.no_grad():
            return F.cross_entropy(deepcopy(model).eval()(inputs), targets).item()


@pytest.fixture(scope="module")
def alone():
    """Return the test losses of workers that train alone, and those after fine-tuning."""
    workers, personal = Workers(), [start_of(models.Normalised) for _ in range(WORKERS)]

    def losses(round, cohort):
        for k in cohort:
            optimizer = torch.optim.SGD(personal[k].parameters(), lr=LR)
            for x, y in workers.epoch(round, k):
                optimizer.zero_grad()
                F.cross_entropy(personal[k](x), y).backward()
                optimizer.step()
        return [workers.test_loss(model, k) for k, model in enumerate(personal)]

    *_, last = (losses(round, cohort) for round, cohort in enumerate(workers.cohorts, 1))
    return last, losses(SHORT, range(WORKERS))


ALONE = {
    "local_only": {"algorithm": "local_only"},
    "ditto": {"algorithm": "ditto", "lam": 0.0},
    "apfl": {"algorithm": "apfl", "alpha": 1.0},
}


@in_turn(("name", "engine"), ALONE, ENGINES)
@pytest.mark.parametrize("buffers", ["average", pytest.param("local", marks=pytest.mark.slow)])
def test_a_model_that_the_global_one_does_not_pull_is_trained_and_tested_alone(
    name, engine, buffers, alone, tmp_path, session
):
    local = {"batch_size": BATCH, "lr": LR, **ALONE[name]}
    fedsim.run({**TABLES, **ENGINES[engine], "buffers": buffers, "local": local}, tmp_path / "run", session=session)
    evaluation = Run.read(tmp_path / "run").workers
    assert evaluation.workers == list(range(WORKERS))
    for kind, expected in zip(("personal", "fine_tuned"), alone, strict=True):
        assert evaluation.loss[kind] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("model", "computed"), [(nn.Linear(2, 1), 1), (nn.BatchNorm1d(2), 2)])
def test_theta_of_pfedme_has_its_own_statistics_from_its_first_gradient_on(model, computed):
    """Only forward passes at theta update the buffers of theta."""
    algorithm, rows, points = fedsim.clients.PFedMe(inner_steps=2).for_model(model), torch.ones(3), []
    algorithm.step_rows(rows, rows.clone(), algorithm.start(rows), lambda point: points.append(point) or point.clone())
    assert len(points) == computed


MU, T = 2.0, 0.5


@pytest.fixture
def moon_tables():
    return {
        **{"rounds": ROUNDS, "workers": WORKERS, "cohort": COHORT, "engine": "serial", "precision": "float64"},
        **{"model": "tests.models:WithFeatures", "data": "tests.components:tiny"},
        "local": {"algorithm": "moon", "mu": MU, "batch_size": BATCH, "lr": 0.1, "momentum": 0.5},
    }


def moon_reference(factory, features):
    """Return the global row of MOON computed by hand; `features(model, inputs)` returns a model's features."""
    federation = Federation(factory, components.tiny, WORKERS, BATCH)
    model, at_start, before = all_three = [federation.model, *(factory().double() for _ in range(2))]
    layout = Layout.of(model)
    previous = dict.fromkeys(range(WORKERS), federation.row)
    for round in range(1, ROUNDS + 1):
        cohort = sample_cohort(0, round, WORKERS, COHORT).tolist()
        for worker in cohort:
            layout.write(federation.row, model)
            layout.write(federation.row, at_start)
            layout.write(previous[worker], before)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
            for x, y in federation.epoch(round, worker):
                z, received, old = (features(each, x) for each in all_three)
                positive = (F.cosine_similarity(z, received.detach()) / T).exp()
                negative = (F.cosine_similarity(z, old.detach()) / T).exp()
                optimizer.zero_grad()
                (F.cross_entropy(model(x), y) - MU * (positive / (positive + negative)).log().mean()).backward()
                optimizer.step()
            previous[worker] = layout.read(model)
        federation.row = federation.average({worker: previous[worker] for worker in cohort})
    return federation.row


@pytest.mark.parametrize(
    ("model", "factory", "features"),
    [
        ("tests.models:WithFeatures", models.WithFeatures, lambda model, x: model.features(x)),
        (
            {"name": "tests.models:sized", "hidden": [8]},
            lambda: models.sized(hidden=(8,)),
            lambda model, x: model[:2](x),
        ),
    ],
)
def test_moon_is_the_plain_loop(model, factory, features, moon_tables):
    row = fedsim.run({**moon_tables, "model": model}).global_row
    assert torch.allclose(row, moon_reference(factory, features), rtol=0, atol=1e-12)
    plain = fedsim.run({**moon_tables, "model": model, "local": {**moon_tables["local"], "mu": 0.0}}).global_row
    assert not torch.allclose(row, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize("engine", [{"engine": "serial"}, {"engine": "batched", "processes": 1}])
def test_a_model_without_features_is_an_error_in_one_line(engine, moon_tables):
    with pytest.raises(fedsim.ExperimentError, match="needs features") as caught:
        fedsim.run({**moon_tables, **engine, "model": "tests.models:Convolved", "rounds": 1})
    assert len(caught.value.lines) == 1


def test_features_equal_those_of_a_module_of_this_name():
    model = nn.Sequential()
    model.features, model.last = nn.Conv2d(1, 2, 3), nn.Flatten()
    with recorded_features(model) as recorded:
        outputs = model(torch.zeros(4, 1, 3, 3))
    assert torch.equal(recorded.of(4), outputs)


def test_the_module_is_as_before_when_features_have_been_recorded():
    model = models.WithFeatures()
    before = dict(vars(model))
    with recorded_features(model) as recorded:
        model(torch.zeros(4, 1, 28, 28))
    assert recorded.of(4).shape == (4, 6)
    assert vars(model) == before
    with pytest.raises(fedsim.ExperimentError, match=r"must have shape \[5, ...\], not \(4, 6\)"):
        recorded.of(5)


def test_a_personal_model_leaves_the_global_model_alone():
    module = models.Normalised()
    layout, algorithm = Layout.of(module), fedsim.clients.FedBN().for_model(module)
    row, buffers = torch.zeros(layout.d), torch.zeros(layout.n_buffer_values)
    kept = state_at_first(algorithm, row + 1, buffers + 1)
    personal_row, personal_buffers = personal_model(algorithm, row, buffers, kept)
    assert personal_row.sum() == kept["personal"].numel() > 0
    assert personal_buffers.sum() == kept[PERSONAL_BUFFERS].numel() > 0
    assert not row.any()
    assert not buffers.any()
