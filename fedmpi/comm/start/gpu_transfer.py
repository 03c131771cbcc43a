"""Whether this MPI reads and writes GPU memory, tried in a process of its own: an MPI that cannot ends that process.

    python -m fedmpi.comm.start.gpu_transfer cuda:0

It sends a vector to itself and adds another one, both in the memory of the device, and prints "right" if both are.
"""

import os
import subprocess
import sys

NUMEL = 1 << 16  # enough for what MPI does with large messages
LIMIT = 120.0  # seconds; most of it to import torch from a slow disk
# Variables by which launchers tell a process which rank it is: the process that tries is no rank of this job.
LAUNCHERS = ("PMI_", "PMIX_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL", "OMPI_COMM_", "OMPI_UNIVERSE_", "SLURM_")


def why_not(device, command=(sys.executable, "-m", "fedmpi.comm.start.gpu_transfer"), limit=LIMIT):
    """Why MPI does not transfer the memory of a device, as text; "" if it does. Not collective.

    Args:
        device: of torch. command: the program that tries it; its last argument is the device.
        limit: seconds after which it is ended.
    """
    environment = {name: text for name, text in os.environ.items() if not name.startswith(LAUNCHERS)}
    try:
        tried = subprocess.run(
            [*command, str(device)],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"a transfer of GPU memory by MPI did not end ({type(error).__name__})"
    if tried.returncode != 0:
        ended = f"signal {-tried.returncode}" if tried.returncode < 0 else f"code {tried.returncode}"
        return f"a process that transfers GPU memory by MPI ended with {ended}"
    return "" if tried.stdout.split()[-1:] == ["right"] else "MPI transfers wrong values of GPU memory"


def transfer(device):
    """Whether MPI sends and adds vectors in the memory of a device rightly; it may end the process."""
    import torch
    from mpi4py import MPI

    sent = torch.arange(NUMEL, dtype=torch.float32, device=device)
    received, added = torch.zeros_like(sent), torch.ones_like(sent)
    if sent.device.type != "cpu":
        torch.accelerator.synchronize(sent.device)
    MPI.COMM_SELF.Sendrecv(sent, 0, recvbuf=received, source=0)
    MPI.SUM.Reduce_local(sent, added)
    return torch.equal(received, sent) and torch.equal(added, sent + 1)


if __name__ == "__main__":
    print("right" if transfer(sys.argv[1]) else "wrong")
