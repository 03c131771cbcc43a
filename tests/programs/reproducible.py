"""Federations under --aggregation reproducible on 1 to 4 of the ranks, in every placement: the same bits.

Under mpirun with 4 ranks; rank 0 prints one line per algorithm with the hash of all rows and losses, or it fails.
"""

import hashlib
import itertools
import traceback

import numpy as np
import torch
from mpi4py import MPI

from fedmpi import algorithms
from fedmpi.aggregation.mean import Mean
from fedmpi.aggregation.reproducible import Reproducible
from fedmpi.aggregation.sending import Sending
from fedmpi.comm.sums.mpi import MPILink
from fedmpi.federation import Federation, Plan, Variables
from fedmpi.federation.participation import draw_participants
from fedmpi.oracles import FunctionOracle

CLIENTS, DIM, ROUNDS = 7, 9000, 3  # 70 kB a row in float64: both transports split it
ALGORITHMS = ["FAFED", "SCAFFOLD", "MimeAdam", "FMGDA"]
# Clients of each rank; colours: ranks of one number are on one node.
PLACEMENTS = [
    ([range(7)], None),
    ([range(4), range(4, 7)], None),
    ([range(3), range(3, 5), range(5, 7)], "001"),
    ([range(1), range(1, 4), range(4, 6), range(6, 7)], "0011"),
    ([[6, 1], [4, 0, 3], [5], [2]], "0110"),
]


def gradient(client, x, sample):
    """A noisy gradient whose rounding errors depend on the order of sums."""
    i = torch.arange(x.numel(), dtype=x.dtype)
    return (1 + 0.3 * torch.cos(client + i)) * (x - client) * 10.0 ** (client % 3) / 100 + 0.1 * torch.sin(i * sample)


def run(name, comm, clients, colour, transport, aggregation=Reproducible):
    """The hash of a federation's rows and losses, the same on every rank of `comm`."""
    link = MPILink(comm, transport=transport, colour=colour)
    num_clients = int(link.allgather([len(clients)]).sum())
    plan = Plan(
        num_clients,
        2,
        participants=lambda index: draw_participants(num_clients, 0.75 if num_clients == CLIENTS else 1, 5, index),
        weights=[1, 2, 1, 0.3, 1, 7, 1][:num_clients],
    )
    oracles = {client: lambda state: FunctionOracle(gradient, state) for client in clients}
    ascent = slice(DIM - 10, DIM) if name == "FMGDA" else None
    start = Variables(
        torch.linspace(-1, 1, DIM, dtype=torch.float64), torch.ones(3, dtype=torch.float64), ascent=ascent
    )
    federation = Federation(getattr(algorithms, name)(), link, oracles, plan, start, Sending(aggregation()))
    federation.start()
    losses = np.array([federation.run_round() for _ in range(ROUNDS)])
    found = hashlib.sha256(losses.tobytes())
    for row, values in sorted({**federation.store.averaged_rows(), **federation.store.server_rows()}.items()):
        assert torch.isfinite(values).all(), f"{name}: {row} is not finite"
        found.update(values.numpy().tobytes())
    del federation, start
    link.close()
    return found.hexdigest()


def check(ok, what):
    """Fail on all ranks if one disagrees."""
    bad = np.array([0 if ok else 1])
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, bad)
    assert bad[0] == 0, f"{what}: not so on {bad[0]} ranks"


def two_ranks(name, world):
    """The hash of what two ranks compute under the mean: a sum of two does not depend on its order."""
    comm = world.Split(0 if world.rank < 2 else MPI.UNDEFINED, world.rank)
    found = [run(name, comm, [world.rank], None, each, Mean) for each in ("allreduce", "shared")] if comm else [""]
    check(len({*found}) == 1, f"{name}: two ranks compute the same by every transport")
    return found[:1]


def powers_of_two(name, world):
    """The hash for four clients on 1, 2 and 4 ranks of a node under the mean by shared memory."""
    found = []
    for ranks in (1, 2, 4):
        comm = world.Split(0 if world.rank < ranks else MPI.UNDEFINED, world.rank)
        if comm:
            each = 4 // ranks
            clients = range(each * world.rank, each * (world.rank + 1))
            found.append(run(name, comm, clients, None, "shared", Mean))
    check(world.rank > 0 or len({*found}) == 1, f"{name}: as many clients on each rank, a power of two")
    return found[:1]


def main():
    world = MPI.COMM_WORLD
    for name in ALGORITHMS:
        expected = ""
        for (clients, colours), transport in itertools.product(PLACEMENTS, ("allreduce", "shared")):
            takes_part = world.rank < len(clients)
            comm = world.Split(0 if takes_part else MPI.UNDEFINED, world.rank)
            if takes_part:
                colour = int(colours[world.rank]) if colours else None
                found = run(name, comm, clients[world.rank], colour, transport)
                comm.Free()
                expected = expected or found
            check(not takes_part or found == expected or world.rank > 0, f"{name}, {clients}, {transport}")
        of_means = [*two_ranks(name, world), *powers_of_two(name, world)]
        again = [run(name, world, range(w, CLIENTS, 4), None, "auto", Mean) for w in [world.rank] * 2]
        check(again[0] == again[1], f"{name}: the same command gives the same bits")
        if world.rank == 0:
            print("same bits:", name, expected, *of_means, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        main()
    except BaseException:
        traceback.print_exc()
        MPI.COMM_WORLD.Abort(1)
