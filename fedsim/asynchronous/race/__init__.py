"""Races: asynchronous training by real processes, which work on models in shared memory at the same time."""
