"""Hints in error messages: what fedsim calls a key, a name, a value or an attribute that it does not know."""
