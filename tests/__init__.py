"""Settings that must be in the environment before PyTorch is imported, here and in every process that a test starts."""

import os

# OpenMP threads must not spin while they wait: several test processes share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
