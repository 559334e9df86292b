"""Running an experiment: setup, loops, recovery and resuming."""
