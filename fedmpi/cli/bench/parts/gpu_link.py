"""Sums of vectors in the memory of GPUs by the transports for them, beside a copy to the host and back.

Without GPUs the vectors are in the memory of the CPU, where copies and gloo stand in for those to a GPU and for NCCL.
"""

import torch

from fedmpi.cli.bench.timing import Case
from fedmpi.comm.sums.mpi import MPILink
from fedmpi.ground.errors import UserError
from fedmpi.ground.machine.devices import pick_device
from fedmpi.ground.text import format_bytes, format_table

SIZES, QUICK_SIZES = [64 << 10, 1 << 20, 16 << 20, 256 << 20], [64 << 10, 1 << 20]
TRANSPORTS = ("allreduce", "staged", "nccl", "cuda_aware")
COPY = "copies"


def measure(bench):
    """Print the table. Collective."""
    if bench.link.size == 1:
        bench.results.print("", "gpu_link: one rank has nothing to sum; start two or more: mpirun -np 2 ...")
        return
    device = pick_device("auto", bench.link)
    sizes = QUICK_SIZES if bench.quick else SIZES
    rows, missing = [], {}
    for nbytes in sizes:
        links = {name: MPILink(bench.link.comm, transport=name) for name in TRANSPORTS if name not in missing}
        cases = [Case(COPY, _copies(nbytes // 4, device))]
        for name, link in links.items():
            try:
                block = link.allocate(nbytes // 4, torch.float32, device)
                cases.append(Case(name, lambda link=link, block=block: link.allreduce(block)))
            except UserError as error:
                missing[name] = str(error)
        times = bench.time_cases(cases, bench.seconds / len(sizes))
        shown = bench.results.against(f"gpu_link/{device.type}/{nbytes}", times, COPY)
        rows += [[format_bytes(nbytes), *row] for row in shown]
        for link in links.values():
            link.close()
    bench.results.print("", f"gpu_link: float32 sums over {bench.link.size} ranks, vectors on the {device.type}")
    if device.type == "cpu":
        bench.results.print("  no GPU is here: copies, gloo and files in shared memory stand in for it")
    bench.results.print(*format_table(["bytes", "", "ms", f"/{COPY}"], rows))
    bench.results.print(*(f"  {name}: {error}" for name, error in missing.items()))


def _copies(numel, device):
    """A function that copies a vector from the device to the host and back."""
    block, host = torch.zeros(numel, device=device), torch.zeros(numel, pin_memory=device.type == "cuda")

    def copy():
        host.copy_(block, non_blocking=True)
        block.copy_(host, non_blocking=True)

    return copy
