"""How fast communication rounds are on this machine: ``mpirun -np 2 python -m fedmpi bench --help``."""

from fedmpi.comm.job import program  # noqa: F401  before torch, whose threads read how to wait
