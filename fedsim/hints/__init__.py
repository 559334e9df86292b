"""Hints in error messages about unknown keys, names, values and attributes: what fedsim calls them."""
