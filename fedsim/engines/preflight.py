"""Check before the first round that all ranks have the same software versions, experiment and data."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fedsim.core.input_limits import leaves_of
from fedsim.data import TensorData
from fedsim.data.digests import digests_of
from fedsim.errors import ExperimentError, FedsimError, show
from fedsim.processes.process_group import RankGroup
from fedsim.version import __version__

OWN = ("device", "data.root")  # keys that may differ from host to host
EXPERIMENT = "the experiment"
SHOWN = 3  # maximum number of differences in an error message

Claims = dict[str, dict[str, Any]]  # a rank's versions, experiment and data digests, by kind and key


class Preflight:
    """Check before a run that all ranks have the same software versions, experiment and data.

    Each rank takes part once: it calls `settle`, or `fail` if an error occurs before the check.

    Attributes:
        settled: whether this rank has taken part in the check.
        passed: whether the check has found no differences.
    """

    def __init__(self, ranks: RankGroup, description: Mapping[str, Any]) -> None:
        self._ranks = ranks
        versions = {"fedsim": __version__, "torch": str(torch.__version__), "numpy": np.__version__}
        versions["python"] = ".".join(platform.python_version_tuple()[:2])
        shared = {key: value for key, value in leaves_of(description) if key not in OWN}
        self._claims: Claims = {"versions": versions, EXPERIMENT: shared}
        self.settled = self.passed = False

    def settle(self, train: TensorData, test: TensorData) -> None:
        """Compare this rank's software versions, experiment and data with those of the other ranks.

        Raises ExperimentError in all ranks if a rank differs from rank 0 or has failed.
        """
        data = digests_of({"training": train, "test": test})
        self.settled = True
        answers = self._ranks.gather_objects((None, {**self._claims, "the data": data}))
        lines = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(answers) if error]
        if lines or (lines := difference_of([claims for _, claims in answers])):
            raise ExperimentError(*lines)
        self.passed = True

    def fail(self, error: FedsimError) -> None:
        """Tell the other ranks that this rank has failed with `error`. They then raise ExperimentError."""
        self.settled = True
        self._ranks.gather_objects((str(error).splitlines()[0], None))


def difference_of(claims: list[Claims]) -> list[str]:
    """Return an error message about the first rank that differs from rank 0.

    The message is in a list, which is empty if all ranks agree.

    Args:
        claims: software versions, settings and data hashes of each rank.
    """

    def shown(rank: int, kind: str, key: str) -> str:
        values = claims[rank][kind]
        return f"{show(values[key]) if key in values else 'not set'} on rank {rank}"

    for rank, theirs in enumerate(claims):
        for kind, ours in claims[0].items():
            keys = [key for key in {**ours, **theirs[kind]} if ours.get(key) != theirs[kind].get(key)]
            if keys:
                values = [f"{key} = {shown(0, kind, key)} and {shown(rank, kind, key)}" for key in keys[:SHOWN]]
                more = f" (and {len(keys) - SHOWN} more)" if len(keys) > SHOWN else ""
                remedy = "; for separate runs, name another engine, such as engine=serial" * (kind == EXPERIMENT)
                return [f"the ranks differ in {kind}: {', '.join(values)}{more}{remedy}"]
    return []
