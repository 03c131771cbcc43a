"""A trained model measured on silos, without training: see `__main__`."""
