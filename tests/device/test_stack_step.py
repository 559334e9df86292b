"""The number of kernels of a stacked step does not depend on the number of parameters and members."""

from __future__ import annotations

import pytest
import torch

from fedsim.clients import SGD
from fedsim.core.rows import index_of, new_rows, pull_down
from fedsim.models import Net
from fedsim.training.stack_step import StackState, joined, move
from fedsim.training.stacked_module import StackedModule
from tests.device.pretend import GPU, download, upload

K = 3
MOMENTUM = 3  # mul_, add_, add_
KEEP = 4  # for rows that must not move: rows and momentum are cloned and written back


@pytest.mark.parametrize(("some", "launches"), [(False, 1 + MOMENTUM), (True, 1 + MOMENTUM + KEEP)])
def test_a_step_of_momentum_joins_all_gradients_and_moves_all_rows_at_once(some, launches, gpu):
    module = StackedModule(lambda: Net().to(GPU))
    rows, algorithm = upload(torch.zeros(K, module.layout.d)), SGD(lr=1.0, momentum=0.5)
    state = StackState(module, rows, algorithm.start(rows), [])
    gradients = [stack.clone() for stack in module.views(torch.ones_like(rows))]
    moving = upload(torch.tensor([True, False, True])) if some else None
    with gpu.counting() as counts:
        move(algorithm, state, joined(module.layout.parameters, gradients), moving)
    assert (counts.launches, counts.waits) == (launches, 0), counts.table()
    assert download(rows)[:, 0].tolist() == ([-1, 0, -1] if some else [-1, -1, -1])


@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [1, 3, 5], [5, 0, 2]], ids=str)
def test_rows_are_pulled_down_in_one_launch_without_a_wait(slots, gpu):
    rows, sent = new_rows(6, 9, torch.float32, GPU), upload(torch.arange(9.0))
    index = index_of(slots, GPU)
    with gpu.counting() as counts:
        pull_down(sent, rows, index)
    assert (counts.launches, counts.waits) == (1, 0), counts.table()
    assert [slot for slot, row in enumerate(download(rows)) if row.any()] == sorted(slots)


def test_members_that_do_not_lie_side_by_side_take_one_wait_to_be_chosen_and_copied_back(gpu):
    module = StackedModule(lambda: Net().to(GPU))
    rows, algorithm = upload(torch.zeros(K, module.layout.d)), SGD(momentum=0.5)
    state = StackState(module, rows, algorithm.start(rows), [upload(torch.zeros(K, 2))])
    with gpu.counting() as counts:
        theirs = state.of([2, 0])
        theirs.rows.add_(1)
        state.take_back(theirs, moved=True)
    assert counts.waits == 1, counts.table()
    assert download(rows)[:, 0].tolist() == [1, 0, 1]
