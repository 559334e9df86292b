"""Asynchronous training: policies, and two ways to run them: on a virtual clock, or as a race of real processes."""
