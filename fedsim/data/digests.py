"""Hashes of data sets, by which ranks and resumed runs notice that the data differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedsim.data.tensors import TensorData, compact


def digest(tensor: Tensor, most: int | None = None) -> str:
    """Return a hexadecimal hash of a tensor's values, shape and dtype.

    Args:
        tensor: values, [n, ...].
        most: maximum number of bytes to read. Of a larger tensor, only every k-th row is hashed, with the smallest k
            that is sufficient. None: all values are hashed.
    """
    values = compact(tensor.detach())
    every = 1 if most is None else max(1, -(-values.nbytes // most))
    read = values[::every].cpu().contiguous()
    state = hashlib.blake2b(f"{values.dtype} {tuple(values.shape)}".encode(), digest_size=8)
    state.update(read.flatten().view(torch.uint8).numpy().data)
    return state.hexdigest()


def digests_of(parts: Mapping[str, TensorData], most: int | None = None) -> dict[str, str]:
    """Return a hash of each tensor of several data sets, and of how their inputs are scaled, by name.

    Args:
        parts: data sets by name. The names of the hashes begin with these names, as in "training inputs".
        most: maximum number of bytes of each tensor to read (see `digest`).
    """
    digests = dict[str, str]()
    for name, data in parts.items():
        digests |= {f"{name} {part}": digest(tensor, most) for part, tensor in data.tensors.items()}
        scaling = [np.atleast_1d(numbers).astype(np.float64) for numbers in (data.scale, data.shift)]
        digests[f"{name} scaling"] = digest(torch.from_numpy(np.concatenate(scaling)))
    return digests
