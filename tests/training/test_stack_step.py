"""A local step of a stack: joined gradients act like single ones and move only the rows that may move."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fedsim
from fedsim.runs.setup import begun
from fedsim.training import stack_step
from fedsim.training.stack_step import Batch, StackState, StackStep, gather
from fedsim.training.stacked_module import StackedModule
from tests.clients.variants import every_variant, made
from tests.engines.zoo import experiment

K, BATCH = 4, 3
GPU = torch.device("cuda")  # only a name: the step runs where its tensors are


@pytest.fixture(scope="module")
def begun_run():
    """Return the task and the memory of a small experiment, which the tests only read."""
    with (
        fedsim.Session() as session,
        begun(fedsim.Experiment(**experiment("convolution"), engine="serial"), session) as (task, engine),
    ):
        yield task, engine.shared


@pytest.fixture
def steps(begun_run):
    """Return a task, its stacked module, a function that creates the state of K different rows, and a batch."""
    task, shared = begun_run
    module = StackedModule(task.new_module, merged=True)

    def state(algorithm):
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(K, module.layout.d, generator=generator, dtype=task.dtype) / 4
        buffers = module.unpack_buffers(shared.server.buffers.expand(K, -1))
        return StackState(module, rows, algorithm.start(rows), buffers)

    batch = Batch(*gather(shared.data.train, torch.arange(K * BATCH).view(K, BATCH)), torch.full((K, BATCH), 1 / BATCH))
    moments = [(1, worker, 0) for worker in range(K)]
    return task, module, state, batch._replace(weights=batch.weights.to(task.dtype), moments=moments)


@pytest.mark.parametrize("way", ["all rows", "some rows", "left products"])
@every_variant
def test_joined_gradients_move_rows_and_state_as_single_ones_do(variant, way, steps, monkeypatch):
    task, module, state, batch = steps
    monkeypatch.setattr(stack_step, "LEFT_PRODUCT_BYTES", 1 if way == "left products" else 2**40)
    task = replace(task, algorithm=made(variant))
    active = torch.tensor([True, False, True, False]) if way == "some rows" else None
    single, together = (state(task.algorithm) for _ in range(2))
    start = single.rows.clone()
    on_cpu, on_gpu = StackStep(task, module), StackStep(replace(task, device=GPU), module)
    for _ in range(3):
        losses = on_cpu(single, batch, active), on_gpu(together, batch, active)
        torch.testing.assert_close(*losses)
    torch.testing.assert_close(single.rows, together.rows, rtol=0, atol=1e-12)
    torch.testing.assert_close(single.algorithm_state, together.algorithm_state, rtol=0, atol=1e-12)
    moved = (together.rows != start).any(1)
    assert torch.equal(moved, torch.ones(K, dtype=torch.bool) if active is None else active)


def test_state_that_only_some_workers_add_in_their_step_is_zero_for_the_others():
    state = StackState(SimpleNamespace(views=lambda rows: []), torch.zeros(3, 2), {}, [])
    for places, value in ((slice(2, 3), 5.0), ([0], 7.0)):
        some = state.of(places)
        some.state_of("momentum")[:] = value
        state.take_back(some, moved=True)
    assert state.algorithm_state["momentum"].tolist() == [[7, 7], [0, 0], [5, 5]]
