"""Checks of a place where fedmpi is to run, before it runs: ``python -m fedmpi.doctor``."""
