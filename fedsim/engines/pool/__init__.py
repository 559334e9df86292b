"""Process pools on one machine, and the memory that their processes share."""
