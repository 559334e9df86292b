"""Access to the operating system and hardware: devices, processes, memory, files and libraries."""
