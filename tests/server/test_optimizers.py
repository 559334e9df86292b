"""Properties of every server optimizer that engines rely on."""

from __future__ import annotations

import pytest
import torch

from fedsim.server import server_optimizer
from tests.server.optimizers import every_variant, path


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slices_of_columns_step_like_the_whole_row(name, params, dtype):
    generator = torch.Generator().manual_seed(0)
    row, updates = (torch.randn(n, 1003, generator=generator, dtype=dtype) for n in (1, 5))
    plug = server_optimizer.get(name)
    optimizer = plug.bind(plug.check(params))
    parts = [slice(0, 1), slice(1, 500), slice(500, 500), slice(500, 1003)]
    whole, cut = row[0].clone(), row[0].clone()
    state, cut_state = optimizer.start(whole), optimizer.start(cut)
    for update in updates:
        sent = torch.cat(
            [optimizer.broadcast(cut[part], {k: tensor[part] for k, tensor in cut_state.items()}) for part in parts]
        )
        torch.testing.assert_close(sent, optimizer.broadcast(whole, state))
        optimizer.step(whole, update, state)
        for part in parts:
            optimizer.step(cut[part], update[part], {k: tensor[part] for k, tensor in cut_state.items()})
    torch.testing.assert_close(cut, whole)  # not the bits: ends of slices may take other instructions
    torch.testing.assert_close(cut_state, state)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_state_has_the_shape_and_dtype_of_the_row(name, params, dtype, case):
    row, update = case[0].to(dtype), case[1][0].to(dtype)
    plug = server_optimizer.get(name)
    optimizer = plug.bind(plug.check(params))
    state, before = optimizer.start(row), update.clone()
    moved = row.clone()
    optimizer.step(moved, update, state)
    assert torch.equal(update, before)
    assert moved.dtype == dtype
    assert not torch.equal(moved, row)
    assert {(tensor.shape, tensor.dtype) for tensor in state.values()} <= {(row.shape, dtype)}
    assert not {tensor.data_ptr() for tensor in state.values()} & {moved.data_ptr(), update.data_ptr()}


def test_bias_correction_is_accurate_in_float32():
    row, updates = torch.zeros(3), torch.ones(200, 3)
    ours = path("adam", row, updates, lr=1.0, beta2=0.9999, tau=1e-6, bias_correction=True)
    assert torch.allclose(ours, torch.arange(1, 201)[:, None].expand(200, 3).float(), rtol=2e-6)
