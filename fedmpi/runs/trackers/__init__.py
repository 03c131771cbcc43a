"""Programs that show runs and can be told their records: one class each, chosen by ``--track``."""
