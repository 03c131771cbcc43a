"""Exceptions that end a program with one line instead of a traceback, each with its exit code."""

import contextlib
from collections.abc import Iterator

from fedmpi.ground.text import short

LONGEST = 2000  # characters of a message, which may quote anything


class UserError(Exception):
    """Wrong input, found before any work starts; its text is the one line shown (exit code 2).

    Args:
        where: the place in a silo's data, in numbers, like "line 5"; other ranks get to know it.

    >>> import fedmpi
    >>> fedmpi.algorithms.FedAvg(step_size=-0.1)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedmpi.ground.errors.UserError: algorithm.step_size = -0.1: expected a number > 0 ...
    """

    def __init__(self, text: object = "", where: str = "") -> None:
        self.where = where
        line = "".join(letter if letter.isprintable() else " " for letter in str(text))
        super().__init__(line if len(line) <= LONGEST else f"{line[:LONGEST]}...")


def one_line(error: BaseException) -> str:
    """What an error says, in one line; of an error of the operating system only the reason, without number and path."""
    text = str(short(getattr(error, "strerror", None) or error))
    return text if text and not isinstance(error, KeyError) else f"{type(error).__name__}: {text}".rstrip(": ")


def cannot(verb: str, path: object, error: BaseException) -> UserError:
    """The `UserError` of a file that cannot be read or written.

    Args:
        verb: "read", "write", "read as HDF5", ... path: as the user knows it.

    >>> raise cannot("read", "run.yaml", FileNotFoundError(2, "No such file or directory"))
    Traceback (most recent call last):
    fedmpi.ground.errors.UserError: run.yaml: cannot be read: No such file or directory
    """
    return UserError(f"{path}: cannot be {verb.replace('write', 'written')}: {one_line(error)}")


@contextlib.contextmanager
def attempt(verb: str, path: object, *kinds: type[BaseException]) -> Iterator[None]:
    """A context in which errors of some kinds, by default `OSError`, become the `UserError` of `cannot`."""
    kinds = kinds or (OSError,)
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        raise cannot(verb, path, error) from None


class AgreedUserError(UserError):
    """A `UserError` that is raised on all ranks (exit code 2); see `fedmpi.comm.agreement.agree` for its text.

    Args:
        is_printed: whether this rank prints it, as one of them does.
    """

    def __init__(self, text: object, is_printed: bool) -> None:
        super().__init__(text)
        self.is_printed = is_printed


STOPPED = 75  # exit code: stopped by a signal, a checkpoint is written (EX_TEMPFAIL of sysexits.h: try again later)
INTERRUPTED = 130  # exit code: Ctrl-C (128 and the number of SIGINT, as in shells)


class Stopped(Exception):
    """A signal ended the run early, and a checkpoint of it is written; raised on all ranks (exit code 75)."""


class Diverged(Exception):
    """A loss became infinite or not a number; raised on all ranks (exit code 1)."""


class ReplicasDiffer(Diverged):
    """Ranks have different values where they must be equal; raised on all ranks (exit code 1)."""
