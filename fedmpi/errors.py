"""What goes wrong in a way that the user can mend: one line each, no traceback."""


class UserError(Exception):
    """Wrong input, found before any work starts; its text is the one line shown (exit code 2)."""


class AgreedUserError(UserError):
    """A user's error that every rank knows of, so that all can end in order; empty where another rank tells it."""


class Diverged(Exception):
    """A loss became infinite or not a number; raised on every rank alike (exit code 1)."""
