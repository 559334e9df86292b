"""Batches on the pretend GPU: few kernels, no waits, and the same values as on the CPU."""

from __future__ import annotations

import pytest
import torch

from fedsim.data import CustomSubset, TensorData
from tests.device.pretend import GPU, download, upload

GENERATOR = torch.Generator().manual_seed(0)
DATA = {
    "images of one channel": ((1, 28, 28), torch.uint8, 1 / 77, -0.42),
    "images of three channels": ((3, 8, 8), torch.uint8, (1 / 50, 1 / 60, 1 / 70), (-0.1, 0.0, 0.3)),
    "numbers as they are": ((5,), torch.float32, 1.0, 0.0),
    "numbers of a narrower type": ((5,), torch.float32, 1 / 77, -0.42),
    "numbers of a wider type": ((5,), torch.float64, 2.0, 1.0),
}


def data_of(case, n=40):
    shape, dtype, scale, shift = DATA[case]
    inputs = torch.randint(0, 256, (n, *shape), generator=GENERATOR).to(dtype)
    return TensorData(inputs, torch.arange(n) % 10, scale, shift)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", DATA)
def test_a_batch_takes_three_launches_and_no_wait(case, dtype, gpu):
    data = data_of(case).to(torch.device("cpu"), dtype)
    on_gpu, positions = data.to(GPU, dtype), torch.tensor([3, 1, 3, 39])
    there = upload(positions)
    on_gpu.gather(there)
    with gpu.counting() as counts:
        inputs, targets = on_gpu.gather(there)
    assert counts.launches <= 3, counts.table()
    assert counts.waits == 0, counts.table()
    expected, labels = data.gather(positions)
    assert inputs.dtype == dtype
    torch.testing.assert_close(download(inputs), expected, rtol=0, atol=1e-15 if dtype == torch.float64 else 1e-6)
    assert torch.equal(download(targets), labels)


def test_tokens_stay_integers(gpu):
    data = TensorData(torch.arange(12).view(4, 3), torch.arange(4), dtype=torch.int64).to(GPU, torch.float64)
    inputs, _ = data.gather(upload(torch.tensor([2])))
    assert download(inputs).tolist() == [[6, 7, 8]]
    assert inputs.dtype == torch.int64


def test_a_shard_is_gathered_with_one_wait(gpu):
    data = data_of("images of one channel", n=2000).to(GPU, torch.float32)
    subset = CustomSubset(data, torch.arange(0, 2000, 2))
    next(subset.batches(10))
    with gpu.counting() as counts:
        assert sum(len(targets) for _, targets in subset.batches(10)) == 1000
    assert counts.waits == 1, counts.table()
