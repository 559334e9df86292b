"""Asynchronous training: policies, and the two ways to run them, a virtual clock and a race of real processes."""
