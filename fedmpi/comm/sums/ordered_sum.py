"""Sums in a given order by messages: each rank adds one slice of all ranks' partial sums."""

from fedmpi.comm.solo import divide
from fedmpi.comm.sums.slices import PIECE, as_bytes, send_slices
from fedmpi.comm.sums.window import slices


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
    size = out.element_size()
    step = PIECE // size
    for begin in range(0, out.numel(), step):
        piece = slice(begin, min(begin + step, out.numel()))
        parts = slices(0, piece.stop - begin, comm.size, size)
        counts = [(part.stop - part.start) * size for part in parts], [part.start * size for part in parts]
        own_slices = {}  # name -> this rank's slice of that sum
        for layer in range(max(map(len, held))):
            names = [of_rank[layer] if layer < len(of_rank) else None for of_rank in held]
            sent = names[comm.rank]
            vector = out[:0] if sent is None else vectors[partials.holders[sent][1]][piece]
            own_slices |= {names[rank]: part for rank, part in send_slices(comm, names, vector, counts).items()}
        for a, b in partials.steps:
            own_slices[a].add_(own_slices[b])
        total = own_slices[partials.root]
        divide(total, divisor, total)
        comm.wait(comm.mpi.Iallgatherv(as_bytes(total), [as_bytes(out[piece]), counts]))
