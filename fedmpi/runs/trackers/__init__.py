"""Other programs that show runs and get what a run records: one class each, chosen by ``--track``."""
