"""Sums by all transports, compared on every rank; prints one line a case from rank 0, or fails.

Arguments: the colours of the ranks, one digit each ("0011": two nodes of two ranks), or "real" for
the nodes as they are; several with commas are tried in turn. Then the device of the blocks, "cpu" if it is left out.
"""

import itertools
import sys

import numpy as np
import torch
from mpi4py import MPI

import fedmpi.comm.sums.transports.staged
from fedmpi.comm.sums.mpi import MPILink
from fedmpi.ground.machine.devices import pick_device

SIZES = (1, 7, 1001, 150001)


def tree(vectors):
    """Pairwise sum in rank order."""
    while len(vectors) > 1:
        pairs = itertools.zip_longest(vectors[::2], vectors[1::2])
        vectors = [a if b is None else a + b for a, b in pairs]
    return vectors[0]


def values(rank, numel, dtype):
    """What a rank puts in; any rank can say it of any other."""
    return np.random.default_rng([rank, numel]).standard_normal(numel).astype(dtype)


def check(ok, what):
    """Fail on all ranks if one disagrees."""
    bad = np.array([0 if ok else 1])
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, bad)
    assert bad[0] == 0, f"{what}: not so on {bad[0]} ranks"


def same_everywhere(array):
    """Whether this rank's array has the bits of rank 0's."""
    theirs = array.copy()
    MPI.COMM_WORLD.Bcast(theirs)
    return np.array_equal(theirs.view(np.uint8), array.view(np.uint8))


def main(many, device="cpu"):
    for colours in many.split(","):
        sum_on(colours, device)
    if MPI.COMM_WORLD.rank == 0:
        print("done")


def sum_on(colours, device):
    """Sums of all sizes by all transports, with the ranks on nodes of these colours."""
    world = MPI.COMM_WORLD
    colour = None if colours == "real" else int(colours[world.rank])
    shared = MPILink(transport="shared" if device == "cpu" else "allreduce", colour=colour)
    plain = MPILink(transport="allreduce", colour=colour)
    staged = MPILink(transport="staged", colour=colour)
    # On the CPU gloo stands in for NCCL, which needs a GPU for each rank.
    nccl = MPILink(transport="nccl" if torch.cuda.device_count() in (0, world.size) else "staged", colour=colour)
    name_of = {shared: "shared", plain: "allreduce", staged: "staged", nccl: "nccl"}
    links = tuple(name_of)
    fedmpi.comm.sums.transports.staged.CHUNK = 1 << 16  # so that the larger blocks have several
    one_node = shared.num_nodes == 1 and device == "cpu"
    for numel, dtype, divisor in itertools.product(SIZES, (np.float32, np.float64), (1, 3)):
        what = f"{world.size} ranks, nodes {colours}, {numel} {dtype.__name__}, divisor {divisor}"
        everyone = [values(rank, numel, dtype) for rank in range(world.size)]
        mine = torch.from_numpy(everyone[world.rank]).to(pick_device(device, plain))
        results = {}
        for link in links:
            block = link.allocate(numel, mine.dtype, mine.device)
            check(not block.any(), f"{what}: zeros at first")
            for _ in range(2):  # twice, so that a rank that runs ahead would be seen
                block.copy_(mine)
                link.average(block, divisor, block)
            in_place, out = block.clone(), torch.full_like(mine, torch.nan)
            block.copy_(mine)
            link.average(block, divisor, out)
            check(torch.equal(out, in_place), f"{what}: into other memory")
            # a part of the block, and memory that is not the link's
            first, last = numel // 3, numel - numel // 5
            part = link.allocate(numel, mine.dtype, mine.device)
            part.copy_(mine)
            link.average(part[first:last], divisor, part[first:last])
            check(
                torch.equal(part[first:last], out[first:last]) or name_of[link] != "shared",
                f"{what}: a part",
            )
            check(torch.equal(part[:first], mine[:first]), f"{what}: before the part")
            check(torch.equal(part[last:], mine[last:]), f"{what}: after the part")
            foreign = mine.clone()
            link.allreduce(foreign)
            check(np.allclose(foreign.cpu().numpy(), sum(everyone), rtol=1e-4, atol=1e-5), f"{what}: foreign memory")
            results[name_of[link]] = out.cpu().numpy()
            check(same_everywhere(out.cpu().numpy()), f"{what}: the same bits everywhere")
        tolerance = 1e-5 if dtype is np.float32 else 1e-13
        scale = np.abs(everyone).sum(0)
        for name in ("shared", "staged", "nccl"):
            difference = np.abs(results[name] - results["allreduce"])
            check((difference <= tolerance * scale).all(), f"{what}: {name} equals allreduce")
        if one_node:
            expected = tree(everyone) / dtype(divisor) if divisor != 1 else tree(everyone)
            for name in ("shared", "staged"):
                check(np.array_equal(results[name], expected), f"{what}: {name} pairwise in rank order")
        if world.rank == 0:
            print("equal:", what)
    check(plain.traffic.collectives == 5 * len(SIZES) * 4, "the account: one collective a sum")
    counts = [(link.traffic.collectives, link.traffic.nbytes) for link in links]
    check(len(set(counts)) == 1, "the account: the same for all transports")
    check(nccl.size == 1 or nccl.summed_by == "Allreduce", "foreign memory is summed by MPI")
    for link in links:
        link.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
