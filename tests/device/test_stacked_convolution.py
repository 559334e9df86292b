"""Stacked convolution on a GPU: the result of row-by-row convolutions, with a constant number of launches."""

from __future__ import annotations

import math
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F

import fedsim
from fedsim.errors import FedsimWarning
from fedsim.training import operations
from fedsim.training.operations import WAYS, Options, one_by_one, way_for
from fedsim.training.probe import SAMPLES, StackingProbe
from tests.device.agreement import ENGINES, TINY, assert_same_results, run_on_cpu, run_on_gpu, some_gpu, to_gpu
from tests.device.pretend import pretend_gpu, upload

MOST_LAUNCHES = 3  # forward or backward, with padding and all derivatives


def tensors(k, batch=2):
    generator = torch.Generator().manual_seed(0)
    shapes = (k * batch, 3, 7, 6), (k, 4, 3, 3, 2), (k, 4)
    return [torch.randn(shape, generator=generator, dtype=torch.double) for shape in shapes]


@pytest.mark.gpu
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("k", [2, 10])
def test_a_gpu_gives_the_outputs_and_derivatives_of_one_row_after_another(k, turns):
    def outputs_and_derivatives(convolve, leaves):
        leaves = [leaf.requires_grad_() for leaf in leaves]
        outputs = convolve(F.conv2d, *leaves, Options(padding=1))
        return outputs.detach(), *torch.autograd.grad(outputs, leaves, outputs.detach())

    expected = outputs_and_derivatives(one_by_one, tensors(k))
    with some_gpu():
        on_gpu = [to_gpu(tensor) for tensor in tensors(k)]
        actual = outputs_and_derivatives(WAYS[way_for(on_gpu[1], turns=turns)], on_gpu)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.allclose(ours.cpu(), theirs, rtol=0, atol=1e-9 * float(theirs.abs().max()))


@pytest.mark.parametrize(("turns", "most"), [(False, MOST_LAUNCHES), (True, MOST_LAUNCHES + 3)])
@pytest.mark.parametrize("k", [2, 5])
def test_launches_do_not_grow_with_the_rows(k, turns, most, gpu):
    """Turned kernels take two more copies, and the gradient of the inputs a call of its own."""
    leaves = [upload(tensor).requires_grad_() for tensor in tensors(k)]
    with gpu.counting() as forward:
        outputs = WAYS[way_for(leaves[1], turns=turns)](F.conv2d, *leaves, Options(padding=1))
    ones = torch.ones_like(outputs)
    with gpu.counting() as backward:
        torch.autograd.grad(outputs, leaves, ones)
    assert forward.waits == backward.waits == 0
    assert forward.launches <= MOST_LAUNCHES, forward.table()
    assert backward.launches <= most, backward.table()


TWO_CONVOLUTIONS = {**TINY, "rounds": 1, "model": "net"}


@pytest.fixture
def probes(monkeypatch):
    """Return a list of the StackingProbes of all runs."""
    made, of = [], StackingProbe.of
    monkeypatch.setattr(StackingProbe, "of", lambda *arguments: made.append(of(*arguments)) or made[-1])
    return made


@pytest.mark.gpu
@pytest.mark.parametrize(("engine", "precision"), [("batched", "float64"), ("batched, no graphs", "bf16")])
def test_a_run_on_a_gpu_turns_kernels(engine, precision, probes, monkeypatch):
    used, turned = [], WAYS["turned"]
    monkeypatch.setitem(WAYS, "turned", lambda *args: used.append(1) or turned(*args))
    tables = {**TWO_CONVOLUTIONS, "precision": precision}
    actual = run_on_gpu(tables, **ENGINES[engine])
    assert [probe.turns for probe in probes] == [True]
    assert used
    monkeypatch.setattr(operations, "MOST_TURNED_PRODUCTS", 0)
    used.clear()
    ordinary = run_on_gpu(tables, **ENGINES[engine])
    assert not used
    assert_same_results(ordinary, actual, 1e-9 if precision == "float64" else 2e-2)
    if precision == "float64":
        assert_same_results(run_on_cpu(tables), actual)


@pytest.mark.parametrize(("tables", "device"), [(TWO_CONVOLUTIONS, "cpu"), (TINY, "cuda")], ids=["cpu", "linear"])
def test_kernels_are_only_tried_on_a_gpu_where_there_are_convolutions(tables, device, gpu, probes):
    fedsim.run({**tables, "rounds": 1, "device": device, **ENGINES["batched"]})
    assert [probe.turns for probe in probes] == [False]


def wrong(factor, way, convolution, input, *rest):
    """A convolution whose input gradient is multiplied by `factor`."""
    if input.requires_grad:
        input = input.clone()
        input.register_hook(lambda gradient: gradient * factor)
    return way(convolution, input, *rest)


def wrong_for_many(way, convolution, input, *rest):
    """A convolution whose input gradient is only right for the few samples of most trial runs."""
    return wrong(1.01 if len(input) > 2 * SAMPLES else 1.0, way, convolution, input, *rest)


def failing(way, *args):
    raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED")


def failing_in_bf16(way, convolution, input, *rest):
    return failing(way) if input.dtype is torch.bfloat16 else way(convolution, input, *rest)


RELATIVE, FAILURE = "a gradient has the relative error ", "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"
WRONG = [
    (partial(wrong, 1.01), "float32", f"{RELATIVE}[0-9.]+e-0[1-3]"),
    (wrong_for_many, "float32", f"{RELATIVE}[0-9.]+e-0[1-3]"),
    (partial(wrong, math.nan), "float32", f"{RELATIVE}nan"),
    (failing, "float32", FAILURE),
    (failing_in_bf16, "bf16", FAILURE),
]


@cache
def with_ordinary_kernels(precision):
    """Return the parameters after a run in which no kernels are turned."""
    with some_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "MOST_TURNED_PRODUCTS", 0)
        tables = {**TWO_CONVOLUTIONS, "device": "cuda", "precision": precision, **ENGINES["batched"]}
        return fedsim.run(tables).global_row


@pytest.mark.parametrize(("implementation", "precision", "reason"), WRONG)
def test_turned_kernels_that_fail_the_check_on_the_device_are_not_used(implementation, precision, reason, monkeypatch):
    tables = {**TWO_CONVOLUTIONS, "device": "cuda", "precision": precision, **ENGINES["batched"]}
    monkeypatch.setitem(WAYS, "turned", partial(implementation, WAYS["turned"]))
    line = f"the faster gradient of convolutions failed a check on cuda:0, and is not used: .*{reason}"
    with pretend_gpu(), pytest.warns(FedsimWarning, match=line):
        actual = fedsim.run(tables)
    assert torch.equal(actual.global_row, with_ordinary_kernels(precision))
