"""Callbacks: everything that watches the rounds of a run, from its records to the functions of its user."""

from fedsim.callbacks.callback import Callback, CurrentRun

__all__ = ["Callback", "CurrentRun"]
