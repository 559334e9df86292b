"""The pretend GPU refuses what CUDA refuses, and counts launches and waits."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device.pretend import GPU, DeviceError, download, on_gpu, pretend_gpu, upload


@pytest.fixture
def x(gpu):
    return upload(torch.arange(6.0).view(2, 3))


def test_a_tensor_reports_its_device(gpu, x):
    assert x.device == GPU
    assert x.is_cuda
    for tensor in (x[0], x.T, x + 1, x.clone(), x.double(), torch.zeros_like(x), x.new_zeros(2), x.detach()):
        assert tensor.device == GPU
    assert torch.zeros(2, device="cuda").device == torch.tensor([1.0], device="cuda:0").device == GPU
    assert torch.zeros(2).to(GPU).device == torch.zeros(2).cuda().device == torch.zeros(2).to(x).device == GPU
    for tensor in (torch.zeros(2), x.cpu(), x.to("cpu"), torch.zeros_like(x, device="cpu")):
        assert tensor.device == torch.device("cpu")
    assert torch.nn.Linear(2, 2).to(GPU).weight.device == GPU


def test_without_the_block_there_is_no_gpu():
    with pretend_gpu():
        assert torch.cuda.is_available()
        x = torch.zeros(2, device="cuda")
    assert not torch.cuda.is_available()
    assert on_gpu(x)
    assert torch.zeros(2).device == torch.device("cpu")


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
}


def capture(step):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


@pytest.mark.parametrize("case", REFUSED)
def test_operations_that_cuda_refuses_are_refused(case, x):
    with pytest.raises(DeviceError):
        REFUSED[case](x)
    assert not torch.cuda.is_current_stream_capturing()


@pytest.mark.parametrize(
    "function", [lambda x: x.numpy(), lambda x: torch.from_numpy(x.numpy()), lambda x: x.__array__()]
)
def test_a_gpu_tensor_does_not_become_an_array(function, x):
    with pytest.raises(TypeError, match="to numpy"):
        function(x)


def test_a_number_of_the_host_is_an_operand_of_an_elementwise_operation(x):
    half = torch.tensor(0.5)
    for result in (x * half, half * x, x.clone().mul_(half), torch.where(x > half, x, half), x.fill_(half)):
        assert result.device == GPU


def test_a_recurrent_network_takes_contiguous_states_and_weights_in_one_chunk(x):
    outputs, _ = recurrent(x, torch.zeros(1, 1, 2, device="cuda"))
    assert outputs.device == GPU
    with pytest.warns(UserWarning, match="RNN module weights are not part of single contiguous chunk of memory"):
        recurrent(x, torch.zeros(1, 1, 2, device="cuda"), in_one_chunk=False)


COUNTED = {  # (launches, graph launches, uploads, downloads, reads)
    "a view": (lambda x: x[0].view(3, 1), (0, 0, 0, 0, 0)),
    "an allocation": (lambda x: torch.empty_like(x), (0, 0, 0, 0, 0)),
    "a sum of two": (lambda x: x + x, (1, 0, 0, 0, 0)),
    "zeros": (lambda x: torch.zeros(2, device="cuda"), (1, 0, 0, 0, 0)),
    "nothing": (lambda x: x[:0] + 1, (0, 0, 0, 0, 0)),
    "a copy from the host": (lambda x: x.copy_(torch.ones(2, 3)), (0, 0, 1, 0, 0)),
    "a copy to the host": (lambda x: torch.ones(2, 3).copy_(x), (0, 0, 0, 1, 0)),
    "to": (lambda x: x.to("cpu").to(x), (0, 0, 1, 1, 0)),
    "a number set": (lambda x: x.__setitem__(0, 1.0), (2, 0, 0, 0, 0)),
    "a truth read": (lambda x: bool((x >= 0).all()), (2, 0, 0, 0, 1)),
    "a list": (lambda x: x.tolist(), (0, 0, 0, 1, 0)),
    "a mask": (lambda x: x[x > 2], (2, 0, 0, 0, 1)),
    "positions of the host": (lambda x: x[torch.tensor([1])], (1, 0, 1, 0, 0)),
}


@pytest.mark.parametrize("case", COUNTED)
def test_launches_and_waits_are_counted(case, gpu, x):
    function, expected = COUNTED[case]
    with gpu.counting() as counts:
        function(x)
    counted = counts.launches, counts.graph_launches, counts.uploads, counts.downloads, counts.reads
    assert counted == expected, counts.table()
    assert counts.waits == sum(expected[2:])


def test_an_upload_without_blocking_is_not_a_wait(gpu):
    with gpu.counting() as counts:
        torch.ones(3).to("cuda", non_blocking=True)
        torch.cuda.synchronize()
    assert (counts.uploads, counts.waits, counts.synchronisations) == (1, 1, 1)


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


def test_derivatives_and_batched_functions_stay_on_the_gpu(x):
    x.requires_grad_()
    (x.sin() * 2).sum().backward()
    assert x.grad.device == GPU
    squares = torch.func.vmap(torch.func.grad(lambda row: (row * row).sum()))(x.detach())
    assert squares.device == GPU
    assert torch.equal(download(squares), 2 * download(x))


def test_seed_and_offset_of_attention_are_on_the_host_and_its_derivatives_are_right(gpu):
    def derivatives(*inputs):
        inputs = [tensor.requires_grad_() for tensor in inputs]
        outputs = F.scaled_dot_product_attention(*inputs, is_causal=True)
        return [download(gradient) for gradient in torch.autograd.grad(outputs.square().sum(), inputs)]

    inputs = [torch.randn(2, 2, 3, 4) for _ in range(3)]
    expected = derivatives(*inputs)
    with gpu.counting() as counts:
        actual = derivatives(*map(upload, inputs))
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
    assert "_scaled_dot_product_efficient_attention_backward" in counts.table()
    operation = torch.ops.aten._scaled_dot_product_efficient_attention
    assert [tensor.is_cuda for tensor in operation(*map(upload, inputs), None, True)] == [True, True, False, False]


def test_a_python_number_that_vmap_converts_is_on_the_host(x):
    class Devices(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.extend(arg.device.type for arg in args if isinstance(arg, torch.Tensor))
            return function(*args, **kwargs or {})

    seen = []
    with Devices():
        torch.func.vmap(lambda number: number * 0.5)(x[0])
    assert seen[-2:] == ["cuda", "cpu"]  # the operands of the product


def test_a_thread_has_the_gpu_too(gpu):
    devices = []
    thread = threading.Thread(target=lambda: devices.append(torch.zeros(2, device="cuda").device))
    thread.start()
    thread.join()
    assert devices == [GPU]


def test_random_numbers_come_from_the_generator_of_the_gpu(gpu):
    def draws():
        first = torch.rand(3, device="cuda")
        return torch.cat([first, torch.rand_like(first), first.clone().normal_()])

    torch.manual_seed(1)
    first, on_host = draws(), torch.rand(3)
    torch.cuda.manual_seed(1)
    assert torch.equal(download(draws()), download(first))
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), on_host)


def test_a_generator_of_the_gpu_draws_other_numbers_than_one_of_the_host_with_the_same_seed(gpu):
    def draws(device):
        generator = torch.Generator(device).manual_seed(1)
        torch.manual_seed(1)
        return [*torch.rand(3, device=device, generator=generator).tolist(), *torch.rand(3, device=device).tolist()]

    assert torch.Generator("cuda").device == GPU
    assert isinstance(torch.default_generator, torch.Generator)
    assert draws("cuda") == draws("cuda")
    assert not set(draws("cuda")) & set(draws("cpu"))
    with pytest.raises(DeviceError):
        torch.rand(3, generator=torch.Generator("cuda"))
