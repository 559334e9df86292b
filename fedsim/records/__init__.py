"""What a run writes, and how it is read again: the run folder, its rounds, TensorBoard files."""
