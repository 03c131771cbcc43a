"""How a program of one process ends (report, sweep): in order, with one line if something is wrong.

It knows neither MPI nor torch, so such a program starts in a moment.
"""

import sys

from fedmpi.errors import UserError


def run_single(program, arguments):
    """Run `program(arguments)`; a `UserError` ends the process with its one line and exit code 2."""
    try:
        program(arguments)
    except UserError as error:
        print(f"fedmpi: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("fedmpi: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
        sys.exit(1)
