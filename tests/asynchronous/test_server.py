from __future__ import annotations

import pytest
import torch

from fedsim.aggregation import column_blocks, server_optimizer
from fedsim.aggregation.averaging import mean
from fedsim.asynchronous.server import AsGradient
from fedsim.local import SGD
from fedsim.rows import new_rows
from tests.asynchronous.driving import delays_of, driven, policy_of


def server_of(name="asgd", n=3, **options):
    params = options.pop("params", {})
    return driven(policy_of(name, **params), delays_of([1.0] * n), watched=False, **options).server


def test_a_gradient_takes_the_place_of_its_row():
    row, gradient = torch.ones(3), torch.tensor([1.0, 2.0, 3.0])
    AsGradient().step(row, gradient, AsGradient().start(row))
    assert row.tolist() == [1, 2, 3]


def test_nobody_has_read_anything_at_the_start():
    server = server_of()
    assert server.version == 0
    assert server.read.tolist() == [-1] * 3
    assert server.units.tolist() == [0] * 3
    assert server.alive.tolist() == [0, 1, 2]


def test_staleness_is_versions_since_the_last_read():
    server = server_of()
    server.pull(0)
    assert server.staleness(0) == 0
    server.moved()
    server.step(torch.ones(3, dtype=torch.double))
    assert (server.version, server.staleness(0)) == (2, 2)
    server.pull(0)
    assert server.staleness(0) == 0
    server.stay(1)
    assert server.staleness(1) == 0
    server.moved()
    server.stay(1)
    assert server.staleness(1) == 1, "who stays has read no more"


def test_a_pull_is_a_copy_of_what_the_optimizer_sends():
    server = server_of("fedbuff", optimizer=server_optimizer.get("bmuf").bind({"nesterov": True}))
    server.memory.states["parameters"]["delta"].fill_(1.0)
    server.pull(1)
    server.begin(1, 1)
    assert server.replicas[1].tolist() == pytest.approx([1.9, -1.1, 1.4])
    assert server.rows[1].tolist() == server.replicas[1].tolist()
    server.rows[1].zero_()
    server.global_row.zero_()
    assert server.replicas[1].tolist() == pytest.approx([1.9, -1.1, 1.4])
    assert server.delta(1).tolist() == pytest.approx([-1.9, 1.1, -1.4])
    assert server.rows[1].tolist() == [0.0] * 3, "rows are left as they are"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_float32_row_is_put_together_again_to_the_bit(dtype):
    server = server_of("fedbuff", dtype=dtype, start=torch.randn(100).tolist())
    server.pull(0)
    server.rows[0].copy_(torch.randn(100) * 1e-3)
    again = (server.replicas[0].double() + server.delta(0)).to(dtype)
    assert server.delta(0).dtype == torch.float64
    if dtype == torch.float32:
        assert torch.equal(again, server.rows[0])
    else:
        assert torch.allclose(again, server.rows[0], rtol=0, atol=1e-15)


def test_each_worker_has_a_solver_s_state_of_its_own():
    server = server_of("easgd", solver=SGD(lr=1.0, momentum=0.5))
    for _ in range(2):
        server.step_replica(0, torch.ones(3, dtype=torch.double))
    server.step_replica(1, torch.ones(3, dtype=torch.double))
    assert (server.replicas - server.global_row).tolist() == [[-2.5] * 3, [-1.0] * 3, [0.0] * 3]
    assert server.version == 0
    assert server.shared == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [5, 16_384, 16_387, 50_001])
@pytest.mark.parametrize("slots", [range(7), [0, 2, 3], [4]])
def test_the_mean_is_to_the_bit_that_of_the_rule(slots, d, dtype):
    server = server_of(n=7, start=[0.0] * d, dtype=dtype)
    rows = new_rows(7, d, dtype).copy_(torch.randn(7, d, dtype=dtype))
    server.memory.rows = rows
    expected = torch.cat([mean(rows[list(slots)][:, block]) for block in column_blocks(d)])
    assert torch.equal(server.mean(list(reversed(slots))), expected)


def test_buffers_move_by_the_part_of_the_workers():
    """Four workers: one of them is a quarter; of those who are alive, a third."""
    server = server_of(n=4, global_buffers=[8.0])
    server.memory.buffers[:] = torch.tensor([[0.0], [4.0], [16.0], [24.0]])
    server.mix_buffers([0])
    assert server.memory.global_buffers.item() == 6.0
    server.mix_buffers([1, 2])
    assert server.memory.global_buffers.item() == 8.0
    server.living[3] = 0
    server.mix_buffers([0, 1, 2])
    assert server.memory.global_buffers.item() == pytest.approx(20 / 3)
    server.mix_buffers([3], share=0.5)
    assert server.memory.global_buffers.item() == pytest.approx(46 / 3)


@pytest.mark.parametrize(
    ("policy", "began_with", "globally"), [("average", 8.0, 6.0), ("local", 5.0, 6.0), ("server", 8.0, 8.0)]
)
def test_whose_buffers_work_begins_with(policy, began_with, globally):
    server = server_of(n=4, global_buffers=[8.0], buffers=policy)
    server.memory.own_buffers[:] = 5.0
    server.pull(0)
    server.begin(0, 2)
    assert server.memory.buffers[0].item() == began_with
    server.memory.buffers[0] = 0.0
    server.end(0, 2)
    server.mix_buffers([0])
    assert server.memory.global_buffers.item() == globally
    assert server.memory.own_buffers[:, 0].tolist() == [5.0, 5.0, 0.0 if policy == "local" else 5.0, 5.0]


def test_all_that_lasts_are_tensors():
    """So that processes can share them."""
    server = server_of("dc_asgd", params={"adaptive": True}, solver=SGD(momentum=0.5))
    tensors = list(server.own_tensors.values())
    kept = [server.replicas, server.counts, server.step_seconds, server.shared["momentum"]]
    assert all(any(tensor is other for other in tensors) for tensor in [*kept, server.remembered["mean_square"]])
    server.pull(1)
    assert server.counts.tolist() == [0, -1, 0, -1, 0, 0, 0, 1, 1, 1]
