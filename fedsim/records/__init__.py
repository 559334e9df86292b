"""Writing and reading the files of a run: the run folder, its rounds, TensorBoard files."""
