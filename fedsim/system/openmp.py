"""The wait policy of the OpenMP threads that PyTorch uses.

By default threads spin while they wait: on a busy machine, two threads of one process took ten times as long as one.
PyTorch reads the policy when it is imported, so `fedsim/__init__.py` sets it first. Child processes inherit it.
"""

from __future__ import annotations

import os
import sys
import warnings

POLICY = "OMP_WAIT_POLICY"

_torch_was_imported_first = False


def wait_passively() -> None:
    """Let OpenMP threads sleep while they wait, unless the user has chosen a policy."""
    global _torch_was_imported_first
    _torch_was_imported_first = "torch" in sys.modules and POLICY not in os.environ
    os.environ.setdefault(POLICY, "PASSIVE")


def warn_if_threads_spin(threads: int) -> None:
    """Warn if several threads are requested and PyTorch was imported before the policy was set."""
    from fedsim.errors import FedsimWarning  # here, so that `import fedsim` stays fast

    if threads > 1 and _torch_was_imported_first:
        warnings.warn(
            f"threads_per_process = {threads}: PyTorch was imported before fedsim, so its threads spin while they "
            f"wait, which is slow on a busy machine; import fedsim first, or set {POLICY}=PASSIVE",
            FedsimWarning,
            stacklevel=2,
        )
