"""How the threads of OpenMP, by which PyTorch computes, wait for each other.

By default they spin: on a busy machine two threads of one process took ten times as long as one. PyTorch reads the
policy when it is imported, so `fedsim/__init__.py` sets it first; processes that are started later inherit it.
"""

from __future__ import annotations

import os
import sys
import warnings

POLICY = "OMP_WAIT_POLICY"

_came_too_late = False


def wait_passively() -> None:
    """Let OpenMP's threads sleep while they wait, unless the user has chosen a policy."""
    global _came_too_late
    _came_too_late = "torch" in sys.modules and POLICY not in os.environ
    os.environ.setdefault(POLICY, "PASSIVE")


def warn_if_threads_spin(threads: int) -> None:
    """One warning if several threads are asked for and PyTorch was imported before their policy could be set."""
    from fedsim.errors import FedsimWarning  # here, so that `import fedsim` stays fast

    if threads > 1 and _came_too_late:
        warnings.warn(
            f"threads_per_process = {threads}: PyTorch was imported before fedsim, so its threads spin while they "
            f"wait, which is slow on a busy machine; import fedsim first, or set {POLICY}=PASSIVE",
            FedsimWarning,
            stacklevel=2,
        )
