from __future__ import annotations

import pytest
import torch

from fedsim.clients import SGD, RowOptimizer
from fedsim.engines.trainers import loss_scaling
from fedsim.engines.trainers.loss_scaling import GradScaler, ScaledSolver, step_where, zero_where_not
from tests.clients.variants import every_variant, made

CPU = torch.device("cpu")


def plain_scale(goods, start, patience):
    """Where a scale is after each of some steps, good or not."""
    scale, streak, seen = start, 0, []
    for good in goods:
        if not good:
            scale, streak = max(scale / 2, loss_scaling.LEAST), 0
        else:
            streak += 1
            if streak == patience:
                scale, streak = scale * 2, 0
        seen.append(scale)
    return seen


def test_a_scale_starts_at_two_to_the_sixteenth_and_waits_two_thousand_steps():
    assert (loss_scaling.START, loss_scaling.PATIENCE) == (65536.0, 2000)
    assert GradScaler((3,), CPU).of().tolist() == [65536.0] * 3


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_scales_follow_each_row_by_itself(shape, monkeypatch):
    monkeypatch.setattr(loss_scaling, "PATIENCE", 4)
    scale, count = GradScaler(shape, CPU), max(1, *shape, 1)
    goods = torch.rand(60, count, generator=torch.Generator().manual_seed(0)) < 0.85
    seen = []
    for good in goods:
        gradients = [torch.ones(*shape, 5), torch.ones(*shape, 2, 3), torch.ones(shape)]
        for row in (~good).nonzero().flatten().tolist():
            gradients[1].view(count, -1)[row, 4] = (float("inf"), float("-inf"), float("nan"))[row]
        finite = scale.unscale(gradients)
        assert finite.view(-1).tolist() == good.tolist()
        seen.append(scale.of().view(-1).tolist())
    expected = [plain_scale(goods[:, row].tolist(), loss_scaling.START, 4) for row in range(count)]
    assert seen == [list(step) for step in zip(*expected, strict=True)]
    assert len({value for row in expected for value in row}) > 3


def test_a_scale_has_a_least_value():
    scale = GradScaler((), CPU)
    for _ in range(100):
        scale.unscale([torch.full((2,), float("inf"))])
    assert scale.of().item() == 2.0**-24


@pytest.mark.parametrize("places", [slice(0, 2), [0, 2]])
def test_only_the_rows_that_took_a_step_count_it(places):
    scale = GradScaler((3,), CPU)
    assert scale.unscale([torch.tensor([[1.0], [float("inf")]])], places).tolist() == [True, False]
    last = 1 if isinstance(places, slice) else 2
    assert scale.of().tolist() == [2.0**15 if row == last else 2.0**16 for row in range(3)]


def test_unscaling_is_exact():
    scale, gradients = GradScaler((2,), CPU), torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    scaled = gradients * 2.0**16
    scale.unscale([scaled])
    assert torch.equal(scaled, gradients)


@every_variant
def test_a_step_with_a_gradient_that_is_not_finite_is_not_taken(variant):
    """Neither weights nor state move, and the others' steps are the bits of an ordinary step."""
    generator = torch.Generator().manual_seed(0)
    solver = made(variant)
    rows = torch.randn(3, 4, 5, generator=generator)
    alone = [row.clone() for row in rows]
    state, states = solver.start(rows), [solver.start(row) for row in alone]
    for step in range(6):
        gradients, finite = torch.randn(3, 4, 5, generator=generator), torch.tensor([True, step % 2 == 0, step != 3])
        for row, its_state, gradient, good in zip(alone, states, gradients, finite, strict=True):
            if good:
                solver.step(row, gradient.clone(), its_state)
        gradients[~finite, 1] = float("nan")
        step_where(finite, solver, rows, gradients, state)
        assert torch.equal(rows, torch.stack(alone))
        for name in state:
            assert torch.equal(state[name], torch.stack([its_state[name] for its_state in states]))


def test_a_row_optimizer_takes_a_scaled_solver():
    row, gradient = torch.zeros(4), torch.zeros(4)
    scale = GradScaler((), CPU)
    optimizer = RowOptimizer(ScaledSolver(SGD(lr=1.0), scale), row, gradient)
    for value, expected in ((2.0**16, -1.0), (float("inf"), -1.0), (2.0**15, -2.0)):
        gradient.fill_(value)
        optimizer.step()
        assert row.tolist() == [expected] * 4


def test_gradients_that_are_not_finite_become_zero():
    gradients = [torch.tensor([[1.0, 2.0], [float("nan"), 3.0]]), torch.tensor([4.0, float("inf")])]
    zero_where_not(torch.tensor([True, False]), gradients)
    assert [gradient.tolist() for gradient in gradients] == [[[1.0, 2.0], [0.0, 0.0]], [4.0, 0.0]]
