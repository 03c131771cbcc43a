"""A module of a user that cannot be imported."""

NOTHING = 1 / 0
