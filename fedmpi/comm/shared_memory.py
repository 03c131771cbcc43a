"""Shared memory before MPI begins: what killed jobs left is removed, and there must be enough of it.

MPI removes its files at the end of a job; those of a job that is killed stay until the machine starts again. Too
little shared memory makes MPICH die of a bus error.
"""

import contextlib
import os
import pathlib
import re
import sys
import time

SHARED_FOLDER = "/dev/shm"  # where MPICH and Open MPI put shared windows on Linux
NEEDED = 4 << 20  # bytes; MPICH takes 2 MB for 2 ranks
OURS = "fedmpi-rows-"  # begins the names of fedmpi's own, which have one for a moment only
OF_JOBS = re.compile(rf"mpich_shm_\w+|(sm_segment|vader_segment|osc_sm|osc_rdma)\.[\w.-]+|{OURS}\w+")  # and MPI's
YOUNG = 10.0  # seconds; a younger file may not have been mapped yet by the process that made it
LOCAL_RANKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")  # a launcher's number on the node
_FIRST_PROCESSES, _FIRST_IPC = "pid:[4026531836]", "ipc:[4026531839]"  # Linux: proc_ns.h, outside of any container


def remove_remains(folder=SHARED_FOLDER):
    """Remove the files in shared memory of this user's MPI jobs that were killed: those that no process maps.

    Nothing is removed where processes may be hidden: in a container that shares the machine's memory. One rank of a
    node does it for all.
    """
    number = next((os.environ[name] for name in LOCAL_RANKS if name in os.environ), "0")
    if number != "0" or not sys.platform.startswith("linux") or not os.path.isdir(folder):
        return
    with contextlib.suppress(OSError):
        sees_all = os.readlink("/proc/self/ns/pid") == _FIRST_PROCESSES
        if not sees_all and os.readlink("/proc/self/ns/ipc") == _FIRST_IPC:
            return
        remains = {entry.path for entry in os.scandir(folder) if OF_JOBS.fullmatch(entry.name) and _is_old(entry)}
        for path in remains - _mapped() if remains else ():
            with contextlib.suppress(OSError):
                os.unlink(path)


def _is_old(entry):
    """Whether an entry of a folder is a file of this user that was not made just now."""
    status = entry.stat(follow_symlinks=False)
    return (
        entry.is_file(follow_symlinks=False) and status.st_uid == os.getuid() and time.time() - status.st_mtime > YOUNG
    )


def _mapped():
    """The paths in shared memory that a process of this user maps; those of others cannot map this user's files."""
    found = set()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == os.getuid():
                maps = (process / "maps").read_text(encoding="utf-8", errors="replace")
                found |= set(re.findall(rf"{SHARED_FOLDER}/\S+", maps))
    return found


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
