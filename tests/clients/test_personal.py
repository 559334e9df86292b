"""Personal parameters against plain PyTorch loops, and what is not sent of them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import fedsim
from fedsim.core.randomness import sample_cohort
from fedsim.core.rows import ColumnSpans, Layout
from tests import models, plugs
from tests.matrix import in_turn
from tests.textbook import Federation, finished

WORKERS, COHORT, ROUNDS, BATCH = 5, 3, 4, 16
SGD = {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.01}
PERCEPTRON = {"name": "tests.models:sized", "hidden": [8]}
HEAD = {"personal": ["2.*"]}  # the last layer of PERCEPTRON


@pytest.fixture
def tables():
    return {
        **{"rounds": ROUNDS, "workers": WORKERS, "cohort": COHORT, "engine": "serial", "precision": "float64"},
        **{"model": PERCEPTRON, "data": "tests.plugs:tiny", "local": {"batch_size": BATCH, **SGD}},
    }


def reference(factory, personal, phases=lambda names, epoch_steps, steps: [(names, steps)], epochs=1):
    """Federated averaging by hand: the parameters and buffers that are `personal` (by name) stay with the workers.

    `phases` gives the names that move and for how many steps, one after another.
    """
    federation = Federation(factory, plugs.tiny, WORKERS, BATCH)
    model, shards = federation.model, federation.shards
    shared = copy.deepcopy(model.state_dict())
    own = {}
    for round in range(1, ROUNDS + 1):
        cohort, trained = sample_cohort(0, round, WORKERS, COHORT).tolist(), []
        for worker in cohort:
            model.load_state_dict({**shared, **own.get(worker, {})})
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
            own[worker] = {name: value for name, value in state.items() if personal(name)}
            trained.append(state)
        sizes = torch.tensor([len(shards[worker]) for worker in cohort], dtype=torch.double)
        for name in shared:
            if not personal(name):
                stacked = torch.stack([state[name] for state in trained])
                shared[name] = torch.tensordot(sizes / sizes.sum(), stacked, 1)
    row = torch.cat([shared[name].flatten() for name, _ in model.named_parameters()])
    names = [entry.name for entry in Layout.of(model).parameters if personal(entry.name)]
    return row, {worker: torch.cat([state[name].flatten() for name in names]) for worker, state in own.items()}, own


def assert_is(reference_of, tables):
    """The run has the reference's global row and personal parameters."""
    run = finished(tables)
    expected, own, _ = reference_of
    assert torch.allclose(run.row, expected, rtol=0, atol=1e-12)
    assert run.states.keys() == own.keys()
    for worker, personal in own.items():
        assert torch.allclose(run.states[worker]["personal"], personal, rtol=0, atol=1e-12), worker
    return run


@pytest.mark.parametrize(("solver", "layer"), [("fedper", "2."), ("lg_fedavg", "1.")])
def test_matching_parameters_stay_with_the_workers(solver, layer, tables):
    tables["local"] |= {"solver": solver, "personal": [f"{layer}*"]}
    assert_is(reference(lambda: models.sized(hidden=(8,)), lambda name: name.startswith(layer)), tables)


@pytest.mark.parametrize(("params", "epochs", "first"), [({}, 2, 1), ({"head_epochs": 2}, 3, 2)])
def test_fedrep_trains_the_head_and_then_the_rest(params, epochs, first, tables):
    def phases(names, epoch_steps, steps):
        head = [name for name in names if name.startswith("2.")]
        return [(head, first * epoch_steps), (set(names) - set(head), steps - first * epoch_steps)]

    tables["local"] |= {"solver": "fedrep", "epochs": epochs, **HEAD, **params}
    by_hand = reference(lambda: models.sized(hidden=(8,)), lambda name: name.startswith("2."), phases, epochs)
    assert_is(by_hand, tables)


def test_fedrep_by_steps_is_fedrep_by_epochs_of_as_many_steps(tables):
    """Three batches are an epoch of each worker."""
    by_epochs = {**tables["local"], "solver": "fedrep", **HEAD, "epochs": 2}
    by_steps = {**tables["local"], "solver": "fedrep", **HEAD, "steps": 6, "head_steps": 3}
    rows = [finished({**tables, "local": local}).row for local in (by_epochs, by_steps)]
    assert torch.equal(*rows)


NORMALISED = {  # what is personal; the first two have the same meaning
    "fedbn": ({"solver": "fedbn"}, ("layers.2.",)),
    "fedper": ({"solver": "fedper", "personal": ["layers.2.weight", "layers.2.bias"]}, ("layers.2.",)),
    "lg_fedavg": ({"solver": "lg_fedavg", "personal": ["layers.[12].*"]}, ("layers.1.", "layers.2.")),
}


@in_turn(("name", "buffers"), NORMALISED, ["average", "local", "server"])
def test_the_statistics_of_personal_normalisation_layers_are_personal(name, buffers, tables):
    local, layers = NORMALISED[name]
    by_hand = reference(models.Normalised, lambda name: name.startswith(layers))
    tables |= {"model": "tests.models:Normalised", "buffers": buffers}
    tables["local"] |= local
    run = assert_is(by_hand, tables)
    width = run.solver.personal_columns.others(len(run.row)).width
    assert {record.bytes_up for record in run.records} == {COHORT * 8 * width}
    for worker, own in by_hand[2].items():
        buffers = [own[f"layers.2.{name}"].flatten().double() for name in ("running_mean", "running_var")]
        assert torch.allclose(run.states[worker]["personal.buffers"][:32], torch.cat(buffers), rtol=0, atol=1e-12)


def test_the_statistics_of_a_layer_without_parameters_are_personal_too():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2, affine=False), torch.nn.Linear(2, 1))
    for solver in (fedsim.clients.FedBN(), fedsim.clients.LGFedAvg(personal=["[01].*"]), fedsim.clients.LocalOnly()):
        assert solver.for_model(model).personal_buffers.width == 5
    assert fedsim.clients.FedPer(personal=["2.*"]).for_model(model).personal_buffers.width == 0


def test_local_only_averages_nothing_and_sends_nothing(tables):
    tables["local"] |= {"solver": "local_only"}
    run = assert_is(reference(lambda: models.sized(hidden=(8,)), lambda name: True), tables)
    assert torch.equal(run.row, run.start)
    assert {(record.bytes_up, record.bytes_down) for record in run.records} == {(0, 0)}


@pytest.mark.parametrize("solver", ["fedper", "fedrep"])
def test_personal_columns_are_not_sent_or_processed_and_attackers_cannot_send_them(solver, tables):
    tables |= {"attack": {"name": "gaussian", "fraction": 0.4}, "aggregate": {"rule": "krum", "f": 0}}
    tables |= {"processors": [{"name": "gaussian_noise", "std": 0.1}, {"name": "top_k", "k": 50}]}
    tables["local"] |= {"solver": solver, "epochs": 2, **HEAD}
    run = finished(tables)
    columns = run.solver.personal_columns
    others = columns.others(len(run.row))
    assert torch.equal(columns.of(run.row), columns.of(run.start))
    assert not columns.of(run.updates).any()
    assert others.of(run.updates).count_nonzero(1).tolist() == [50] * COHORT
    plain = finished({**tables, "local": {"batch_size": BATCH, **SGD}}).records
    saved = COHORT * 90 * 8
    assert [record.bytes_down for record in run.records] == [record.bytes_down - saved for record in plain]
    assert [record.bytes_up for record in run.records] == [record.bytes_up for record in plain]  # 50 values and places
    without = finished({**tables, "processors": []}).records
    assert {record.bytes_up for record in without} == {COHORT * 8 * others.width}


def test_columns_of_entries_join_neighbours_and_have_others():
    layout = Layout.of(models.sized(hidden=(8,)))
    columns = ColumnSpans.of_entries(layout.parameters[1:3])
    assert columns.spans == ((784 * 8, 784 * 8 + 8 + 80),)
    assert columns.others(layout.d).spans == ((0, 784 * 8), (784 * 8 + 88, layout.d))
    assert ColumnSpans.of_entries(layout.parameters).others(layout.d).width == 0


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"solver": "fedper", "personal": ["4.*"]}, 'local.personal = ["4.*"]: no parameter matches "4.*"; '),
        ({"solver": "fedper", "personal": ["2.wieght"]}, 'did you mean "2.weight"?'),
        ({"solver": "fedper"}, 'local.personal: is required, such as personal = ["fc2.*"]'),
        ({"solver": "fedper", "personal": []}, "use local.solver=sgd"),
        ({"solver": "fedrep", "personal": ["*"]}, "use local.solver=local_only"),
        ({"solver": "fedrep", **HEAD, "head_epochs": 1}, "leaves nothing of local.epochs = 1 for the other"),
        ({"solver": "fedrep", **HEAD, "epochs": {"uniform": [2, 5]}, "head_epochs": 2}, "local.epochs = 2 for"),
        ({"solver": "fedrep", **HEAD, "steps": 5, "head_steps": 5}, "leaves nothing of local.steps = 5"),
        ({"solver": "fedrep", **HEAD, "epochs": 2, "head_steps": 5}, "use local.head_epochs"),
        ({"solver": "fedbn"}, "has no normalisation layers"),
    ],
)
def test_impossible_personal_parameters_are_an_error_in_one_line(changes, line, tables):
    tables["local"] |= changes
    with pytest.raises(fedsim.ExperimentError) as caught:
        fedsim.run(tables)
    assert line in str(caught.value)
    assert len(caught.value.lines) == 1


@pytest.mark.parametrize(
    "changes", [{"processors": ["sign"]}, {"aggregate": {"rule": "krum", "f": 0}}, {"server": "adam"}]
)
def test_settings_without_a_meaning_for_local_only_are_an_error(changes, tables):
    tables["local"] |= {"solver": "local_only"}
    with pytest.raises(fedsim.ExperimentError, match=f"^{next(iter(changes))}.*local_only"):
        fedsim.run({**tables, **changes})
