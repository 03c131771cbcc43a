"""Files by which a script around the launcher learns what the ranks are doing."""

import contextlib
import os
import pathlib

from fedmpi.comm.start.orphan import started_directly

# A variable with a folder in which each rank of this machine has a file "open-PROCESS" while others may wait for it,
# and "prepares-PROCESS" while it has begun no round. launch/mpirun.sh and slurm/job.sh take one of the first for a
# failure if it is left, whatever code the launcher returns.
UNFINISHED = "FEDMPI_UNFINISHED"


def mark(state, is_so):
    """Write or remove this rank's file in the folder of `UNFINISHED`, if there is one; a rank's children have none."""
    folder = os.environ.get(UNFINISHED)
    if folder and started_directly():
        path = pathlib.Path(folder, f"{state}-{os.getpid()}")
        with contextlib.suppress(OSError):  # the folder is on another machine; the file was not there
            if is_so:
                path.touch()
            else:
                path.unlink()
