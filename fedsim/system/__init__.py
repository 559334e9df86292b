"""Access to the machine: hardware, processes, memory, files and libraries."""
