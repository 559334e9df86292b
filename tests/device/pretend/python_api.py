"""Python calls that name a device or that convert a tensor to another type."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.device.pretend.attention import attention
from tests.device.pretend.counting import DOWNLOAD, source_line
from tests.device.pretend.generators import is_of_gpu
from tests.device.pretend.placement import DeviceError, download, is_pinned, on_gpu, place, storage_of, upload
from tests.device.pretend.recording import tensors_in

if TYPE_CHECKING:
    from tests.device.pretend.gpu import PretendGpu

FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
ALLOCATIONS = {torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted, Tensor.new_empty}
FACTORIES = {
    *FROM_DATA,
    *ALLOCATIONS,
    *(torch.zeros, torch.ones, torch.full, torch.scalar_tensor, torch.arange, torch.linspace, torch.logspace),
    *(torch.eye, torch.tril_indices, torch.triu_indices),
    *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal),
    *(torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like, torch.randint_like),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full),
}
RECURRENT = torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu


class PythonApi(TorchFunctionMode):
    """A mode that answers the Python calls for which the device matters."""

    def __init__(self, gpu: PretendGpu) -> None:
        super().__init__()
        self._gpu = gpu
        self._answers: dict[Any, Callable[..., Any]] = {
            Tensor.to: self._to,
            Tensor.cpu: lambda tensor, **_: self._move(tensor, False),
            Tensor.cuda: lambda tensor, device=None, non_blocking=False, **_: self._move(tensor, True, non_blocking),
            **{function: self._of_host(function) for function in (Tensor.numpy, Tensor.__array__)},
            Tensor.tolist: self._tolist,
            Tensor.__setitem__: self._set_item,
            Tensor.__deepcopy__: self._deepcopy,
            Tensor.is_shared: lambda tensor: on_gpu(tensor) or Tensor.is_shared(tensor),
            Tensor.pin_memory: self._pinned,
            Tensor.is_pinned: lambda tensor, *_: is_pinned(tensor),
            F.scaled_dot_product_attention: attention,
            **{function: self._as_by_cudnn(function) for function in RECURRENT},
        }

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in FACTORIES:
            return self._make(function, args, kwargs or {})
        return self._answers.get(function, function)(*args, **kwargs or {})

    def _make(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """Call a tensor factory (from a size, from data, or like another tensor) for the requested device."""
        kwargs = dict(kwargs)
        device = kwargs.pop("device", None)
        like = next((arg for arg in args[:1] if isinstance(arg, Tensor)), None)
        if device is not None and torch.device(device).type == "meta":
            return function(*args, device=device, **kwargs)
        to_gpu = (like is not None and on_gpu(like)) if device is None else torch.device(device).type == "cuda"
        if like is not None and function in (torch.as_tensor, torch.asarray):
            return self._to(like, "cuda" if to_gpu else "cpu", kwargs.get("dtype"))
        generator = kwargs.get("generator")
        if to_gpu and generator is not None and not is_of_gpu(generator):
            raise DeviceError(
                f"{function.__name__}: Expected a 'cuda' device type for generator but found 'cpu', at {source_line()}"
            )
        if like is not None and on_gpu(like):
            if to_gpu and function not in FROM_DATA:
                return function(*args, **kwargs)  # an operation on a GPU tensor, handled by DeviceRules
            args = (download(like), *args[1:])
        pinned = kwargs.pop("pin_memory", False)
        with self._gpu.making(to_gpu):
            result = function(*args, **kwargs)
        if to_gpu:
            place(result)
            if function in FROM_DATA:
                self._gpu.copy(result, result, function.__name__)
            elif function not in ALLOCATIONS and result.numel():
                self._gpu.launch(function.__name__, written=[result])
        storage_of(result).pinned = pinned
        return result

    def _to(self, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        options = {"dtype": dtype or tensor.dtype, "memory_format": memory_format or torch.preserve_format}
        if device is not None and device.type == "meta":
            return Tensor.to(tensor, device=device, **options)
        if device is None or on_gpu(tensor) == (device.type == "cuda"):
            return Tensor.to(tensor, copy=copy, **options)
        return self._move(Tensor.to(tensor, **options), device.type == "cuda", non_blocking)

    def _move(self, tensor: Tensor, to_gpu: bool, non_blocking: bool = False) -> Tensor:
        if on_gpu(tensor) == to_gpu:
            return tensor
        if tensor.requires_grad and torch.is_grad_enabled() and not tensor.is_leaf:
            raise NotImplementedError("the pretend GPU moves no tensors between devices within autograd")
        moved = (upload if to_gpu else download)(tensor)
        storage_of(moved).pinned = non_blocking and not to_gpu  # as PyTorch does
        if tensor.numel():
            self._gpu.copy(moved, tensor, "to", non_blocking)
        return moved

    def _pinned(self, tensor: Tensor, *_: Any) -> Tensor:
        if on_gpu(tensor):
            raise DeviceError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        if is_pinned(tensor):
            return tensor
        storage_of(copied := tensor.clone()).pinned = True
        return copied

    def _of_host(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with a check that raises TypeError for GPU tensors."""

        def checked(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if on_gpu(tensor):
                raise TypeError(
                    "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
                    f"memory first, at {source_line()}"
                )
            self._gpu.use_on_host([tensor])
            return function(tensor, *args, **kwargs)

        return checked

    def _as_by_cudnn(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a recurrent `function` with a check that raises DeviceError for states that cuDNN refuses.

        It warns, like PyTorch, if the weights are not in one chunk of memory, in cuDNN's order.
        """

        def checked(inputs: Tensor, *args: Any, **kwargs: Any) -> Any:
            packed = isinstance(args[2], list | tuple)  # the batch sizes of packed inputs precede the states
            if on_gpu(inputs):
                if not all(state.is_contiguous() for state in tensors_in(args[packed])):
                    raise DeviceError(f"rnn: hx is not contiguous, at {source_line()}")
                if not _in_one_chunk(args[packed + 1]):
                    warnings.warn("RNN module weights are not part of single contiguous chunk of memory", stacklevel=2)
            return function(inputs, *args, **kwargs)

        return checked

    def _tolist(self, tensor: Tensor) -> Any:
        if on_gpu(tensor):
            self._gpu.read(DOWNLOAD, "tolist", tensor)
            tensor = download(tensor)
        self._gpu.use_on_host([tensor])
        return Tensor.tolist(tensor)

    def _set_item(self, tensor: Tensor, index: Any, value: Any) -> None:
        """Assign to a part of a tensor. CUDA first copies a number into a GPU tensor."""
        if on_gpu(tensor) and isinstance(value, Number):
            self._gpu.launch("fill_")
            with self._gpu.making(True):
                value = place(torch.scalar_tensor(value, dtype=tensor.dtype))
        Tensor.__setitem__(tensor, index, value)

    def _deepcopy(self, tensor: Tensor, memo: dict) -> Tensor:
        copied = Tensor.__deepcopy__(tensor, memo)
        if on_gpu(tensor):
            self._gpu.launch("clone", [tensor], [place(copied)])
        return copied


def _in_one_chunk(weights: list[Tensor]) -> bool:
    """Whether the weights of a recurrent network fill the start of a storage: all matrices, then all biases."""
    place = 0
    for weight in [weight for ndim in (2, 1) for weight in weights if weight.ndim == ndim]:
        if weight.storage_offset() != place or weight.untyped_storage().data_ptr() != weights[0].data_ptr():
            return False
        place += weight.numel()
    return True
