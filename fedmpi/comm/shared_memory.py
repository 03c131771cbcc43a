"""A check that there is enough shared memory for MPI, made before MPI begins: without it MPICH dies of a bus error."""

import os
import sys

SHARED_FOLDER = "/dev/shm"
NEEDED = 4 << 20  # bytes; MPICH takes 2 MB for 2 ranks


def check_shared_memory():
    """End this process with one line, of the node's first rank, if MPICH would die for lack of shared memory."""
    if int(os.environ.get("MPI_LOCALNRANKS", "1")) < 2 or not os.path.isdir(SHARED_FOLDER):
        return
    status = os.statvfs(SHARED_FOLDER)
    free = status.f_bavail * status.f_frsize
    if status.f_flag & os.ST_RDONLY:
        what = "is read-only"
    elif free < NEEDED:
        what = f"has {free / 1024:,.0f} KiB left"
    else:
        return
    if os.environ.get("MPI_LOCALRANKID", "0") == "0":
        hint = "expected at least 4 MiB that ranks can write (in a container: --shm-size)"
        print(f"fedmpi: error: {SHARED_FOLDER} {what}: {hint}", file=sys.stderr, flush=True)
    sys.exit(2)
