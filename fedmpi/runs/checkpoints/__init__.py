"""Checkpoints of runs: their files, when they are written, and how a run continues from one."""
