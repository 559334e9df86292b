"""User-defined rules and pre-aggregators: what they may return and how many threads they get."""

from __future__ import annotations

import pytest
import torch

import fedsim
from fedsim.aggregation import AggregationInputs, LinearCombination, make_pipeline, resolve
from fedsim.aggregation.numerics.columns import map_columns
from fedsim.aggregation.numerics.threads import FEW_ROWS, WORTH_SHARING, alone_if_small
from fedsim.errors import ExperimentError


def sums_of_rows(updates):
    return updates.sum(1)


def as_numpy(updates):
    return updates.mean(0).numpy()


def short_mix(updates):
    return LinearCombination(torch.ones(2, dtype=torch.double))


def halved(updates):
    return updates / 2


def first_three(updates):
    return updates[:3]


def mean_alone(updates):
    return updates.mean(0)


def mean_of_all_numbers(updates):
    return updates.mean()


mean_of_all_numbers.columnwise = True


UPDATES = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("stages", "wanted", "returned"),
    [
        (["sums_of_rows"], "a row [d], which is a tensor of shape [4]", "a tensor of shape [5]"),
        (["as_numpy"], "a row [d]", "a ndarray"),
        (
            ["short_mix"],
            "a LinearCombination with coefficients [n], which is a tensor of shape [5]",
            "a tensor of shape [2]",
        ),
        (["mean_alone", "median"], "rows [m, d], which is a tensor of shape [5, 4]", "a tensor of shape [4]"),
    ],
    ids=str,
)
def test_a_result_of_a_wrong_shape_is_an_error(stages, wanted, returned):
    names = [name if name == "median" else f"{__name__}:{name}" for name in stages]
    with pytest.raises(fedsim.ExperimentError) as caught:
        fedsim.aggregate(UPDATES, names)
    (line,) = caught.value.lines
    assert line.startswith(f"{names[0]}: must return ")
    assert "for updates [n, d] = [5, 4]; it returned " in line
    assert wanted in line
    assert line.endswith(f"it returned {returned}")


@pytest.mark.parametrize("rule", ["median", "medoid", "mean"])
@pytest.mark.parametrize(("stage", "rows"), [("halved", UPDATES / 2), ("first_three", UPDATES[:3])])
def test_a_pre_aggregator_may_return_rows(stage, rows, rule):
    path = f"{__name__}:{stage}"
    assert torch.equal(fedsim.pre_aggregate(UPDATES, path), rows)
    assert torch.equal(fedsim.aggregate(UPDATES, [path, rule]), fedsim.aggregate(rows, rule))
    mixed = fedsim.aggregate(UPDATES, ["nnm", path, rule], f=1)
    replaced = halved if stage == "halved" else first_three
    assert torch.allclose(mixed, fedsim.aggregate(replaced(fedsim.pre_aggregate(UPDATES, "nnm", f=1)), rule))


def test_a_columnwise_rule_that_returns_a_number_is_an_error(tiny_experiment):
    rule = f"{__name__}:mean_of_all_numbers"
    with pytest.raises(fedsim.ExperimentError, match=rf"^{rule}: must return a row \[d\], .* of shape \[\]$"):
        fedsim.run({**tiny_experiment, "aggregate": rule})


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_number_of_threads_is_restored_after_an_error():
    with pytest.raises(KeyError), alone_if_small(1):
        raise KeyError
    assert torch.get_num_threads() == 2


def test_rules_use_one_thread_for_small_updates():
    seen = []

    def counts_threads(updates):
        seen.append(torch.get_num_threads())
        return updates[0].clone()

    pipeline = make_pipeline(resolve(counts_threads, {}))
    for n, d in ((2, 5), (4, WORTH_SHARING // 4)):
        updates = torch.ones(n, d)
        fedsim.aggregate(updates, counts_threads)
        pipeline(AggregationInputs(updates))
    assert seen == [1, 1, 2, 2]


def test_blocks_of_few_rows_use_one_thread():
    seen = []

    def counts_threads(block):
        seen.append(torch.get_num_threads())
        return block.mean(0)

    for n in (FEW_ROWS, FEW_ROWS + 1):
        map_columns(torch.ones(n, 5), counts_threads)
    assert seen == [1, 2]


def test_a_plain_parameter_is_checked_in_each_call():
    updates = torch.arange(5.0)[:, None]
    assert fedsim.aggregate(updates, "trimmed_mean", f=1).item() == 2
    for wrong in (1.0, True, "1", None):  # some of these compare equal to 1
        with pytest.raises(ExperimentError):
            fedsim.aggregate(updates, "trimmed_mean", f=wrong)
