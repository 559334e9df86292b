from __future__ import annotations

import pytest
import torch

from fedsim.aggregation import column_blocks
from fedsim.aggregation.rules.averages import mean
from fedsim.clients import SGD
from fedsim.core.rows import new_rows
from fedsim.server import server_optimizer
from tests.asynchronous.simulated import delays_of, policy_of, simulate


def server_of(name="asgd", n=3, **options):
    params = options.pop("params", {})
    return simulate(policy_of(name, **params), delays_of([1.0] * n), watched=False, **options).server


def test_staleness_is_the_number_of_versions_since_the_last_read():
    server = server_of()
    server.pull(0)
    assert server.staleness(0) == 0
    server.increment_version()
    server.step(torch.ones(3, dtype=torch.double))
    assert (server.version, server.staleness(0)) == (2, 2)
    server.pull(0)
    assert server.staleness(0) == 0
    server.keep_model(1)
    assert server.staleness(1) == 0
    server.increment_version()
    server.keep_model(1)
    assert server.staleness(1) == 1, "keep_model does not read"


def test_pull_copies_the_broadcast_of_the_optimizer():
    server = server_of("fedbuff", optimizer=server_optimizer.get("bmuf").bind({"nesterov": True}))
    server.shared.states["parameters"]["delta"].fill_(1.0)
    server.pull(1)
    server.begin(1, 1)
    assert server.replicas[1].tolist() == pytest.approx([1.9, -1.1, 1.4])
    assert server.rows[1].tolist() == server.replicas[1].tolist()
    server.rows[1].zero_()
    server.global_row.zero_()
    assert server.replicas[1].tolist() == pytest.approx([1.9, -1.1, 1.4])
    assert server.delta(1).tolist() == pytest.approx([-1.9, 1.1, -1.4])
    assert server.rows[1].tolist() == [0.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_start_plus_delta_is_a_float32_row_to_the_bit(dtype):
    server = server_of("fedbuff", dtype=dtype, start=torch.linspace(-2, 2, 100).tolist())
    server.pull(0)
    server.rows[0].copy_(torch.linspace(-2, 3, 100) / 1013)
    again = (server.replicas[0].double() + server.delta(0)).to(dtype)
    assert server.delta(0).dtype == torch.float64
    if dtype == torch.float32:
        assert torch.equal(again, server.rows[0])
    else:
        assert torch.allclose(again, server.rows[0], rtol=0, atol=1e-15)


def test_each_worker_has_its_own_solver_state():
    server = server_of("easgd", solver=SGD(lr=1.0, momentum=0.5))
    for _ in range(2):
        server.step_replica(0, torch.ones(3, dtype=torch.double))
    server.step_replica(1, torch.ones(3, dtype=torch.double))
    assert (server.replicas - server.global_row).tolist() == [[-2.5] * 3, [-1.0] * 3, [0.0] * 3]
    assert server.version == 0
    assert server.solver_state == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [5, 16_387])
@pytest.mark.parametrize("slots", [range(7), [0, 2, 3], [4]])
def test_mean_has_the_bits_of_the_rule_mean(slots, d, dtype):
    server = server_of(n=7, start=[0.0] * d, dtype=dtype)
    rows = new_rows(7, d, dtype).copy_(torch.randn(7, d, dtype=dtype, generator=torch.Generator().manual_seed(0)))
    server.shared.rows = rows
    expected = torch.cat([mean(rows[list(slots)][:, block]) for block in column_blocks(d)])
    assert torch.equal(server.mean(list(reversed(slots))), expected)


def test_buffers_move_by_the_fraction_of_the_workers():
    """One of four workers is a quarter, and a third of the three that are alive at the end."""
    server = server_of(n=4, global_buffers=[8.0])
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
    server = server_of(n=4, global_buffers=[8.0], buffers=policy)
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


def test_own_tensors_hold_all_state():
    """Processes share these tensors."""
    server = server_of("dc_asgd", params={"adaptive": True}, solver=SGD(momentum=0.5))
    tensors = list(server.own_tensors.values())
    kept = [server.replicas, server.counts, server.step_seconds, server.solver_state["momentum"]]
    assert all(any(tensor is other for other in tensors) for tensor in [*kept, server.policy_state["mean_square"]])
    server.pull(1)
    assert server.counts.tolist() == [0, -1, 0, -1, 0, 0, 0, 1, 1, 1]
