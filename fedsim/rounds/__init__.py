"""The synchronous round, which every process of a run carries out."""
