"""Shared memory before MPI begins: with too little of it, MPICH dies of a bus error or a segmentation fault."""

import os
import pathlib
import sys

from fedmpi.comm.start.orphan import container

SHARED_FOLDER = "/dev/shm"  # where MPICH and Open MPI put shared windows on Linux
NEEDED = 5_400_000  # bytes of MPICH 5 per rank of a machine, as measured
# What MPICH needs less with, if the machine's shared memory is small in all: its queues, and UCX's in other memory.
SMALLER = {"MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS": "8", "UCX_TLS": "^posix"}
NEEDED_SMALLER = 300_000  # bytes per rank
OURS = "fedmpi-rows-"  # begins the names of fedmpi's own, which have one for a moment only
REMAINS = ("mpich_shm_*", "sm_segment*", "vader_segment*", "osc_*", "ucx_shm_*")  # what killed jobs leave


def prepare_shared_memory():
    """Let MPICH use less where there is little; end this process with one line if it would die of too little.

    The line is that of the machine's first rank. fedmpi removes nothing: what a job that was killed has left may be
    that of a job in another container.
    """
    folder = os.environ.get("PMIX_SERVER_TMPDIR", "")  # of Open MPI's launcher, which removes it
    if os.path.isdir(folder) and container():  # another one may have the same names in the same /dev/shm
        os.environ.setdefault("OMPI_MCA_btl_sm_backing_directory", folder)
    num_ranks = int(os.environ.get("MPI_LOCALNRANKS", "1"))
    if num_ranks < 2:
        return
    is_there, needed = os.path.isdir(SHARED_FOLDER), num_ranks * NEEDED
    status = os.statvfs(SHARED_FOLDER if is_there else "/")
    if status.f_blocks * status.f_frsize < 2 * needed:  # the same on all ranks, whatever they find used
        needed = num_ranks * NEEDED_SMALLER
        for name, value in SMALLER.items():
            os.environ.setdefault(name, value)
    free = status.f_bavail * status.f_frsize
    if not is_there:
        problem = "is missing"
    elif status.f_flag & os.ST_RDONLY:
        problem = "is read-only"
    elif free < needed:
        problem = f"has {free / 1024:,.0f} KiB left"
    else:
        return
    if os.environ.get("MPI_LOCALRANKID", "0") == "0":
        found = [path for name in REMAINS for path in pathlib.Path(SHARED_FOLDER).glob(name)]
        own_paths = [path for path in found if path.lstat().st_uid == os.getuid()]
        hint = f"expected {needed / 1024:,.0f} KiB that {num_ranks} ranks can write (in a container: --shm-size)"
        if own_paths:
            import shlex

            hint += f"; if no job of yours runs, killed ones have left files: rm {shlex.join(map(str, own_paths))}"
        print(f"fedmpi: error: {SHARED_FOLDER} {problem}: {hint}", file=sys.stderr, flush=True)
    sys.exit(2)
