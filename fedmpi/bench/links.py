"""The link: sums of flat buffers by size and transport, and of a model's tensors one by one."""

import torch
from mpi4py import MPI

from fedmpi.bench.measure import Contestant, contest
from fedmpi.comm.mpi import MPILink

KIB = 1024
SIZES = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1 << 20, 4 << 20, 16 << 20, 32 << 20, 64 << 20, 256 << 20]
QUICK_SIZES = [4 * KIB, 64 * KIB, 1 << 20, 8 << 20]
# name -> sizes of the parameter tensors
MODELS = {
    "cnn, 8 tensors": [800, 32, 51200, 64, 1605632, 512, 5120, 10],
    "deep, 200 tensors": [4096, 64] * 100,
    "resnet18, 62 tensors": [
        1728, 64, 64, *[36864, 64, 64] * 4, 73728, 128, 128, 147456, 128, 128, 8192, 128, 128, *[147456, 128, 128] * 2,
        294912, 256, 256, 589824, 256, 256, 32768, 256, 256, *[589824, 256, 256] * 2,
        1179648, 512, 512, 2359296, 512, 512, 131072, 512, 512, *[2359296, 512, 512] * 2, 5120, 10,
    ],
}  # fmt: skip


def measure_size(link, nbytes, seconds, one_call=True):
    """Sums of float32 buffers of `nbytes`. Collective.

    Returns:
        dict of name -> `Times`: "shared", "allreduce" (ours: in pieces, waiting as the node needs),
        "one call" (a plain MPI_Allreduce) and "copy" (memory to memory).
    """
    numel = nbytes // 4
    shared, ours = (MPILink(link.comm, transport=transport) for transport in ("shared", "allreduce"))
    in_window, block = shared.allocate(numel, torch.float32), ours.allocate(numel, torch.float32)
    plain, copy = torch.zeros(numel), torch.zeros(numel)
    rivals = [
        Contestant("shared", lambda: shared.sum(in_window)),
        Contestant("allreduce", lambda: ours.allreduce(block)),
        Contestant("copy", lambda: copy.copy_(plain)),
    ]
    if one_call:
        rivals.append(Contestant("one call", lambda: link.comm.Allreduce(MPI.IN_PLACE, plain.numpy())))
    times = contest(link, rivals, seconds, least=3)
    shared.close()
    ours.close()
    return times


def measure_model(link, sizes, seconds):
    """One flat sum against a sum for every tensor of `sizes` elements. Collective.

    Returns:
        dict of name -> `Times`: "flat", "flat, plain", "per tensor".
    """
    chosen, ours = MPILink(link.comm), MPILink(link.comm, transport="allreduce")
    block, other = (one.allocate(sum(sizes), torch.float32) for one in (chosen, ours))
    tensors = [torch.zeros(size) for size in sizes]

    def per_tensor():
        for tensor in tensors:
            ours.sum(tensor)

    rivals = [
        Contestant("flat", lambda: chosen.allreduce(block)),
        Contestant("flat, plain", lambda: ours.sum(other)),
        Contestant("per tensor", per_tensor),
    ]
    times = contest(link, rivals, seconds, least=3)
    chosen.close()
    ours.close()
    return times
