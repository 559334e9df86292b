"""Callbacks of a run: records, checkpoints, displays, early stopping and user-defined callbacks."""

from fedsim.callbacks.callback import Callback

__all__ = ["Callback"]
