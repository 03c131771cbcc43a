"""How a program of several ranks begins and ends: in order on all ranks, or at once on all ranks."""

import atexit
import gc
import sys
import time
import traceback

from fedmpi.comm.agreement import agree
from fedmpi.comm.faults.neighbour import exit_at_once
from fedmpi.comm.faults.survivors import is_loss
from fedmpi.comm.job.exits import forget
from fedmpi.comm.job.opening import open_link
from fedmpi.comm.job.output import check_output, make_output_safe, print_log, write_past_launcher
from fedmpi.comm.job.program import doing
from fedmpi.comm.start.launch import OUTPUT_SECONDS, check_launch
from fedmpi.ground.errors import INTERRUPTED, STOPPED, AgreedUserError, Diverged, Stopped, UserError
from fedmpi.ground.text import LONGEST_MESSAGE, short


def run_program(program, arguments, check=check_launch):
    """Run `program(arguments, link)` and end the process with the right exit code.

    Errors that are raised on all ranks end them in order: `AgreedUserError` with exit code 2, `Diverged`
    with 1, `Stopped` with 75. Any other error on one rank, also `sys.exit` inside a user's model, aborts the
    whole job with one line that names rank and client, because the other ranks may wait for this one in a
    collective and would never end; if MPI reports that a rank has died, with exit code 75, worth another attempt.
    ``--traceback`` among the arguments also prints the traceback.
    Collective over all ranks.

    Args:
        check: called with the link before the program; it raises a `UserError` if the ranks did not find each other.
    """
    make_output_safe()
    print_log()
    atexit.register(gc.freeze)  # then Python ends without a search for garbage in all of torch: 0.3 s of each rank
    doing("connect the ranks")
    link = _make_link(check)
    write_past_launcher()
    wants_traceback = "--traceback" in arguments
    try:
        program(arguments, link)
        _leave(link, 0)
    except AgreedUserError as error:
        end_in_order(link, str(error) if error.is_printed else "", error if wants_traceback else None, code=2)
    except Diverged as error:
        end_in_order(link, str(error) if link.rank == 0 else "", None, code=1)
    except Stopped as stopped:
        if link.rank == 0:
            print(f"fedmpi: {stopped}", file=sys.stderr, flush=True)
        end_in_order(link, "", None, code=STOPPED)
    except KeyboardInterrupt:
        _end_interrupted(link)
    except BaseException as error:  # noqa: BLE001  any error must end the job
        end_at_once(link, error, wants_traceback)


def _make_link(check):
    """The link of all ranks; ends the job if one of them has died before."""
    try:
        return open_link(check=check)
    except UserError as error:  # MPI is finalized, or not there
        print(f"fedmpi: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except Exception as error:
        if is_loss(error):
            print("fedmpi: error: a rank was lost before the others were ready", file=sys.stderr, flush=True)
            exit_at_once(STOPPED)
        raise


def show(link, text):
    """Print a text on rank 0 that is all that the program does, like that of --help. Collective on the link.

    Raises:
        AgreedUserError: on every rank, if the disk is full.
    """
    doing(None)
    if link.rank == 0:
        print(text, flush=True)
    agree(link, check_output)


def end_in_order(link, text, error, code):
    """End all ranks together; a rank without a text prints nothing. Collective on the link."""
    doing(None)
    if text:
        if error is not None:
            traceback.print_exception(error)
        print(f"fedmpi: error: {short(text, LONGEST_MESSAGE)}", file=sys.stderr, flush=True)
    link.barrier()  # so that no launcher kills a rank before it has printed
    _leave(link, code)
    if "mpi4py.run" in sys.modules:  # `python -m mpi4py` would abort the job at an exit code that is not 0
        link.finalize()
    sys.exit(code)


def _leave(link, code):
    """Close the link; if ranks may be lost, end this process without MPI_Finalize, which may wait for them forever."""
    doing(None)
    forget(link)
    if link.survives:
        link.wait_for_survivors()  # until then the others that are left may need this rank
        sys.stdout.flush()
        sys.stderr.flush()
        exit_at_once(code)
    link.close()


def _end_interrupted(link):
    """End all ranks at once after Ctrl-C. Not collective.

    Usually all ranks are interrupted, and rank 0 prints the line for all; another rank does so if it is the only one.
    """
    if link.rank > 0:
        time.sleep(2 * OUTPUT_SECONDS)  # rank 0 ends this one meanwhile
    print(f"fedmpi: interrupted during {link.phase}{link.how_to_resume()}", file=sys.stderr, flush=True)
    time.sleep(OUTPUT_SECONDS)
    link.abort(INTERRUPTED)


def end_at_once(link, error, wants_traceback):
    """Print one line about this rank's error and abort all ranks. Not collective."""
    doing(None)
    client = getattr(error, "fedmpi_client", None)
    where = f"rank {link.rank}" + ("" if client is None else f", client {client}")
    code, hint = 1, " (--traceback prints the traceback)"
    if isinstance(error, UserError):
        message, code, hint = str(error), 2, ""
    elif is_loss(error):
        message, code, hint = f"another rank was lost in {link.phase}", STOPPED, ""
    elif isinstance(error, SystemExit):
        message = f"sys.exit({error.code!r}) was called"
        code = error.code if isinstance(error.code, int) and 0 < error.code < 256 else 1
    else:
        message = ": ".join(filter(None, [type(error).__name__, " ".join(str(error).split())]))
    if wants_traceback:
        traceback.print_exception(error)
        hint = ""
    print(f"fedmpi: error on {where}: {short(message, LONGEST_MESSAGE)}{hint}", file=sys.stderr, flush=True)
    time.sleep(OUTPUT_SECONDS)
    if is_loss(error):  # the others notice it, too; Open MPI's mpirun makes 0 of the code of the last rank that aborts
        exit_at_once(code)
    link.abort(code)
