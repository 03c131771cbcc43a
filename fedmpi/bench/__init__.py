"""How fast communication rounds are on this machine: ``mpirun -np 2 python -m fedmpi.bench --help``."""
