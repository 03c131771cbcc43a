"""The run folder: its files, its records, the saved model."""
