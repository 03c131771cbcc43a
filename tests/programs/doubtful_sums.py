"""Transports for GPUs that sum wrongly, do not connect, or find some ranks without a GPU.

Rank 0 prints what each rank met.
"""

import time

import torch
from mpi4py import MPI

import fedmpi.comm.sums.mpi
from fedmpi.comm.sums.mpi import MPILink
from fedmpi.comm.sums.transports import nccl
from fedmpi.ground.errors import UserError

world = MPI.COMM_WORLD
is_last = world.rank == world.size - 1


def average(link, values, times=1):
    """The average of a block, or the error's text."""
    try:
        block = link.allocate(len(values), torch.float32)
        for _ in range(times):
            block.copy_(values)
            link.average(block, link.size, block)
        return block.clone()
    except UserError as error:
        return str(error)


def say(what, text):
    """One line of each rank."""
    for line in world.allgather(f"rank {world.rank}, {what}: {text}"):
        if world.rank == 0:
            print(line)


for name in ("staged", "nccl"):
    # Cancellation, huge, not finite: no reason to doubt a sum.
    values = torch.randn(40_000, generator=torch.manual_seed(3)) * (-1) ** world.rank
    values[:3] = torch.tensor([3e38, torch.inf, torch.nan])
    right = MPILink(transport=name)
    say(name, "right" if isinstance(average(right, values, times=3), torch.Tensor) else "doubted")
    right.close()

    wrong = MPILink(transport=name)
    transport = next(one for one in wrong._transports.values() if one.name == name)
    sums_rightly = transport.average

    def sums_wrongly(block, divisor, out, sums_rightly=sums_rightly):
        sums_rightly(block, divisor, out)
        if is_last:
            out[-1] *= 1.001

    transport.average = sums_wrongly
    say(f"{name}, wrong", average(wrong, torch.ones(40_000)))
    say(f"{name}, left to compare", transport.num_compared)

link = MPILink(transport="nccl")
make_group, nccl.CONNECTING = nccl._make_group, 2.0
nccl._make_group = lambda *args: time.sleep(600 if is_last else 0) or make_group(*args)
say("late", average(link, torch.ones(8)))

fedmpi.comm.sums.mpi.device_number = lambda device: -1.0 if is_last else 5.0
for name in ("auto", "shared"):
    link = MPILink(transport=name)
    found = average(link, torch.ones(40_000))
    say(f"unequal, {name}", found if isinstance(found, str) else f"{found.mean():g} by {link.summed_by}")
