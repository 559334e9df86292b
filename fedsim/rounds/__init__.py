"""Synchronous rounds, as executed by every process of a run."""
