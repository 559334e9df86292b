"""The engine `distributed`: one process per rank, started by torchrun, srun or mpirun on one or several machines."""
