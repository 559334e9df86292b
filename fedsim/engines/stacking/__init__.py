"""One module computed for many rows at once."""
