"""Asynchronous training: workers that take their own time, on a virtual clock."""
