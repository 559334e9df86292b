"""The description of an experiment: its keys, its validation, and its loading from files and words."""
