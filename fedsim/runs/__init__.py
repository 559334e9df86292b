"""Running an experiment: setup, loops, checkpoints, recovery and resuming."""
