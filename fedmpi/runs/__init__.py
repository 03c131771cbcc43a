"""The run folder: its files, its records, the saved model, and how runs are compared."""
