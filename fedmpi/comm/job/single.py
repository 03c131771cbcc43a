"""How a program of one process (data, report, sweep, predict, completion) begins and ends.

This module imports neither MPI nor torch, so that a program which needs neither starts at once.
"""

import contextlib
import os
import sys

from fedmpi.comm.job.output import check_output, print_log
from fedmpi.ground.errors import INTERRUPTED, STOPPED, Stopped, UserError
from fedmpi.ground.text import LONGEST_MESSAGE, short


def run_single(program, arguments):
    """Run `program(arguments)` and end the process with the right exit code.

    A `UserError` ends it with one line and exit code 2, Ctrl-C with one line and 130, `Stopped` with one line
    and 75. A closed standard output (``| head``) ends it silently with 1. An OSError that no check expected (too long a
    name, a full disk) ends it like a `UserError`.
    """
    print_log()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="backslashreplace")  # characters that the locale does not have
    try:
        program(arguments)
        sys.stdout.flush()  # here, so that a closed output is not reported at exit
        check_output()
    except UserError as error:
        print(f"fedmpi: error: {short(error, LONGEST_MESSAGE)}", file=sys.stderr)
        sys.exit(2)
    except Stopped as stopped:
        print(f"fedmpi: {stopped}", file=sys.stderr)
        sys.exit(STOPPED)
    except KeyboardInterrupt:
        print("fedmpi: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        discard_output()
        sys.exit(1)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else error
        print(f"fedmpi: error: {short(message, LONGEST_MESSAGE)}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # Python would try again, say so, and end with 120
            discard_output()
        sys.exit(2)


def discard_output():
    """Make standard output write to nowhere, after its reader has closed it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
