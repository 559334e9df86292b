"""Callbacks of a run: records, checkpoints, displays, early stopping and user-defined callbacks."""

from fedsim.callbacks.callback import Callback, CurrentRun

__all__ = ["Callback", "CurrentRun"]
