"""Processors: the chain that is applied to each update before aggregation, and error feedback."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import fedsim
from fedsim import ExperimentError
from fedsim.core.randomness import sample_cohort
from fedsim.models import logistic
from fedsim.processing import apply_chain, initial_states, processor
from fedsim.processing.processors import clip
from tests import components
from tests.textbook import Federation

D = 7850  # number of parameters of the model "logistic"
SMALL = {"model": "logistic", "rounds": 1}
CLIP = {"name": "clip", "max_norm": 0.1}
TOP_5 = {"name": "top_k", "k": 5}
NOISE = {"name": "gaussian_noise", "std": 0.1}


def halved(update: Tensor, metrics: dict[str, Tensor], *, factor: float = 0.5) -> Tensor:
    """A user-defined processor that records a tensor."""
    metrics["norm"] = update.norm()
    return factor * update


def longer(update: Tensor) -> Tensor:
    return torch.cat([update, update])


def in_negative_bytes(update: Tensor) -> tuple[Tensor, int]:
    return update, -1


def chain_of(*names, **params):
    return [processor.bind(processor.get(name), params) for name in names]


@pytest.mark.parametrize("sync", ["parameters", "gradients"])
def test_clipping_each_update_is_the_rule_that_clips(sync, tiny_experiment):
    tables = {**tiny_experiment, **SMALL, "sync": sync, "precision": "float64"}
    ours = fedsim.run({**tables, "processors": [CLIP], "aggregate": "mean"})
    theirs = fedsim.run({**tables, "aggregate": {"rule": "norm_clipping", "c": 0.1}})
    assert torch.allclose(ours.global_row, theirs.global_row, rtol=0, atol=1e-12)
    assert ours.history[0].metrics["clipped_share"] == 1


@pytest.mark.parametrize(
    ("chain", "nbytes"),
    [
        ([], 4 * D),
        ([CLIP], 4 * D),
        ([TOP_5], 5 * 4 + 9),
        ([TOP_5, CLIP], 5 * 4 + 9),
        ([TOP_5, NOISE], 4 * D),
        (["sign"], 982 + 4),  # 7850 bits
        ([{"name": "qsgd", "levels": 1}], 1963 + 4),  # 2 bits each
    ],
)
def test_the_last_declaration_of_a_chain_is_the_bytes_of_an_update(chain, nbytes, tiny_experiment):
    history = fedsim.run({**tiny_experiment, **SMALL, "processors": chain}).history
    assert (history[0].bytes_up, history[0].bytes_down) == (3 * nbytes, 3 * 4 * D)


def test_a_processor_of_a_user_records_the_mean_of_its_metric(tiny_experiment):
    tables = {**tiny_experiment, **SMALL, "local": {"steps": 1, "batch_size": 16}, "sync": "gradients"}
    chain = [
        {"name": "tests.processing.test_processing:halved", "factor": 2.0},
        "tests.processing.test_processing:halved",
    ]
    history = fedsim.run({**tables, "processors": chain}).history
    norms = fedsim.run({**tables, "processors": ["tests.processing.test_processing:halved"]}).history
    # recorded by the last processor of the chain
    assert history[0].metrics == {"norm": pytest.approx(2 * norms[0].metrics["norm"])}


def columnwise(updates: Tensor, metrics: dict[str, float]) -> Tensor:
    return updates.mean(0)


columnwise.columnwise = True


def test_a_columnwise_rule_that_takes_metrics_is_refused():
    with pytest.raises(ExperimentError, match="a columnwise rule cannot have the input metrics"):
        fedsim.Experiment(aggregate="tests.processing.test_processing:columnwise")


@pytest.mark.parametrize(
    ("name", "error"),
    [("longer", r"must return an update of shape \[2\], not of shape \[4\]"), ("in_negative_bytes", "an int >= 0")],
)
def test_a_result_of_another_shape_or_with_wrong_bytes_is_an_error(name, error):
    with pytest.raises(ExperimentError, match=error):
        apply_chain(chain_of(f"tests.processing.test_processing:{name}"), torch.ones(2), (1, 0), {}, seed=0)


def test_each_place_of_a_chain_worker_and_round_draws_other_numbers():
    chain, row = chain_of("gaussian_noise", "gaussian_noise", std=1.0), torch.zeros(1000)
    apply_chain(chain, row, (1, 0), {}, seed=0)
    assert row.std() == pytest.approx(2**0.5, rel=0.1)  # for independent draws; equal draws would give 2
    other_rows = [torch.zeros(1000) for _ in range(3)]
    for other_row, coordinates in zip(other_rows, [(1, 0), (1, 1), (2, 0)], strict=True):
        apply_chain(chain, other_row, coordinates, {}, seed=0)
    assert [torch.equal(row, other_row) for other_row in other_rows] == [True, False, False]


def test_a_row_that_a_processor_makes_infinite_is_excluded(tiny_experiment):
    tables = {**tiny_experiment, **SMALL, "aggregate": {"rule": "median", "nonfinite": "exclude"}}
    chain = [{"name": "tests.processing.test_processing:halved", "factor": 3e38}] * 9
    with pytest.raises(ExperimentError, match="all 3 updates contain NaN or infinity"):
        fedsim.run({**tables, "processors": chain})


def largest(update: Tensor) -> Tensor:
    """Return finite numbers whose sum overflows."""
    return torch.full_like(update, torch.finfo(update.dtype).max / 2)


def finite(update: Tensor) -> Tensor:
    return update.nan_to_num()


@pytest.mark.parametrize("name", ["largest", "finite"])
def test_a_row_that_a_processor_leaves_finite_is_not_excluded(name, tiny_experiment):
    tables = {**tiny_experiment, "data": "tests.components:with_a_hole", "model": "logistic", "rounds": 1}
    tables |= {"processors": [f"{__name__}:{name}"], "aggregate": {"rule": "median", "nonfinite": "exclude"}}
    (record,) = fedsim.run({**tables, "partition": "tests.components:in_blocks"}).history
    assert record.excluded == []


def warning(update: Tensor) -> Tensor:
    warnings.warn("the processor is lossy", UserWarning, stacklevel=1)
    return update


def test_a_warning_of_several_processes_is_given_once(tiny_experiment, session):
    tables = {**tiny_experiment, "engine": "processes", "processes": 2, "rounds": 1}
    with pytest.warns(UserWarning, match="lossy") as caught:
        fedsim.run({**tables, "processors": [f"{__name__}:warning"]}, session=session)
    assert len(caught) == 1


TOP = {"name": "top_k", "k": 500, "error_feedback": True}
HALF = {"name": "tests.processing.test_processing:half", "error_feedback": True}
TABLES = {
    **{
        "rounds": 4,
        "workers": 6,
        "cohort": 3,
        "model": "logistic",
        "data": "tests.components:tiny",
        "precision": "float64",
    },
    **{"local": {"batch_size": 16, "lr": 0.1, "steps": 3}, "engine": "serial", "processors": [TOP]},
}


def test_only_processors_that_ask_for_it_have_a_residual():
    chain = [processor.bind(processor.get("sign"), {}, error_feedback=feedback) for feedback in (False, True)]
    assert list(initial_states(chain, torch.zeros(2), [(2,)])) == ["residual_1"]


def half(update):
    """A processor that depends continuously on its input, so that rounding errors stay small."""
    return update / 2


def test_each_worker_keeps_its_own_residual_between_its_rounds():
    """Compare with a plain PyTorch loop that stores what each worker has left out in a dictionary."""
    tables = {**TABLES, "sync": "gradients", "local": {"batch_size": 16, "lr": 0.1, "steps": 1}, "rounds": 5}
    tables |= {"aggregate": "mean"}
    result = fedsim.run({**tables, "processors": [HALF]})
    federation, left = Federation(logistic, components.tiny, 6, 16), {}
    for round in range(1, 6):
        sent = []
        for worker in sample_cohort(0, round, 6, 3).tolist():
            gradient = federation.gradient(federation.row, federation.epoch(round, worker)[0])
            total = gradient + left.get(worker, 0.0)
            sent.append(total / 2)
            left[worker] = total - sent[-1]
        federation.row = federation.row - 0.1 * torch.stack(sent).mean(0)
    assert torch.allclose(result.global_row, federation.row, rtol=0, atol=1e-12)


def test_the_clipped_norm_is_right_for_long_and_large_updates():
    for update in (torch.randn(3_000_000), torch.full((100,), 1e20), torch.ones(100_000, dtype=torch.float16)):
        clipped, _ = fedsim.compress(update, "clip", max_norm=1.0)
        assert clipped.double().norm() == pytest.approx(1.0, rel=1e-6 if update.dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize(("length", "share"), [(0.9, False), (1.1, True)])
def test_only_longer_updates_count_as_clipped(length, share):
    metrics = {}
    clip(torch.tensor([0.0, length]), metrics, max_norm=1.0)
    assert bool(metrics["clipped_share"]) == share


def test_the_noise_has_the_standard_deviation_of_the_setting():
    noise, nbytes = fedsim.compress(torch.zeros(20_000), "gaussian_noise", std=0.3)
    assert noise.std() == pytest.approx(0.3, rel=0.03)  # six standard errors
    assert nbytes == 80_000


def test_numbers_of_two_bytes_are_compressed_as_float32():
    update = torch.full((100_000,), 300.0, dtype=torch.float16)  # the sum and the norm exceed float16
    for name in ("sign", "terngrad", "cast"):
        assert torch.equal(fedsim.compress(update, name)[0], update)
    levels = fedsim.compress(torch.randn(64).half(), "qsgd", levels=2000)[0]
    assert levels.isfinite().all()


def test_an_update_without_numbers_is_refused():
    with pytest.raises(fedsim.ExperimentError, match=r"^update\[0\]: contains no floating-point numbers$"):
        fedsim.compress(torch.zeros(0), "qsgd")
