"""Running an experiment: setup, loops over the rounds, recovery from lost processes, and resuming."""
