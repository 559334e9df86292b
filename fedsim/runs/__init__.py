"""A run as a whole: from its start to its result, its states on disk, and how it goes on after an interruption."""
