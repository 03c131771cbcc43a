"""Federations under --aggregation masked on 3 and 4 of the ranks, in some placements: the bits of `reproducible`.

Under mpirun with 4 ranks. What each rank puts on the wire is kept and looked at: no client's words occur in it, its
bytes are spread evenly, and no key is used twice with the same nonce. Rank 0 prints one line per algorithm.
"""

import functools
import sys
import traceback

import numpy as np
import torch
from mpi4py import MPI
from reproducible import ALGORITHMS, CLIENTS, check, gradient, run

from fedmpi import algorithms
from fedmpi.aggregation import hidden_sums
from fedmpi.aggregation.masked import Masked
from fedmpi.aggregation.reproducible import Reproducible
from fedmpi.aggregation.sending import Sending
from fedmpi.comm.sums.mpi import MPILink
from fedmpi.federation import Federation, Plan, Variables
from fedmpi.oracles import FunctionOracle

PLACEMENTS = [
    ([range(3), range(3, 5), range(5, 7)], "001", "shared", 0),
    ([range(1), range(1, 4), range(4, 6), range(6, 7)], None, "auto", 2),
    ([[6, 1], [4, 0, 3], [5], [2]], "0110", "allreduce", 1),
]
USED = set()  # (key, nonce) of every stream of this process


class Counted(hidden_sums.Stream):
    """A stream that fails if its key has had the nonce before."""

    def __init__(self, key, nonce):
        assert (key, nonce) not in USED
        USED.add((key, nonce))
        super().__init__(key, nonce)


class Listened(Masked):
    """Keeps what this rank would have sent, and what it has sent."""

    def open(self, link, layout, clients):
        super().open(link, layout, clients)
        self.plain, self.sent, add = [], [], link.add_integers

        def listen(block, kind):
            self.sent.append(block.clone())
            add(block, kind)

        link.add_integers = listen

    def _encoded(self, number, dtype):
        pieces = []
        for place, total in super()._encoded(number, dtype):
            pieces.append(total.clone())
            yield place, total
        self.plain.append(torch.cat(pieces))


def looked_at(world):
    """Three rounds of a row of 300,000 words, of which no rank sees those of another one."""
    link = MPILink(world)
    dim, start = 300_000, torch.zeros(300_000)
    oracles = {link.rank: lambda state: FunctionOracle(gradient, state)}
    sending = Sending(Listened(least_ranks=3))
    federation = Federation(algorithms.FedAvg(), link, oracles, Plan(link.size, 2), Variables(start), sending)
    federation.start()
    for _ in range(3):
        federation.run_round()
    aggregation = federation.aggregation
    assert not aggregation.block.is_shared() and len(aggregation.sent) == 3
    for plain, sent in zip(aggregation.plain, aggregation.sent, strict=True):
        assert plain.numpy().tobytes()[:64] not in sent.numpy().tobytes()
        for block in range(0, dim, 100_000):
            a, b = (words[block : block + 100_000].numpy().astype(float) for words in (plain, sent))
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.016, "5 standard deviations"
        counts = np.bincount(np.frombuffer(sent.numpy().tobytes(), np.uint8), minlength=256)
        expected = sent.nbytes / 256
        assert ((counts - expected) ** 2 / expected).sum() < 360, "chi-square of 255 degrees of freedom at 1e-5"
    link.close()


def main(names):
    world = MPI.COMM_WORLD
    hidden_sums.Stream = Counted
    for name in names:
        for clients, colours, transport, neighbours in PLACEMENTS:
            takes_part = world.rank < len(clients)
            comm = world.Split(0 if takes_part else MPI.UNDEFINED, world.rank)
            found = []
            for aggregation in (Reproducible, functools.partial(Masked, least_ranks=2, neighbours=neighbours)):
                colour = int(colours[world.rank]) if colours and takes_part else None
                found += [run(name, comm, clients[world.rank], colour, transport, aggregation)] if takes_part else []
            check(len({*found}) <= 1, f"{name}, {clients}, {transport}")
        if world.rank == 0:
            print("same bits:", name, len(USED) > 0, flush=True)
    looked_at(world)
    if world.rank == 0:
        print("hidden", CLIENTS, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        main(sys.argv[1:] or ALGORITHMS)
    except BaseException:
        traceback.print_exc()
        MPI.COMM_WORLD.Abort(1)
