"""Settings of PyTorch and NumPy that hold for the whole process, and their values in a run.

A user's program may have changed these settings, for example by `torch.set_default_dtype` or inside `torch.autocast`.
A run depends on the experiment alone, so it computes with the values in `SETTINGS`, in every process, and the user's
values are restored when it ends. `fedsim.core.randomness.sole_use_of_generators` enters `run_settings`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.backends.opt_einsum  # PyTorch 2.6 does not import it
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

F = TypeVar("F", bound=Callable[..., Any])

AUTOCAST_DEVICES = "cpu", "cuda", "mps", "xpu"
# pairs (backend, operation) of `fp32_precision`, from general to specific, because unset values are inherited
FLOAT32 = [("generic", "all"), *itertools.product(("cuda", "mkldnn"), ("all", "matmul", "conv", "rnn"))]
if not hasattr(torch._C, "_get_fp32_precision_getter"):  # PyTorch before 2.9
    FLOAT32 = []
CUDNN = ("cuda", "conv"), ("cuda", "rnn")
ERRORS_OF_NUMPY = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}


@dataclass(frozen=True)
class GlobalSetting:
    """A setting that holds for the whole process or thread.

    Attributes:
        name: name for messages and tests.
        read: function that returns the current value.
        in_run: value in a run.
        at: function that takes a value and returns a context manager in which the setting has this value.
    """

    name: str
    read: Callable[[], Any]
    in_run: Any
    at: Callable[[Any], AbstractContextManager[Any]]


def _setting(name: str, read: Callable[[], Any], write: Callable[[Any], object], in_run: Any) -> GlobalSetting:
    """Return a setting that the functions `read` and `write` access. `in_run` is its value in a run."""

    @contextlib.contextmanager
    def at(value: Any) -> Iterator[None]:
        before = read()
        try:
            if before != value:
                write(value)
            yield
        finally:  # user code inside the block may have changed the setting too
            if read() != before:
                write(before)

    return GlobalSetting(name, read, in_run, at)


def _attribute(owner: Any, name: str, in_run: Any) -> list[GlobalSetting]:
    """Return [setting] for the attribute `name` of `owner`, a module, with the value `in_run` in a run.

    Returns [] if this version of PyTorch lacks the attribute.
    """
    if not hasattr(owner, name):
        return []
    label = f"{getattr(owner, '__name__', 'torch.backends.cuda.matmul')}.{name}"
    return [_setting(label, lambda: getattr(owner, name), lambda value: setattr(owner, name, value), in_run)]


def _autocast() -> tuple[Any, ...]:
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return tuple(map(torch.is_autocast_enabled, AUTOCAST_DEVICES)), torch.is_autocast_cache_enabled(), nesting


def _set_autocast(value: tuple[Any, ...]) -> None:
    """Set the device types with autocast and the nesting level of autocast. Clear its cache of cast parameters."""
    enabled, cached, nesting = value
    for device, is_enabled in zip(AUTOCAST_DEVICES, enabled, strict=True):
        torch.set_autocast_enabled(device, is_enabled)
    torch.set_autocast_cache_enabled(cached)
    torch.clear_autocast_cache()
    while torch.autocast_decrement_nesting() >= 0:
        pass
    while torch.autocast_increment_nesting() < nesting:
        pass


def _default_device() -> torch.device | None:
    modes = _get_current_function_mode_stack()
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


@contextlib.contextmanager
def _with_default_device(device: torch.device | None) -> Iterator[None]:
    """Set the default device inside the block. None: new tensors are on the CPU."""
    if device is not None:
        with device:
            yield
        return
    modes = _get_current_function_mode_stack()
    try:
        _replace_modes([mode for mode in modes if not isinstance(mode, DeviceContext)])
        yield
    finally:
        _replace_modes(modes)


def _replace_modes(modes: list[Any]) -> None:
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def _float32_precision() -> tuple[Any, ...]:
    """Return the precision of float32 products and convolutions in PyTorch's older and in its newer settings.

    If they disagree, the older settings can only be read while the newer ones have neutral values.
    """
    if not FLOAT32:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    newer = []
    for pair in FLOAT32:
        newer.append(torch._C._get_fp32_precision_getter(*pair))
        torch._C._set_fp32_precision_setter(*pair, "tf32" if pair in CUDNN else "none")
    try:
        convolutions = torch._C._get_cudnn_allow_tf32()
    except RuntimeError:  # it is False, unlike the newer ones
        convolutions = False
    products = torch.get_float32_matmul_precision()
    _set_newer(newer)
    return products, convolutions, *newer


def _set_float32_precision(value: tuple[Any, ...]) -> None:
    products, convolutions, *newer = value
    torch.set_float32_matmul_precision(products)
    torch._C._set_cudnn_allow_tf32(convolutions)
    _set_newer(newer)


def _set_newer(values: list[str]) -> None:
    for pair, value in zip(reversed(FLOAT32), reversed(values), strict=False):
        torch._C._set_fp32_precision_setter(*pair, value)


def _rounds_products() -> bool:
    """Whether a CPU may round the inputs of float32 products. `fedsim.system.precision.full_precision` is for GPUs."""
    if not FLOAT32:
        return torch.get_float32_matmul_precision() != "highest"
    return torch._C._get_fp32_precision_getter("mkldnn", "matmul") not in ("none", "ieee")


def _attention() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.math_sdp_enabled()


def _set_attention(enabled: tuple[bool, ...]) -> None:
    cuda = torch.backends.cuda
    enable = cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_cudnn_sdp, cuda.enable_math_sdp
    for function, value in zip(enable, enabled, strict=True):
        function(value)


def _set_einsum(value: tuple[bool, str | None]) -> None:
    torch.backends.opt_einsum.set_flags(True, value[1])  # the strategy can only be set while it is enabled
    torch.backends.opt_einsum.set_flags(value[0])


def _flushes_denormals() -> bool:
    return sys.float_info.min / 2 == 0.0


THREADS = _setting("threads", torch.get_num_threads, torch.set_num_threads, None)  # the experiment sets their number
_cuda: Any = torch.backends.cuda.matmul
_backends: Any = torch.backends

AUTOCAST = _setting("autocast", _autocast, _set_autocast, ((False,) * len(AUTOCAST_DEVICES), True, 0))
DEFAULT_DEVICE = GlobalSetting("default device", _default_device, None, _with_default_device)
PRECISION = _setting(
    "float32 precision", _float32_precision, _set_float32_precision, ("highest", False, *("none" for _ in FLOAT32))
)
SETTINGS: list[GlobalSetting] = [
    GlobalSetting("inference mode", torch.is_inference_mode_enabled, False, torch.inference_mode),
    _setting("gradients", torch.is_grad_enabled, torch._C._set_grad_enabled, True),
    _setting(
        "anomaly detection",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
        (False, True),
    ),
    AUTOCAST,
    *(
        _setting(
            f"dtype of autocast on {device}",
            partial(torch.get_autocast_dtype, device),
            partial(torch.set_autocast_dtype, device),
            dtype,
        )
        for device, dtype in {"cpu": torch.bfloat16, "cuda": torch.float16}.items()
    ),
    _setting("default dtype", torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    DEFAULT_DEVICE,
    PRECISION,
    _setting("deterministic algorithms", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
    _setting("denormal numbers flushed", _flushes_denormals, torch.set_flush_denormal, False),
    _setting("attention", _attention, _set_attention, (True, True, True, True)),
    _setting("fast path of attention", _backends.mha.get_fastpath_enabled, _backends.mha.set_fastpath_enabled, True),
    _setting("NNPACK", torch._C._get_nnpack_enabled, torch._C._set_nnpack_enabled, True),
    *_attribute(_backends.mkldnn, "enabled", True),
    *_attribute(_backends.mkldnn, "deterministic", False),
    *_attribute(_backends.cudnn, "enabled", True),
    *_attribute(_backends.cudnn, "benchmark", False),
    *_attribute(_backends.cudnn, "deterministic", False),
    *_attribute(_cuda, "allow_fp16_reduced_precision_reduction", True),
    *_attribute(_cuda, "allow_bf16_reduced_precision_reduction", True),
    *_attribute(_cuda, "allow_fp16_accumulation", False),
    _setting("errors of NumPy", np.geterr, lambda value: np.seterr(**value), ERRORS_OF_NUMPY),
]
if _backends.opt_einsum.is_available():
    SETTINGS.append(_setting("einsum", lambda: _backends.opt_einsum.set_flags(), _set_einsum, (True, "auto")))


@contextlib.contextmanager
def run_settings(threads: int | None = None) -> Iterator[None]:
    """Return a context manager in which all `SETTINGS` have the values of a run.

    `threads` is the number of threads that PyTorch uses. None: the number does not change.
    """
    with contextlib.ExitStack() as stack:
        for setting in SETTINGS:
            stack.enter_context(setting.at(setting.in_run))
        stack.enter_context(THREADS.at(threads or THREADS.read()))
        yield


def plain_arithmetic(function: F) -> F:
    """Return a version of `function` that computes as in a run, for functions that users also call outside a run.

    The version ignores the user's autocast, default device and reduced precision of products, but keeps the user's
    gradient mode and default dtype.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **params: Any) -> Any:
        foreign = [setting for setting in (AUTOCAST, DEFAULT_DEVICE) if setting.read() != setting.in_run]
        if _rounds_products():
            foreign.append(PRECISION)
        if not foreign:
            return function(*arguments, **params)
        with contextlib.ExitStack() as stack:
            for setting in foreign:
                stack.enter_context(setting.at(setting.in_run))
            return function(*arguments, **params)

    return cast(F, call)
