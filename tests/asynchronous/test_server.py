from __future__ import annotations

import pytest
import torch

from tests.asynchronous.simulated import delays_of, policy_of, simulate


def server_of(**options):
    return simulate(policy_of("asgd"), delays_of([1.0] * 4), **options).server


def test_buffers_move_by_the_fraction_of_the_workers():
    """One of four workers is a quarter, and a third of the three that are alive at the end."""
    server = server_of(global_buffers=[8.0])
    server.shared.buffers[:] = torch.tensor([[0.0], [4.0], [16.0], [24.0]])
    server.mix_buffers([0])
    assert server.shared.global_buffers.item() == 6.0
    server.mix_buffers([1, 2])
    assert server.shared.global_buffers.item() == 8.0
    server.alive_mask[3] = 0
    server.mix_buffers([0, 1, 2])
    assert server.shared.global_buffers.item() == pytest.approx(20 / 3)
    server.mix_buffers([3], share=0.5)
    assert server.shared.global_buffers.item() == pytest.approx(46 / 3)


@pytest.mark.parametrize(
    ("policy", "began_with", "globally"), [("average", 8.0, 6.0), ("local", 5.0, 6.0), ("server", 8.0, 8.0)]
)
def test_work_starts_with_the_buffers_of_the_buffer_policy(policy, began_with, globally):
    server = server_of(global_buffers=[8.0], buffers=policy)
    server.worker_states.save([2], {"buffers": torch.full((4, 1), 5.0, dtype=torch.double)}, [0])
    server.pull(0)
    server.begin(0, 2)
    assert server.shared.buffers[0].item() == began_with
    server.shared.buffers[0] = 0.0
    server.end(0, 2)
    server.mix_buffers([0])
    assert server.shared.global_buffers.item() == globally
    kept = server.worker_states.tensors()
    assert [tensor.flatten().tolist() for tensor in kept.values()] == ([[2], [0.0]] if policy == "local" else [])
