"""The virtual clock: a discrete-event simulation, and how long things take on it."""
