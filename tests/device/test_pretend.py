"""The pretend GPU refuses what CUDA refuses, and counts launches and waits."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device.pretend import GPU, DeviceError, download, upload
from tests.device.pretend.counting import DOWNLOAD, READ, SYNCHRONISATION


@pytest.fixture
def x(gpu):
    return upload(torch.arange(6.0).view(2, 3))


def recurrent(x, state, *, in_one_chunk=True):
    """Run a recurrent network with two units on a sequence of two, for a batch of one."""
    parts = torch.ones(14, device="cuda").split([6, 4, 2, 2])
    weights = [part.view(2, -1).squeeze(1) for part in parts]
    weights = weights if in_one_chunk else [weight.clone() for weight in weights]
    return torch.rnn_tanh(x.unsqueeze(0), state, weights, True, 1, 0.0, True, False, True)


REFUSED = {
    "a host matrix": lambda x: x @ torch.zeros(3, 2),
    "a number of the host in a stack": lambda x: torch.stack([x[0, 0], torch.tensor(1.0)]),
    "a result on the host": lambda x: torch.zeros(2, 3).add_(x),
    "a number of the GPU added to a number of the host": lambda x: torch.tensor(1.0).add_(x[0, 0]),
    "rows chosen by positions of the host": lambda x: x.index_select(0, torch.tensor([1])),
    "host rows indexed on the GPU": lambda x: torch.zeros(3)[torch.tensor([1], device="cuda")],
    "a generator of the host": lambda x: x.normal_(generator=torch.Generator()),
    "a copy from the host in a capture": lambda x: capture(lambda: x.copy_(torch.ones(2, 3))),
    "positions of the host in a capture": lambda x: capture(lambda: x[torch.tensor([0])]),
    "a synchronisation in a capture": lambda x: capture(torch.cuda.synchronize),
    "a state that cuDNN does not read": lambda x: recurrent(x, torch.zeros(1, 1, 4, device="cuda")[:, :, ::2]),
    "a tensor of Python numbers in a capture": lambda x: capture(lambda: torch.tensor([1.0], device="cuda")),
    "an array": lambda x: x.numpy(),
    "an array that NumPy asks for": lambda x: x.__array__(),
}


def capture(step):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


@pytest.mark.parametrize("case", REFUSED)
def test_operations_that_cuda_refuses_are_refused(case, x):
    with pytest.raises((DeviceError, TypeError), match="device|cuda|captur|contiguous"):
        REFUSED[case](x)
    assert not torch.cuda.is_current_stream_capturing()


def test_a_recurrent_network_takes_contiguous_states_and_weights_in_one_chunk(x):
    outputs, _ = recurrent(x, torch.zeros(1, 1, 2, device="cuda"))
    assert outputs.device == GPU
    with pytest.warns(UserWarning, match="RNN module weights are not part of single contiguous chunk of memory"):
        recurrent(x, torch.zeros(1, 1, 2, device="cuda"), in_one_chunk=False)


COUNTED = {  # (launches, uploads, downloads, reads, synchronisations)
    "a view": (lambda x: x[0].view(3, 1), (0, 0, 0, 0, 0)),
    "an allocation": (lambda x: torch.empty_like(x), (0, 0, 0, 0, 0)),
    "a sum of two": (lambda x: x + x, (1, 0, 0, 0, 0)),
    "zeros": (lambda x: torch.zeros(2, device="cuda"), (1, 0, 0, 0, 0)),
    "nothing": (lambda x: x[:0] + 1, (0, 0, 0, 0, 0)),
    "a copy from the host": (lambda x: x.copy_(torch.ones(2, 3)), (0, 1, 0, 0, 0)),
    "a copy to the host": (lambda x: torch.ones(2, 3).copy_(x), (0, 0, 1, 0, 0)),
    "to": (lambda x: x.to("cpu").to(x), (0, 1, 1, 0, 0)),
    "a number set": (lambda x: x.__setitem__(0, 1.0), (2, 0, 0, 0, 0)),
    "a truth read": (lambda x: bool((x >= 0).all()), (2, 0, 0, 1, 0)),
    "a list": (lambda x: x.tolist(), (0, 0, 1, 0, 0)),
    "a mask": (lambda x: x[x > 2], (2, 0, 0, 1, 0)),
    "positions of the host": (lambda x: x[torch.tensor([1])], (1, 1, 0, 0, 0)),
    "to, without blocking": (lambda x: torch.ones(3).to("cuda", non_blocking=True), (0, 1, 0, 0, 0)),
    "a synchronisation": (lambda x: torch.cuda.synchronize(), (0, 0, 0, 0, 1)),
}


@pytest.mark.parametrize("case", COUNTED)
def test_launches_and_waits_are_counted(case, gpu, x):
    function, expected = COUNTED[case]
    with gpu.counting() as counts:
        function(x)
    counted = counts.launches, counts.uploads, counts.of(DOWNLOAD), counts.of(READ), counts.of(SYNCHRONISATION)
    assert counted == expected, counts.table()
    assert counts.waits == sum(expected[1:]) - (case == "to, without blocking")


def aside(function):
    """Call a function on a side stream. Return the stream and the result."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return torch.cuda.current_stream(), function()


def reading_of_an_early_event(x):
    event = torch.cuda.Event()
    result = aside(lambda: event.record() or x + 1)[1]
    event.synchronize()
    result.tolist()


def pinned_and_copied():
    host = torch.ones(3).pin_memory()
    host.to("cuda", non_blocking=True)
    return host


TOO_EARLY = {
    "a read": lambda x: aside(lambda: x + 1)[1].tolist(),
    "a read of a number": lambda x: aside(lambda: x.sum())[1].item(),
    "a copy to the host": lambda x: aside(lambda: x + 1)[1].cpu(),
    "a copy in place to the host": lambda x: torch.ones(2, 3).copy_(aside(lambda: x + 1)[1]),
    "a use": lambda x: aside(lambda: x + 1)[1] * 2,
    "a use of a view": lambda x: aside(lambda: x.add_(1))[1][0] * 2,
    "a change of what another stream reads": lambda x: aside(lambda: x.sum())[1] is x.zero_(),
    "a wait for an event before the work": reading_of_an_early_event,
    "a use of a result of another stream by a side stream": lambda x: aside((x + 1).sum),
    "a replay on another stream": lambda x: (aside(capture(lambda: x.add_(1)).replay), x.tolist()),
    "a list of a copy that has not arrived": lambda x: x.to("cpu", non_blocking=True).tolist(),
    "an array of a copy that has not arrived": lambda x: x.to("cpu", non_blocking=True).numpy(),
    "a sum of a copy that has not arrived": lambda x: x.to("cpu", non_blocking=True).sum(),
    "a change of what is being copied": lambda x: pinned_and_copied().zero_(),
}


@pytest.mark.parametrize("case", TOO_EARLY)
def test_memory_that_another_stream_may_still_use_is_refused(case, x):
    with pytest.raises(DeviceError, match="before the stream of its last use has been waited for"):
        TOO_EARLY[case](x)


WAITS_FOR = {
    "wait_stream": lambda side, event: torch.cuda.current_stream().wait_stream(side),
    "wait_event": lambda side, event: torch.cuda.current_stream().wait_event(event),
    "an event": lambda side, event: event.wait(),
    "a query": lambda side, event: event.query(),
    "a synchronised event": lambda side, event: event.synchronize(),
    "a synchronised stream": lambda side, event: side.synchronize(),
    "a synchronised device": lambda side, event: torch.cuda.synchronize(),
    "another stream that has waited": lambda side, event: aside(lambda: event.wait())[0].synchronize(),
}


@pytest.mark.parametrize("how", WAITS_FOR)
def test_memory_may_be_used_after_a_wait(how, x):
    event = torch.cuda.Event()
    side, result = aside(lambda: [x + 1, event.record()][0])
    WAITS_FOR[how](side, event)
    assert result.sum().item() == 21.0
    x.zero_()


def test_copies_of_pinned_memory_are_done_after_a_wait(x):
    host, copied = x.to("cpu", non_blocking=True), pinned_and_copied()
    assert host.is_pinned()
    torch.cuda.current_stream().synchronize()
    assert host.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    copied.zero_()


def test_large_copies_from_pageable_memory_wait(gpu):
    for host, waits in ((torch.ones(2**14), 0), (torch.ones(2**14 + 1), 1), (torch.ones(2**15).pin_memory(), 0)):
        with gpu.counting() as counts:
            host.to("cuda", non_blocking=True)
        assert (counts.waits, counts.uploads) == (waits, 1)


def test_contexts_restore_the_current_stream_after_an_error_and_threads_begin_on_the_default_stream(gpu):
    side, default, in_thread = torch.cuda.Stream(), torch.cuda.current_stream(), []
    with pytest.raises(DeviceError), torch.cuda.device(0), torch.cuda.stream(side):
        torch.zeros(3, device="cuda") + torch.ones(3)
    assert torch.cuda.current_stream() == default == torch.cuda.default_stream()
    torch.cuda.set_stream(side)
    thread = threading.Thread(target=lambda: in_thread.append(torch.cuda.current_stream()))
    thread.start()
    thread.join()
    assert (torch.cuda.current_stream(), in_thread) == (side, [default])


def test_a_failed_capture_leaves_its_stream_current_and_keeps_its_pool(gpu, x):
    """As PyTorch does, which ends the capture before it restores the stream, and then has no graph to release."""
    before, pool, side = torch.cuda.memory_reserved(), torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    with pytest.raises(DeviceError), torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool, stream=side):
        (x + 1).tolist()
    assert torch.cuda.current_stream() is side
    torch.cuda.set_stream(torch.cuda.default_stream())
    assert torch.cuda.memory_reserved() > before
    with pytest.raises(AssertionError, match="already recording"), torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool):
        pass
    torch._C._cuda_endAllocateToPool(0, pool)
    torch._C._cuda_releasePool(0, pool)
    assert torch.cuda.memory_reserved() == before


def test_graphs_keep_the_memory_of_their_pool(gpu, x):
    before, pool, graphs = torch.cuda.memory_reserved(), torch.cuda.graph_pool_handle(), []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool=pool):
            (x + 1).sum()
    gpu.graphs.clear()
    while graphs:
        assert torch.cuda.memory_reserved() > before
        graphs.pop()
    assert torch.cuda.memory_reserved() == before == torch.cuda.memory_allocated()


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_another_thread_may_wait_during_a_capture_of_one_thread(mode, x):
    errors = []

    def read():
        try:
            x.tolist()
        except DeviceError as error:
            errors.append(error)

    def run():
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=mode):
            thread = threading.Thread(target=read)
            thread.start()
            thread.join()

    if mode == "global":
        with pytest.raises(DeviceError, match="previous error"):
            run()
    else:
        run()
    assert len(errors) == (mode == "global")


def test_the_memory_of_a_process_can_be_limited(gpu, x):
    info, used = torch.cuda.mem_get_info(), torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction((used + 100) / info[1])
    kept = torch.zeros(20, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(20, device="cuda")
    del kept
    torch.zeros(20, device="cuda")
    assert torch.cuda.mem_get_info() == info


def test_a_replay_does_what_was_captured_without_its_python(gpu, x):
    calls = []
    total = torch.zeros(3, device="cuda")

    def step():
        calls.append(1)
        ones = torch.ones(3, device="cuda")
        ones.add_(x.sum(0))
        total.add_(ones)

    graph = capture(step)
    total.zero_()
    with gpu.counting() as counts:
        for _ in range(3):
            graph.replay()
            x.add_(1)
    assert len(calls) == 1
    assert (counts.launches, counts.graph_launches) == (3 + 3, 3 * 4)
    assert download(total).tolist() == [3 * (1 + 3.0 + 2), 3 * (1 + 5.0 + 2), 3 * (1 + 7.0 + 2)]


def test_seed_and_offset_of_attention_are_on_the_host(gpu):
    inputs = [upload(torch.randn(2, 2, 3, 4)) for _ in range(3)]
    results = torch.ops.aten._scaled_dot_product_efficient_attention(*inputs, None, True)
    assert [tensor.is_cuda for tensor in results] == [True, True, False, False]


def test_a_python_number_that_vmap_converts_is_on_the_host(x):
    class Devices(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.extend(arg.device.type for arg in args if isinstance(arg, torch.Tensor))
            return function(*args, **kwargs or {})

    seen = []
    with Devices():
        torch.func.vmap(lambda number: number * 0.5)(x[0])
    assert seen[-2:] == ["cuda", "cpu"]  # the operands of the product


def test_a_generator_of_the_gpu_draws_other_numbers_than_one_of_the_host_with_the_same_seed(gpu):
    def draws(device):
        generator = torch.Generator(device).manual_seed(1)
        torch.manual_seed(1)
        return [*torch.rand(3, device=device, generator=generator).tolist(), *torch.rand(3, device=device).tolist()]

    assert draws("cuda") == draws("cuda")
    assert not set(draws("cuda")) & set(draws("cpu"))
    with pytest.raises(DeviceError):
        torch.rand(3, generator=torch.Generator("cuda"))
