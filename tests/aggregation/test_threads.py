from __future__ import annotations

import pytest
import torch

import fedsim
from fedsim.aggregation import AggregationInputs, make_pipeline, resolve
from fedsim.aggregation.numerics.threads import WORTH_SHARING, alone_if_small


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
        fedsim.aggregate(updates, rule=counts_threads)
        pipeline(AggregationInputs(updates))
    assert seen == [1, 1, 2, 2]
