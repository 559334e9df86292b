"""Client algorithms in whole runs: plain loops, special cases and refusals."""

from __future__ import annotations

import pytest
import torch

import fedsim
from fedsim.clients import client_algorithm
from fedsim.config.listing import describe_component
from fedsim.core.randomness import sample_cohort
from fedsim.records.reader import Run
from fedsim.runs.setup import check_run
from tests.clients import plain_loops
from tests.clients.plain_loops import BATCH, TABLES, WORKERS, Workers
from tests.matrix import in_turn
from tests.textbook import finished

VARIANTS = {
    "fedsam": ("fedsam", {"lr": 0.1, "rho": 0.5}),
    "mimelite": ("mimelite", {"lr": 0.2, "beta": 0.6}),
    "mime": ("mime", {"lr": 0.2, "beta": 0.6}),
    "ditto": ("ditto", {"lr": 0.1, "lam": 0.7}),
    "ditto with fewer personal steps": ("ditto", {"lr": 0.1, "lam": 0.7, "personal_steps": 3}),
    "pfedme": ("pfedme", {"lr": 0.05, "eta": 0.1, "lam": 4.0, "inner_steps": 3, "beta": 0.7}),
    "apfl": ("apfl", {"lr": 0.1, "alpha": 0.3}),
    "apfl that adapts": ("apfl", {"lr": 0.1, "alpha": 0.3, "adaptive": True}),
    "per_fedavg": ("per_fedavg", {"lr": 0.05, "inner_lr": 0.1}),
    "scaffold": ("scaffold", {"lr": 0.05}),
    "scaffold with full gradients": ("scaffold", {"lr": 0.05, "option": 1, "weight_decay": 0.1}),
    "fednova": ("fednova", {"lr": 0.05, "weighted": False}),
    "fednova with momentum": ("fednova", {"lr": 0.05, "momentum": 0.9}),
    "fednova with all": ("fednova", {"lr": 0.05, "momentum": 0.5, "nesterov": True, "weight_decay": 0.1}),
    "feddyn": ("feddyn", {"lr": 0.05, "alpha": 0.3}),
    "feddyn with all": ("feddyn", {"lr": 0.05, "alpha": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
}
PLAIN_MEAN = {"scaffold", "feddyn"}  # algorithms that require the unweighted mean
NAMES = tuple(dict.fromkeys(name for name, _ in VARIANTS.values()))


def tables_of(name, params, **changes):
    """Return the tables of an experiment with this client algorithm; `params["weighted"]` selects the weighted mean."""
    local = {key: value for key, value in params.items() if key != "weighted"}
    plain = name in PLAIN_MEAN or not params.get("weighted", True)
    tables = {**TABLES, "engine": "serial", "local": {"algorithm": name, "epochs": 2, "batch_size": BATCH, **local}}
    return {**tables, **({"aggregate": "mean"} if plain and "mode" not in changes else {}), **changes}


@in_turn(
    ("variant", "engine"),
    VARIANTS,
    [{"engine": "serial"}, {"engine": "batched", "processes": 1, "batched": {"stack_size": 2}}],
)
def test_the_rows_equal_those_of_a_plain_loop(variant, engine):
    """The cohorts are partial and the shards uneven, so some workers take more steps, also an odd number of steps."""
    name, params = VARIANTS[variant]
    federation = Workers()
    personal = getattr(plain_loops, name)(federation, **params)
    run = finished(tables_of(name, params, **engine))
    torch.testing.assert_close(run.row, federation.row, rtol=0, atol=1e-10)
    for worker in range(WORKERS) if personal else ():
        expected = personal.get(worker, federation.start)
        mine = run.algorithm.personal_rows(run.row, run.states.get(worker, run.initial))
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-10)


def test_fine_tuning_by_mime_of_one_worker_is_gradient_descent(tmp_path):
    """With whole batches and no momentum, Mime's mean gradient is the gradient at the fine-tuned row."""
    one_worker = {"workers": 1, "cohort": None, "partition": "iid", "rounds": 2, "engine": "serial"}
    one_worker |= {
        "data": {"name": "tests.components:tiny", "local_test_fraction": 0.25},
        "worker_evaluation": {"fine_tune": 3},
        "records": {"figures": []},
    }
    losses = []
    for local in ({"algorithm": "mime", "beta": 0.0}, {"algorithm": "sgd"}):
        out = tmp_path / local["algorithm"]
        fedsim.run({**TABLES, **one_worker, "local": {"lr": 0.5, "batch_size": 1000, **local}}, out)
        losses.append(Run.read(out).workers.loss["fine_tuned"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_a_gradient_of_zero_does_not_move_fedsam():
    row, algorithm = torch.ones(2, 3), client_algorithm.get("fedsam").bind({})
    algorithm.step_rows(row, torch.zeros(2, 3), {}, lambda points: torch.zeros_like(points) + (points != points))
    assert torch.equal(row, torch.ones(2, 3))


@pytest.mark.parametrize(
    ("name", "gradients"), [("sgd", "1"), ("pfedme", "5"), ("mime", "2, and a full gradient per round")]
)
def test_the_list_shows_the_gradients_of_a_step(name, gradients):
    assert f"gradients per step: {gradients}" in describe_component(name)


ROWS_SENT = {"mimelite": (1, 1), "mime": (2, 1), "scaffold": (1, 1)}  # rows received and sent besides the model itself


@pytest.mark.parametrize("name", NAMES)
def test_the_records_count_the_bytes_of_each_way(name):
    records = finished(tables_of(name, {}, rounds=1)).records
    d = len(Workers().row)
    down, up = ROWS_SENT.get(name, (0, 0))
    numbers = 2 if name == "fednova" else 0
    assert (records[0].bytes_down, records[0].bytes_up) == (24 * d * (1 + down), 24 * (d * (1 + up) + numbers))


@pytest.mark.parametrize("name", ["scaffold", "mimelite", "ditto"])
def test_an_algorithm_without_a_cohort_runs_on_the_virtual_clock(name):
    tables = tables_of(name, {}, mode="clock", policy="fedasync", cohort=None, rounds=2)
    rows = [fedsim.run(changed).global_row for changed in (tables, {**tables, "engine": "batched", "processes": 1})]
    torch.testing.assert_close(*rows, rtol=0, atol=1e-9)


@pytest.mark.parametrize("work", [{"epochs": 1}, {"steps": {"uniform": [1, 3]}, "epochs": None}])
def test_per_fedavg_refuses_a_worker_with_short_rounds_before_the_first_one(work, session):
    """Worker 0 has 13 samples and is not in the first cohort."""
    tables = {**TABLES, "engine": "serial", "cohort": 1, "seed": 1}
    assert sample_cohort(1, 1, WORKERS, 1).tolist() != [0]
    experiment = fedsim.Experiment(**tables, local={"algorithm": "per_fedavg", "batch_size": 20, **work})
    with pytest.raises(fedsim.ExperimentError, match="worker 0 has 1;") as caught:
        check_run(experiment, session, to_run=False)
    assert len(caught.value.lines) == 1


def test_per_fedavg_refuses_a_round_that_a_policy_shortens_to_one_step():
    """Before the run each worker has two steps; dylu leaves the slow workers one."""
    policy, clock = {"name": "async_local_sgd", "dylu": True}, {"slowdown": "linear"}
    tables = tables_of("per_fedavg", {}, mode="clock", policy=policy, clock=clock, cohort=None)
    with pytest.raises(fedsim.ExperimentError, match="needs two local steps per round, .* has 1;"):
        fedsim.run({**tables, "local": {"algorithm": "per_fedavg", "steps": 2, "batch_size": BATCH}})


def test_a_race_trains_rows_by_whole_row_steps():
    tables = tables_of("per_fedavg", {}, mode="race", policy="fedasync", cohort=None, rounds=1, engine="processes")
    assert fedsim.run(tables).global_row.isfinite().all()
