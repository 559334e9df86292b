"""The server of an asynchronous run: model buffers, and updates of the embedding rows that a batch uses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedsim import ExperimentError
from fedsim.asynchronous.server_state import step_where_touched, tables_of
from fedsim.clients import SGD
from fedsim.core.rows import Layout
from tests.asynchronous.simulated import delays_of, policy_of, simulate


def server_of(**options):
    return simulate(policy_of("asgd"), delays_of([1.0] * 4), **options).server


def test_buffers_move_by_the_fraction_of_the_workers():
    """One of four workers moves the buffers by a quarter, and by a third when three workers are alive at the end."""
    server = server_of(global_buffers=[8.0])
    server.shared.cohort.buffers[:] = torch.tensor([[0.0], [4.0], [16.0], [24.0]])
    server.mix_buffers([0])
    assert server.shared.server.buffers.item() == 6.0
    server.mix_buffers([1, 2])
    assert server.shared.server.buffers.item() == 8.0
    server.alive_mask[3] = 0
    server.mix_buffers([0, 1, 2])
    assert server.shared.server.buffers.item() == pytest.approx(20 / 3)
    server.mix_buffers([3], share=0.5)
    assert server.shared.server.buffers.item() == pytest.approx(46 / 3)


@pytest.mark.parametrize(
    ("policy", "began_with", "globally"), [("average", 8.0, 6.0), ("local", 5.0, 6.0), ("frozen", 8.0, 8.0)]
)
def test_work_starts_with_the_buffers_of_the_buffer_policy(policy, began_with, globally):
    server = server_of(global_buffers=[8.0], buffers=policy)
    server.worker_states.save([2], {"buffers": torch.full((4, 1), 5.0, dtype=torch.double)}, [0])
    server.pull(0)
    server.begin(0, 2)
    assert server.shared.cohort.buffers[0].item() == began_with
    server.shared.cohort.buffers[0] = 0.0
    server.end(0, 2)
    server.mix_buffers([0])
    assert server.shared.server.buffers.item() == globally
    saved = server.worker_states.tensors()
    assert [tensor.flatten().tolist() for tensor in saved.values()] == ([[2], [0.0]] if policy == "local" else [])


def module(*, sparse=False):
    return nn.ModuleDict(
        {
            "first": nn.Linear(3, 2),
            "words": nn.Embedding(5, 4, sparse=sparse),
            "middle": nn.Linear(4, 3),
            "bags": nn.EmbeddingBag(6, 2),
        }
    )


def test_a_sparse_step_is_bit_identical_to_a_dense_step_and_writes_no_unused_row():
    made = module()
    d = Layout.of(made).d
    tables = tables_of(made, SGD(lr=0.1))
    assert tables == ((8, 5, 4), (8 + 20 + 15, 6, 2))
    gradient = torch.randn(d, generator=torch.Generator().manual_seed(1))
    words, bags = gradient[8:28].view(5, 4), gradient[43:].view(6, 2)
    words[[0, 3]] = 0
    words[2, 1:] = 0  # row 2 remains in use
    bags[:] = 0
    row = torch.randn(d, generator=torch.Generator().manual_seed(2))
    dense = row.clone()
    SGD(lr=0.1).step(dense, gradient, {})
    row[8:28].view(5, 4)[[0, 3]] = float("nan")  # as if another process were writing these rows at this moment
    before = row.clone()
    step_where_touched(SGD(lr=0.1), row, gradient, tables)
    assert torch.equal(row[8:28].view(5, 4)[[0, 3]].isnan(), torch.ones(2, 4, dtype=torch.bool))
    touched = ~before.isnan()
    assert torch.equal(row[touched], dense[touched])


@pytest.mark.parametrize("changes", [{"momentum": 0.5}, {"weight_decay": 0.01}])
def test_steps_with_momentum_or_weight_decay_are_dense_and_refuse_sparse_embeddings(changes):
    assert tables_of(module(), SGD(lr=0.1, **changes)) == ()
    with pytest.raises(ExperimentError, match=r"local: words\.weight is a sparse embedding .* remove local\."):
        tables_of(module(sparse=True), SGD(lr=0.1, **changes))
