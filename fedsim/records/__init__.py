"""Write and read the files of a run: the run folder, the records of its rounds, and TensorBoard files."""
