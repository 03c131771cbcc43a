"""Predictions of a trained model for the samples of a file."""
