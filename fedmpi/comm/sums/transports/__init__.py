"""The ways in which ranks sum a block of rows; ``--transport`` chooses one by its name."""
