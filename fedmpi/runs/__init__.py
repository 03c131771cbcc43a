"""The run folder: its files, its records, the saved model, and which runs belong together."""
