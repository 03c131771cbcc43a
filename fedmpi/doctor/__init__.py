"""Checks of machines and job before a run: ``python -m fedmpi.doctor``."""
