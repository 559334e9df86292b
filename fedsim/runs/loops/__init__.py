"""Loops over the rounds of a run: synchronous rounds, asynchronous rounds on a virtual clock, and races."""
