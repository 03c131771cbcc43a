"""How fast communication rounds are on this machine: ``mpirun -np 2 python -m fedmpi.bench --help``."""

import fedmpi.program.ranks  # noqa: F401  before anything else of MPI: it says so if there is none
