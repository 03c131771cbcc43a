"""Exceptions that end a program with one line instead of a traceback, each with its exit code."""


class UserError(Exception):
    """Wrong input, found before any work starts; its text is the one line shown (exit code 2).

    >>> import fedmpi
    >>> fedmpi.algorithms.FedAvg(step_size=-0.1)
    Traceback (most recent call last):
    fedmpi.errors.UserError: algorithm.step_size = -0.1: expected a number > 0 (η, step size of the local SGD steps)
    """


class AgreedUserError(UserError):
    """A `UserError` that is raised on all ranks; its text is empty on ranks that need not print it (exit code 2)."""


STOPPED = 75  # exit code: stopped by a signal, a checkpoint is written (EX_TEMPFAIL of sysexits.h: try again later)


class Stopped(Exception):
    """A signal ended the run early, and a checkpoint of it is written; raised on all ranks (exit code 75)."""


class Diverged(Exception):
    """A loss became infinite or not a number; raised on all ranks (exit code 1)."""


class ReplicasDiffer(Diverged):
    """Ranks have different values where they must be equal; raised on all ranks (exit code 1)."""
