"""Checks of machines and job before a run: ``python -m fedmpi.doctor``."""

import fedmpi.program.ranks  # noqa: F401  before anything else of MPI: it says so if there is none
