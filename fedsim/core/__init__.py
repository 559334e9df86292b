"""Rows, the training step, random draws, and the registry of components."""
