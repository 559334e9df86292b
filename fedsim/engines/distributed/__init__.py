"""Ranks that torchrun, srun or mpirun has started, on one machine or several."""
