"""Imported before PyTorch is, here and in every process that tests start."""

import os

# Threads that wait for others must not spin: processes of several tests share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
