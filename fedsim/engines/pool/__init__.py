"""A pool of processes on one machine, and what they share."""
