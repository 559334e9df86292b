"""A section whose module cannot be imported."""

raise ModuleNotFoundError("No module named 'pydantic'")
