"""A check before the first round that the ranks have the same versions, experiment and data."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core.input_limits import leaves_of
from fedsim.data import TensorData
from fedsim.engines.distributed.process_group import RankGroup
from fedsim.errors import ExperimentError, FedsimError, show
from fedsim.version import __version__

OWN = ("device", "data.root")  # keys that may differ from host to host
SHOWN = 3  # differences in a line

Claims = dict[str, dict[str, Any]]  # facts of a rank, by kind and key


class Preflight:
    """The check of one run. Each rank takes part once, with its facts or with the error that ends it."""

    def __init__(self, ranks: RankGroup, description: Mapping[str, Any]) -> None:
        self._ranks = ranks
        shared = {key: value for key, value in leaves_of(description) if key not in OWN}
        self._claims: Claims = {"versions": _versions(), "the experiment": shared}
        self.settled = self.reached = False

    def settle(self, train: TensorData, test: TensorData) -> None:
        """Compare with the other ranks. Raises ExperimentError if one differs or has failed."""
        data = {
            f"{name} {part}": digest(tensor)
            for name, split in (("training", train), ("test", test))
            for part, tensor in zip(("inputs", "targets"), split.tensors, strict=True)
        }
        self.settled = True
        said = self._ranks.gather_objects((None, {**self._claims, "the data": data}))
        failed = [f"rank {rank}: {line}" for rank, (lines, _) in enumerate(said) for line in lines or ()]
        if failed:
            raise ExperimentError(*failed)
        difference = difference_of([claims for _, claims in said])
        if difference:
            raise ExperimentError(difference)
        self.reached = True

    def fail(self, error: FedsimError) -> None:
        """Tell the others, in their check, the error of this rank."""
        self.settled = True
        self._ranks.gather_objects((str(error).splitlines()[:1], None))


def difference_of(claims: list[Claims]) -> str | None:
    """The first difference of a rank from rank 0, in one line with both values."""
    for rank, theirs in enumerate(claims):
        for kind, ours in claims[0].items():
            differing = [key for key in {**ours, **theirs[kind]} if ours.get(key) != theirs[kind].get(key)]
            if differing:
                values = ", ".join(
                    f"{key} = {_said(ours, key)} on rank 0 and {_said(theirs[kind], key)} on rank {rank}"
                    for key in differing[:SHOWN]
                )
                more = f" (and {len(differing) - SHOWN} more)" if len(differing) > SHOWN else ""
                return f"the ranks differ in {kind}: {values}{more}"
    return None


def digest(tensor: Tensor) -> str:
    """A hash of a tensor's values, shape and dtype."""
    values = tensor.detach().cpu().contiguous()
    state = hashlib.blake2b(f"{values.dtype} {tuple(values.shape)}".encode(), digest_size=8)
    state.update(values.flatten().view(torch.uint8).numpy().data)
    return state.hexdigest()


def _versions() -> dict[str, str]:
    versions = {"fedsim": __version__, "torch": str(torch.__version__), "numpy": np.__version__}
    return {**versions, "python": ".".join(platform.python_version_tuple()[:2])}


def _said(claims: Mapping[str, Any], key: str) -> str:
    return show(claims[key]) if key in claims else "not set"
