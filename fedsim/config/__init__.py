"""The configuration of an experiment: keys, validation, and loading from files and from the command line."""
