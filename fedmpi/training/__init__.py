"""One training run: from settings to a trained model in a run folder."""
