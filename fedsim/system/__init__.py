"""The machine: its hardware, processes, memory, files and libraries."""
