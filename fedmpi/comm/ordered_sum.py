"""Sums in a given order by messages: each rank adds one slice of all ranks' partial sums."""

import torch

from fedmpi.comm.link import divide
from fedmpi.comm.window import slices

PIECE = 4 << 20  # bytes of each vector that are exchanged at once, which bounds the memory for what arrives


def combine(comm, vectors, partials, divisor, out):
    """out = (sum of all ranks' partial sums) / divisor; the bits do not depend on which rank holds which partial sum.

    Collective on `comm`.

    Args:
        comm: a `Communicator`.
        vectors: [n] each, contiguous, on the CPU: this rank's, one for each slot; they are left as they are.
        partials: a `Partials` whose ranks are those of `comm`. divisor: a number.
        out: [n], contiguous, on the CPU; may be one of the vectors.
    """
    # For each rank, the names of the partial sums that it holds; layer k consists of the k-th of every rank.
    held = [[name for name, (owner, _) in partials.holders.items() if owner == rank] for rank in range(comm.size)]
    step = PIECE // out.element_size()
    for begin in range(0, out.numel(), step):
        piece = slice(begin, min(begin + step, out.numel()))
        parts = slices(0, piece.stop - begin, comm.size, out.element_size())
        counts = [part.stop - part.start for part in parts], [part.start for part in parts]
        mine = {}  # name -> this rank's slice of that sum
        for layer in range(max(map(len, held))):
            names = [of_rank[layer] if layer < len(of_rank) else None for of_rank in held]
            sent = names[comm.rank]
            vector = out[:0] if sent is None else vectors[partials.holders[sent][1]][piece]
            mine |= _send_slices(comm, names, vector, counts)
        for a, b in partials.steps:
            mine[a].add_(mine[b])
        total = mine[partials.root]
        divide(total, divisor, total)
        comm.wait(comm.mpi.Iallgatherv(total.numpy(), [out[piece].numpy(), counts]))


def _send_slices(comm, names, vector, counts):
    """Every rank's slice of one vector of each rank. Collective on `comm`.

    Args:
        names: of each rank's vector; None if a rank sends nothing.
        vector: of this rank. counts: (length, begin) of each rank's slice.

    Returns:
        name -> [length of this rank's slice].
    """
    mine = counts[0][comm.rank]
    arrived = torch.empty(comm.size - names.count(None), mine, dtype=vector.dtype)
    outgoing = counts if names[comm.rank] is not None else ([0] * comm.size, [0] * comm.size)
    incoming = [0 if name is None else mine for name in names]
    comm.wait(comm.mpi.Ialltoallv([vector.numpy(), outgoing], [arrived.numpy(), incoming]))
    return dict(zip((name for name in names if name is not None), arrived))
