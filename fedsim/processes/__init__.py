"""Processes that work together: a pool on one machine, or the ranks of a launcher."""
