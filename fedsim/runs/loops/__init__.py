"""The rounds of a run: synchronous, on the virtual clock, or as a race."""
