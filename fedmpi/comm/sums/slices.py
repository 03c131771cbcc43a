"""Collective calls on vectors of any type by messages: slices of all vectors, whole vectors, sums of integers."""

import itertools

import numpy as np
import torch

from fedmpi.comm.start.mpi_library import MPI
from fedmpi.comm.sums.window import slices
from fedmpi.comm.vectors import Slices

PIECE = 4 << 20  # bytes of each vector that are exchanged at once, which bounds the memory for what arrives
WORDS = {torch.int32: np.uint32, torch.int64: np.uint64}  # what add_integers takes -> as what MPI adds it
# C leaves it undefined what happens when a sum of signed integers overflows; that of unsigned ones wraps.


def exchange_slices(ranks, vectors, reduce, out, dtype):
    """Let each rank reduce one slice of all ranks' vectors, and give all ranks the results; see `Link`.

    Collective on `ranks`, a `Communicator`; the vectors, of `dtype`, and `out` are on the CPU.
    """
    held, size = ranks.allgather([len(vectors)])[:, 0].astype(int), max(out.element_size(), dtype.itemsize)
    for begin in range(0, out.numel(), PIECE // size):
        piece = slice(begin, min(begin + PIECE // size, out.numel()))
        parts = slices(0, piece.stop - begin, ranks.size, size)
        lengths, begins = np.array([[part.stop - part.start, part.start] for part in parts]).T
        there, back = (
            ((lengths * each.itemsize).tolist(), (begins * each.itemsize).tolist()) for each in (dtype, out.dtype)
        )
        layers = []  # layer k consists of the k-th vector of every rank that has so many
        for k in range(max(held)):
            names = [k if k < number else None for number in held]
            vector = vectors[k][piece] if k < len(vectors) else torch.empty(0, dtype=dtype)
            layers.append(send_slices(ranks, names, vector, there))
        own_slices = [layers[k][rank] for rank, number in enumerate(held) for k in range(number)]
        own_part = parts[ranks.rank]
        own_slices = Slices(own_slices, slice(begin + own_part.start, begin + own_part.stop))
        total = reduce(own_slices).to(out.dtype).contiguous() if lengths[ranks.rank] else out[:0]
        ranks.wait(ranks.mpi.Iallgatherv(as_bytes(total), [as_bytes(out[piece]), back]))


def send_slices(ranks, names, vector, counts):
    """rank -> [length of this rank's slice] of one vector of each rank that sends. Collective on `ranks`.

    `names`: of each rank's vector; None if a rank sends nothing. `counts`: (length, begin) of each slice, in bytes.
    """
    own_length, senders = counts[0][ranks.rank], [rank for rank, name in enumerate(names) if name is not None]
    arrived = torch.empty(len(senders), own_length // vector.element_size(), dtype=vector.dtype)
    outgoing = counts if ranks.rank in senders else ([0] * ranks.size, [0] * ranks.size)
    incoming = [own_length if rank in senders else 0 for rank in range(ranks.size)]
    ranks.wait(ranks.mpi.Ialltoallv([as_bytes(vector), outgoing], [as_bytes(arrived), incoming]))
    return dict(zip(senders, arrived))


def allgather_vectors(ranks, vector):
    """[one vector per rank], of the same type and of any lengths. Collective on `ranks`; on the CPU."""
    lengths = ranks.allgather([vector.numel()])[:, 0].astype(int)
    everything = torch.empty(lengths.sum(), dtype=vector.dtype)
    element = MPI.BYTE.Create_contiguous(vector.element_size()).Commit()  # the number of bytes may exceed MPI's 32 bits
    ends = [0, *itertools.accumulate(lengths.tolist())]
    received = [as_bytes(everything), (lengths.tolist(), ends[:-1]), element]
    ranks.wait(ranks.mpi.Iallgatherv([as_bytes(vector), vector.numel(), element], received))
    element.Free()
    return [everything[begin:end] for begin, end in itertools.pairwise(ends)]


def add_integers(ranks, block):
    """Add up a vector of int32 or int64 in place, as unsigned words that wrap. Collective on `ranks`; on the CPU."""
    words, step = block.numpy().view(WORDS[block.dtype]), PIECE // block.element_size()
    for begin in range(0, words.size, step):
        ranks.wait(ranks.mpi.Iallreduce(MPI.IN_PLACE, words[begin : begin + step]))


def as_bytes(tensor):
    """The memory of a contiguous tensor on the CPU as bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
