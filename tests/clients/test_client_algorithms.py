"""Client algorithms in whole runs: against plain loops, in simple forms, resumed, and refused."""

from __future__ import annotations

import pytest
import torch

import fedsim
from fedsim.clients import solver
from fedsim.config.plugs import describe_plug
from fedsim.core.randomness import sample_cohort
from fedsim.records.reader import Run
from fedsim.runs.loops.synchronous import SynchronousLoop
from fedsim.runs.setup import check_run, prepare
from tests.clients import plain_loops, quadratics
from tests.clients.plain_loops import BATCH, TABLES, WORKERS, Workers
from tests.matrix import in_turn

VARIANTS = {
    "sgd": ("sgd", {"lr": 0.1}),
    "fedsam": ("fedsam", {"lr": 0.1, "rho": 0.5}),
    "mimelite": ("mimelite", {"lr": 0.2, "beta": 0.6}),
    "mime": ("mime", {"lr": 0.2, "beta": 0.6}),
    "ditto": ("ditto", {"lr": 0.1, "lam": 0.7}),
    "ditto with fewer personal steps": ("ditto", {"lr": 0.1, "lam": 0.7, "personal_steps": 3}),
    "pfedme": ("pfedme", {"lr": 0.05, "eta": 0.1, "lam": 4.0, "inner_steps": 3, "beta": 0.7}),
    "apfl": ("apfl", {"lr": 0.1, "alpha": 0.3}),
    "apfl that adapts": ("apfl", {"lr": 0.1, "alpha": 0.3, "adaptive": True}),
    "per_fedavg": ("per_fedavg", {"lr": 0.05, "inner_lr": 0.1}),
}
NAMES = tuple(dict.fromkeys(name for name, _ in VARIANTS.values()))


def tables_of(name, params, **changes):
    return {
        **TABLES,
        "engine": "serial",
        "local": {"solver": name, "epochs": 2, "batch_size": BATCH, **params},
        **changes,
    }


def trained(tables):
    """The global row, the records and the personal models of all workers after a run."""
    experiment = fedsim.Experiment(**tables)
    with fedsim.Session() as session, prepare(experiment, session) as (prepared, engine):
        loop = SynchronousLoop(prepared, engine)
        records = [loop.run_round(round) for round in range(1, experiment.rounds + 1)]
        row = engine.shared.global_row.clone()
        kept = {name: torch.stack([rows] * WORKERS) for name, rows in engine.worker_states.initial.items()}
        engine.worker_states.load(range(WORKERS), kept, range(WORKERS))
        return row, records, prepared.task.solver.personal_rows(row.expand(WORKERS, -1), kept).clone()


@in_turn(
    ("variant", "engine"),
    VARIANTS,
    [{"engine": "serial"}, {"engine": "batched", "processes": 1, "batched": {"width": 2}}],
)
def test_the_rows_are_those_of_a_plain_loop(variant, engine):
    """In rounds of partial cohorts and uneven shards, so that some workers take more steps, and an odd number."""
    name, params = VARIANTS[variant]
    federation = Workers()
    personal = getattr(plain_loops, name)(federation, **params)
    row, _, personal_rows = trained(tables_of(name, params, **engine))
    torch.testing.assert_close(row, federation.row, rtol=0, atol=1e-10)
    for worker, expected in personal.items():
        torch.testing.assert_close(personal_rows[worker], expected, rtol=0, atol=1e-10)


SIMPLE = {
    "fedsam with rho = 0": ("fedsam", {"rho": 0.0, "momentum": 0.9}, {"momentum": 0.9}),
    "mimelite with beta = 0": ("mimelite", {"beta": 0.0}, {}),
    "ditto": ("ditto", {"lam": 0.5, "momentum": 0.9}, {"momentum": 0.9}),
    "apfl": ("apfl", {"alpha": 0.5, "momentum": 0.9}, {"momentum": 0.9}),
}


@pytest.mark.parametrize("case", SIMPLE)
def test_the_global_row_is_that_of_sgd_to_the_bit(case):
    name, params, of_sgd = SIMPLE[case]
    row, sgd_row = (fedsim.run(tables_of(n, {"lr": 0.1, **p})).global_row for n, p in ((name, params), ("sgd", of_sgd)))
    assert torch.equal(row, sgd_row)


@pytest.mark.parametrize(("name", "params"), [("ditto", {"lam": 0.0}), ("apfl", {"alpha": 1.0})])
def test_a_personal_model_without_the_global_one_is_trained_alone(name, params):
    """It has the rows of workers that are never averaged: of one worker, whose rounds follow each other."""
    weights = {"aggregate": {"weights": [0.0, 0.0, 0.0, 0.0, 1.0]}, "cohort": None}
    alone = fedsim.run(tables_of("sgd", {"lr": 0.1}, **weights)).global_row
    _, _, personal = trained(tables_of(name, {"lr": 0.1, **params}, cohort=None))
    torch.testing.assert_close(personal[4], alone, rtol=0, atol=1e-12)


def test_an_alpha_of_zero_leaves_the_personal_model_of_apfl_alone():
    row, _, personal = trained(tables_of("apfl", {"lr": 0.1, "alpha": 0.0}))
    assert torch.equal(personal, row.expand(WORKERS, -1))


def test_mime_of_one_worker_is_gradient_descent():
    """Its correction replaces the gradient of a batch at the first step by that of all samples."""
    one = {"workers": 1, "cohort": None, "partition": "iid", "rounds": 3}
    mime = {"solver": "mime", "lr": 0.3, "beta": 0.0, "steps": 1, "batch_size": BATCH}
    descent = {"solver": "sgd", "lr": 0.3, "steps": 1, "batch_size": 1000}
    rows = [fedsim.run({**TABLES, **one, "engine": "serial", "local": local}).global_row for local in (mime, descent)]
    torch.testing.assert_close(*rows, rtol=0, atol=1e-12)


def test_fine_tuning_by_mime_of_one_worker_is_gradient_descent(tmp_path):
    """On whole batches and without momentum: its mean gradient is of the row that is fine-tuned."""
    one = {"workers": 1, "cohort": None, "partition": "iid", "rounds": 2, "engine": "serial"}
    one |= {"data": {"dataset": "tests.plugs:tiny", "worker_test": 0.25}, "evaluation": {"fine_tune": 3}}
    losses = []
    for local in ({"solver": "mime", "beta": 0.0}, {"solver": "sgd"}):
        out = tmp_path / local["solver"]
        fedsim.run({**TABLES, **one, "local": {"lr": 0.5, "batch_size": 1000, **local}}, out)
        losses.append(Run.read(out).workers.loss["fine_tuned"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_one_inner_step_of_pfedme_is_sgd():
    """With one inner step theta = x - lr g, so x -= eta lam lr g."""
    params = {"lr": 0.1, "eta": 0.5, "lam": 2.0, "inner_steps": 1}
    rows = [fedsim.run(tables_of(name, p)).global_row for name, p in (("pfedme", params), ("sgd", {"lr": 0.1}))]
    torch.testing.assert_close(*rows, rtol=0, atol=1e-12)


def test_per_fedavg_with_an_inner_rate_of_zero_uses_every_second_batch():
    federation = Workers()
    every = federation.batches
    federation.batches = lambda round, worker: list(every(round, worker))[1::2]
    plain_loops.sgd(federation, lr=0.1)
    row = fedsim.run(tables_of("per_fedavg", {"lr": 0.1, "inner_lr": 0.0})).global_row
    torch.testing.assert_close(row, federation.row, rtol=0, atol=1e-12)


def test_a_gradient_of_zero_does_not_move_fedsam():
    row, algorithm = torch.ones(2, 3), solver.get("fedsam").bind({})
    algorithm.step_rows(row, torch.zeros(2, 3), {}, lambda points: torch.zeros_like(points) + (points != points))
    assert torch.equal(row, torch.ones(2, 3))


@pytest.mark.parametrize(
    ("name", "gradients"), [("sgd", "1"), ("pfedme", "5"), ("mime", "2, and a full gradient per round")]
)
def test_the_list_shows_the_gradients_of_a_step(name, gradients):
    assert f"gradients per step: {gradients}" in describe_plug(name)


ROWS_SENT = {"mimelite": (1, 1), "mime": (2, 1)}  # received and sent, besides the row itself


@pytest.mark.parametrize("name", NAMES)
def test_the_records_count_the_bytes_of_each_way(name):
    _, records, _ = trained(tables_of(name, {}, rounds=1))
    d = len(Workers().row)
    down, up = ROWS_SENT.get(name, (0, 0))
    assert (records[0].bytes_down, records[0].bytes_up) == (3 * 8 * d * (1 + down), 3 * 8 * d * (1 + up))


@pytest.mark.parametrize("variant", ["mime", "ditto", "apfl that adapts"])  # state of the server, of workers, numbers
def test_a_resumed_run_gives_the_same_bits(variant, tmp_path):
    name, params = VARIANTS[variant]
    tables = tables_of(name, params, precision="float32", checkpoint={"every": 1})
    whole = fedsim.run(tables)

    def stop_after_two_rounds(record):
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedsim.run(tables, out=tmp_path / "run", on_round=stop_after_two_rounds)
    assert torch.equal(fedsim.run(tables, out=tmp_path / "run", resume=True).global_row, whole.global_row)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {"sync": "gradients"}) for name in NAMES[1:]),
        *((name, {"mode": "clock", "policy": "asgd", "cohort": None}) for name in NAMES[1:]),
        *(
            (name, {"mode": "clock", "policy": "fedasync", "cohort": None})
            for name in ("fednova", "feddyn", "mime", "pfedme")
        ),
        *((name, {"mode": "race", "policy": "fedasync", "cohort": None}) for name in ("mimelite", "ditto", "apfl")),
    ],
)
def test_an_algorithm_is_refused_in_modes_in_which_it_has_no_meaning(name, changes):
    changes = {"engine": "spawn", **changes} if changes.get("mode") == "race" else changes
    with pytest.raises(fedsim.ExperimentError) as caught:
        fedsim.Experiment(**tables_of(name, {}, **changes))
    assert [line for line in caught.value.lines if line.startswith(f'local.solver = "{name}": ')]


@pytest.mark.parametrize("name", ["scaffold", "mimelite", "ditto"])
def test_an_algorithm_without_a_cohort_runs_on_the_virtual_clock(name):
    tables = tables_of(name, {}, mode="clock", policy="fedasync", cohort=None, rounds=2)
    rows = [fedsim.run(changed).global_row for changed in (tables, {**tables, "engine": "batched", "processes": 1})]
    torch.testing.assert_close(*rows, rtol=0, atol=1e-9)


def test_per_fedavg_refuses_a_round_of_one_step():
    with pytest.raises(fedsim.ExperimentError, match="needs two local steps"):
        fedsim.run({**TABLES, "engine": "serial", "local": {"solver": "per_fedavg", "steps": 1}})


@pytest.mark.parametrize("work", [{"epochs": 1}, {"steps": {"uniform": [1, 3]}, "epochs": None}])
def test_per_fedavg_refuses_a_worker_with_short_rounds_before_the_first_one(work):
    """Worker 0 has 13 samples, and is not in the first cohort."""
    tables = {**TABLES, "engine": "serial", "cohort": 1, "seed": 1}
    assert sample_cohort(1, 1, WORKERS, 1).tolist() != [0]
    with pytest.raises(fedsim.ExperimentError, match="worker 0 has 1;") as caught:
        check_run(fedsim.Experiment(**tables, local={"solver": "per_fedavg", "batch_size": 20, **work}))
    assert len(caught.value.lines) == 1


def test_per_fedavg_refuses_a_round_that_a_policy_shortens_to_one_step():
    """Before the run each worker has two steps; with dylu the slow workers take one."""
    policy, clock = {"name": "async_local_sgd", "dylu": True}, {"speed": "linear"}
    tables = tables_of("per_fedavg", {}, mode="clock", policy=policy, clock=clock, cohort=None)
    with pytest.raises(fedsim.ExperimentError, match="needs two local steps .* has 1;"):
        fedsim.run({**tables, "local": {"solver": "per_fedavg", "steps": 2, "batch_size": BATCH}})


def distance_from_optimum(rounds, **local):
    """Of the final row, on least squares with other inputs and targets at each worker."""
    return (fedsim.run(quadratics.tables(rounds=rounds, local=local)).global_row - quadratics.optimum()).norm()


@pytest.mark.slow
def test_mimelite_stops_nearer_to_the_global_optimum_than_federated_averaging():
    """Its local gradients have the weight 1 - beta, and the distance is about (1 - beta)^2 = 1/100 of that of SGD."""
    assert distance_from_optimum(120, solver="mimelite", beta=0.9) < distance_from_optimum(60, solver="sgd") / 30


def test_mime_reaches_the_global_optimum():
    assert distance_from_optimum(60, solver="mime", beta=0.5, lr=0.02) < 1e-6


def test_a_race_trains_rows_by_whole_row_steps():
    tables = tables_of("per_fedavg", {}, mode="race", policy="fedasync", cohort=None, rounds=1, engine="spawn")
    assert fedsim.run(tables).global_row.isfinite().all()
