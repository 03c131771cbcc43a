"""Checks of machines and job before a run: ``python -m fedmpi doctor``."""

from fedmpi.comm.job import program  # noqa: F401  before torch, whose threads read how to wait
