"""Data sets in files of common formats: one module for each format, whose packages are imported on first use."""
