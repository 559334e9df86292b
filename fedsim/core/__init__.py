"""The pieces that all else builds on: rows, the training step, random draws, the registry of plugs."""
