"""The machine and the memory of this process."""

import contextlib
import ctypes
import datetime
import os
import platform
import sys

import torch

from fedmpi.comm.mpi_library import MPI
from fedmpi.machine.cores import processor_name, usable_cores


def reset_peak_memory():
    """Set `peak_memory` back to what is in use now: malloc returns freed memory first."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak_memory():
    """Largest resident size of this process in bytes, since the last `reset_peak_memory`."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["VmHWM"].split()[0]) * 1024


def describe_machine(link):
    """Hardware, software, command and date of the measurements, as a dict of texts and numbers."""
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "processor": processor_name(),
        "cores": len(usable_cores()),
        "ranks": link.size,
        "nodes": link.num_nodes,
        "threads per rank": torch.get_num_threads(),
        "oversubscribed": link.oversubscribed,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mpi": MPI.Get_library_version().split("\n")[0].split("\0")[0].strip(),
        "command": f"python -m fedmpi.bench {' '.join(sys.argv[1:])}".strip(),
        "load": round(os.getloadavg()[0], 1),
    }
