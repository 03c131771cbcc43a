"""Programs that show runs, and are given what a run records: one class each, chosen by ``--track``."""
