"""Properties of every client algorithm on which engines and experiments rely."""

from __future__ import annotations

import pickle

import pytest
import torch

from fedsim.clients import OuterProductGrad, client_algorithm
from tests.clients.variants import VARIANTS, every_variant, made


def test_every_element_wise_algorithm_has_a_variant():
    assert {name for name, _ in VARIANTS.values()} == {
        registration.name for registration in client_algorithm if registration.target.element_wise
    }


@every_variant
def test_algorithms_are_elementwise(variant):
    method, generator = made(variant), torch.Generator().manual_seed(0)
    rows, gradients = (torch.randn(*n, 3, 64, generator=generator, dtype=torch.double) for n in ((), (4,)))
    stacked, one_by_one = rows.clone(), rows.clone()
    state = method.start(stacked)
    for step in gradients:
        method.step(stacked, step.clone(), state)
    for row, steps in zip(one_by_one, gradients.unbind(1), strict=True):
        for part in (slice(0, 20), slice(20, 64)):
            state = method.start(row[part])
            for step in steps:
                method.step(row[part], step[part].clone(), state)
    assert torch.equal(stacked, one_by_one)


@every_variant
def test_a_fused_step_is_the_step_along_the_gradients(variant):
    """Shapes are drawn, and the state too, so that no term of a formula is 0."""
    method, generator = made(variant), torch.Generator().manual_seed(1)
    for _ in range(3):
        k, samples, outputs, inputs = torch.randint(1, 6, (4,), generator=generator).tolist()
        weights, left, right = (
            torch.randn(k, *shape, generator=generator, dtype=torch.double)
            for shape in ((outputs, inputs), (samples, outputs), (samples, inputs))
        )
        moved, expected = weights.clone(), weights.clone()
        states = method.start(moved), method.start(expected)
        for name, tensor in states[0].items():
            states[1][name].copy_(tensor.uniform_(0.1, 1, generator=generator))
        method.step_fused(moved, OuterProductGrad(left, right), states[0])
        method.step(expected, torch.einsum("kmo,kmi->koi", left, right), states[1])
        torch.testing.assert_close(moved, expected)
        torch.testing.assert_close(states[0], states[1])


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_has_the_shape_and_dtype_of_the_rows(variant, dtype):
    method, rows = made(variant), torch.randn(2, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    state = method.start(rows)
    assert {(tensor.shape, tensor.dtype) for tensor in state.values()} <= {(rows.shape, dtype)}
    lying = {name: tensor.data_ptr() for name, tensor in state.items()}
    assert len({rows.data_ptr(), *lying.values()}) == 1 + len(state)
    moved = rows.clone()
    for _ in range(2):
        method.step(moved, torch.ones_like(rows), state)
    assert moved.dtype == dtype
    assert {name: tensor.data_ptr() for name, tensor in state.items()} == lying


@every_variant
def test_algorithms_can_be_pickled(variant):
    assert pickle.loads(pickle.dumps(made(variant))) == made(variant)
