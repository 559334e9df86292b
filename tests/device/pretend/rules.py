"""CUDA's device rules, enforced for each operation that PyTorch executes."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device.pretend.attention import STAND_INS
from tests.device.pretend.counting import READ, UPLOAD, source_line
from tests.device.pretend.generators import is_of_gpu
from tests.device.pretend.placement import (
    CPU,
    DeviceError,
    download,
    is_unplaced,
    leave_unplaced,
    mark_of,
    on_gpu,
    place,
)
from tests.device.pretend.recording import tensors_in

if TYPE_CHECKING:
    from tests.device.pretend.gpu import PretendGpu

READS = {  # operations whose result or result size the host must know
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "masked_select", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive", "_linalg_eigh", "linalg_eig", "_linalg_svd", "_linalg_solve_ex"),
    *("linalg_inv_ex", "linalg_cholesky_ex", "linalg_qr", "linalg_lstsq", "repeat_interleave"),
}
NO_LAUNCHES = {
    *(
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "empty_permuted",
        "_local_scalar_dense",
    ),
    *("resize_", "set_", "lift_fresh", "_unsafe_view", "alias", "detach", "is_same_size", "is_pinned"),
    *("squeeze_", "unsqueeze_", "transpose_", "t_", "as_strided_"),
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
# in addition to pointwise operations
TAKE_HOST_SCALARS = {
    *("fill_", "fill", "where", "masked_fill", "masked_fill_", "lerp", "lerp_"),
    "_scaled_dot_product_efficient_attention_backward",
}
# results from these positions on are tensors on the host
HOST_RESULTS = {"_scaled_dot_product_efficient_attention": 2}


CONVERSION = torch.ops.aten._to_copy.default


@cache
def _name_of(function: Any) -> str:
    return function._schema.name.removeprefix("aten::")


@cache
def _places_written(function: Any) -> list[tuple[int, str]]:
    arguments = enumerate(function._schema.arguments)
    return [(place, a.name) for place, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _written_by(function: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the tensors that an operation changes."""
    places = _places_written(function)
    return [*tensors_in(*(args[place] if place < len(args) else kwargs.get(name) for place, name in places))]


@cache
def _takes_generator(function: Any) -> bool:
    return any("Generator" in str(argument.type) for argument in function._schema.arguments)


def _generators(function: Any, args: tuple, kwargs: dict) -> list[torch.Generator]:
    values = (*args, *kwargs.values()) if _takes_generator(function) else ()
    return [value for value in values if isinstance(value, torch.Generator)]


class DeviceRules(TorchDispatchMode):
    """A mode that refuses what CUDA refuses, counts launches and waits, and records captured operations."""

    def __init__(self, gpu: PretendGpu) -> None:
        super().__init__()
        self._gpu = gpu

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch.compile would wrap each operation

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [*tensors_in(*args, *kwargs.values())]
        if function is CONVERSION and tensors and kwargs.get("device") is not None:
            to_gpu = torch.device(kwargs["device"]).type == "cuda"
            # With another dtype, autograd converts a gradient, and takes the pretend GPU for the CPU.
            if to_gpu != on_gpu(args[0]) and (to_gpu or kwargs.get("dtype") in (None, args[0].dtype)):
                return self._moved(function, args[0], kwargs, to_gpu)
            kwargs = {**kwargs, "device": CPU}
        marks = [*map(mark_of, tensors)]
        if True not in marks:
            return self._on_host(function, tensors, args, kwargs)
        name, function = _name_of(function), STAND_INS.get(function, function)
        written = _written_by(function, args, kwargs)
        if name == "copy_":
            self._copy(*args, **kwargs)
        else:
            for tensor, mark in zip(tensors, marks, strict=True):
                if mark is None:
                    place(tensor)
            if name in INDEXING:
                self._require_indices(name, *args)
            elif False in marks:
                self._require_one_device(function, name, args, kwargs, tensors)
            if name in READS:
                self._gpu.read(READ, name, *tensors)
        result = self._execute(function, args, kwargs)
        if name != "copy_":
            results = [*tensors_in(result[: HOST_RESULTS[name]] if name in HOST_RESULTS else result)]
            for tensor in results:
                place(tensor)
            if name not in NO_LAUNCHES and not function.is_view and any(tensor.numel() for tensor in tensors):
                self._gpu.launch(name, tensors, [*written, *results])
        self._record(function, args, kwargs, result)
        return result

    def _on_host(self, function: Any, tensors: list[Tensor], args: tuple, kwargs: dict) -> Any:
        """Execute an operation without GPU tensors. A tensor that C++ creates from nothing may be meant for the GPU."""
        factory = self._gpu.factory
        if factory != "cuda" and any(map(is_of_gpu, _generators(function, args, kwargs))):
            raise DeviceError(f"{function}: Expected a 'cpu' device type for generator but found 'cuda'")
        self._gpu.use_on_host(tensors, _written_by(function, args, kwargs))
        result = self._execute(function, args, kwargs) if factory == "cuda" else function(*args, **kwargs)
        if function is CONVERSION:
            return result  # a Python number that becomes a tensor is on the host
        if not tensors and isinstance(result, Tensor) and factory != "cpu":
            if factory is None:
                leave_unplaced(result)
            self._record(function, args, kwargs, result)
        return result

    def _moved(self, function: Any, tensor: Tensor, kwargs: dict, to_gpu: bool) -> Tensor:
        """Copy a tensor to the other device, which a call inside of PyTorch or of another mode names."""
        result = function(download(tensor), **{**kwargs, "device": CPU})
        result = place(result) if to_gpu else result
        self._gpu.copy(result, tensor, "_to_copy", kwargs.get("non_blocking", False))
        return result

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> None:
        if is_unplaced(source):
            place(source)
        if not target.numel():
            return
        if on_gpu(target) and on_gpu(source):
            self._gpu.launch("copy_", [source], [target])
        else:
            self._gpu.copy(target, source, "copy_", non_blocking)

    def _require_indices(self, name: str, whole: Tensor, indices: list[Tensor | None], *rest: Any) -> None:
        """Check that indices fit the device of `whole`. Host indices into a GPU tensor are uploaded, masks are read."""
        index_tensors = [index for index in indices if index is not None]
        if not on_gpu(whole) and any(map(on_gpu, index_tensors)):
            raise DeviceError(f"{name}: indices should be either on cpu or on the same device as the indexed tensor")
        for index in index_tensors:
            if not on_gpu(index):
                self._gpu.wait(UPLOAD, f"{name} by an index of the host")
            if index.dtype in (torch.bool, torch.uint8):
                self._gpu.wait(READ, f"{name} by a mask")
        for values in tensors_in(*rest):
            if on_gpu(values) == on_gpu(whole):
                continue
            if values.dim() or on_gpu(values):
                self._refuse(name, [values])
            self._gpu.wait(UPLOAD, f"{name} of a number of the host")

    def _require_one_device(self, function: Any, name: str, args: tuple, kwargs: dict, tensors: list[Tensor]) -> None:
        """Check that all tensors are on one device. Only pointwise operations may take a 0-dimensional host tensor."""
        of_host = [tensor for tensor in tensors if not on_gpu(tensor)]
        elementwise = torch.Tag.pointwise in function.tags or name in TAKE_HOST_SCALARS or name.startswith("_foreach")
        if not elementwise or any(tensor.dim() for tensor in of_host):
            self._refuse(name, of_host)
        if not all(map(on_gpu, _written_by(function, args, kwargs))):
            self._refuse(name, of_host)

    @staticmethod
    def _refuse(name: str, of_host: list[Tensor]) -> None:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in of_host)
        raise DeviceError(
            f"{name}: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu "
            f"(shapes on the cpu: {shapes}), at {source_line()}"
        )

    def _execute(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """Execute an operation on the GPU, with a generator of the GPU."""
        generators = _generators(function, args, kwargs)
        if not all(map(is_of_gpu, generators)):
            raise DeviceError(
                f"{function}: Expected a 'cuda' device type for generator but found 'cpu', at {source_line()}"
            )
        if torch.Tag.nondeterministic_seeded in function.tags and not generators:
            with self._gpu.drawing():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    def _record(self, function: Any, args: tuple, kwargs: dict, result: Any) -> None:
        if self._gpu.capturing is not None:
            self._gpu.capturing.add(function, args, kwargs, result, lambda t: on_gpu(t) or is_unplaced(t))
