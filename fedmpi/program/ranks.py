"""How every program of fedmpi ends: in order on all ranks, or at once on all ranks."""

import os
import sys
import time
import traceback

from fedmpi.comm.mpi import MPILink, cuda_aware_by_environment
from fedmpi.errors import AgreedUserError, Diverged, UserError

# Launchers drop output that they have not passed on when they hear of the abort (seen with MPICH's).
SECONDS_TO_BE_HEARD = 1.0


def run_program(program, arguments):
    """Run `program(arguments, link)` and end the process with the right exit code.

    Errors that all ranks meet alike end them in order: `AgreedUserError` with exit code 2, `Diverged`
    with 1. Anything else that ends one rank, also `sys.exit` inside a user's model, aborts the
    whole job with one line that names rank and client: the other ranks may be waiting for this one
    inside a collective and would wait for ever. ``--traceback`` among the arguments adds where.
    """
    link = MPILink(cuda_aware=cuda_aware_by_environment())
    show = "--traceback" in arguments
    try:
        program(arguments, link)
        link.close()
    except AgreedUserError as error:
        _end_in_order(link, str(error), error if show else None, code=2)
    except Diverged as error:
        _end_in_order(link, str(error) if link.rank == 0 else "", None, code=1)
    except BaseException as error:  # noqa: BLE001  the job must end whatever it was
        _end_at_once(link, error, show)


def show(text):
    """Print a text that is all the user asked for; a reader that has seen enough (``| head``) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed to nowhere


def _end_in_order(link, text, error, code):
    if text:
        if error is not None:
            traceback.print_exception(error)
        print(f"fedmpi: error: {text}", file=sys.stderr, flush=True)
    link.barrier()  # so that no launcher kills the rank that still has to print
    link.close()
    sys.exit(code)


def _end_at_once(link, error, show):
    client = getattr(error, "fedmpi_client", None)
    where = f"rank {link.rank}" + ("" if client is None else f", client {client}")
    code, hint = 1, " (--traceback shows where)"
    if isinstance(error, UserError):
        what, code, hint = str(error), 2, ""
    elif isinstance(error, SystemExit):
        what = f"sys.exit({error.code!r}) was called"
        code = error.code if isinstance(error.code, int) and 0 < error.code < 256 else 1
    else:
        what = ": ".join(filter(None, [type(error).__name__, " ".join(str(error).split())]))
    if show:
        traceback.print_exception(error)
        hint = ""
    print(f"fedmpi: error on {where}: {what}{hint}", file=sys.stderr, flush=True)
    time.sleep(SECONDS_TO_BE_HEARD)
    link.abort(code)
