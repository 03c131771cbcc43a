"""The machine of the measurements."""

import datetime
import os
import platform
import sys

import torch

from fedmpi.comm.mpi_library import MPI
from fedmpi.machine.cores import processor_name, usable_cores
from fedmpi.machine.versions import versions


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
        **{name: version for name, version in versions().items() if name in ("python", "torch")},
        "mpi": MPI.Get_library_version().split("\n")[0].split("\0")[0].strip(),
        "command": f"python -m fedmpi.bench {' '.join(sys.argv[1:])}".strip(),
        "load": round(os.getloadavg()[0], 1),
    }
