"""Federations under --reduction reproducible on 1 to 4 of the ranks, in every placement: the same bits.

Under mpirun with 4 ranks; rank 0 prints one line per algorithm with the hash of all rows and losses, or it fails.
"""

import hashlib
import itertools
import traceback

import numpy as np
import torch
from mpi4py import MPI

from fedmpi import algorithms
from fedmpi.comm.mpi import MPILink
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


def run(name, comm, clients, colour, transport, reduction="reproducible"):
    """The hash of a federation's rows and losses, the same on every rank of `comm`."""
    link = MPILink(comm, transport=transport, colour=colour)
    link.reduction = reduction
    plan = Plan(
        CLIENTS,
        2,
        participants=lambda index: draw_participants(CLIENTS, 0.75, 5, index),
        weights=[1, 2, 1, 0.3, 1, 7, 1],
    )
    oracles = {client: lambda state: FunctionOracle(gradient, state) for client in clients}
    ascent = slice(DIM - 10, DIM) if name == "FMGDA" else None
    start = Variables(
        torch.linspace(-1, 1, DIM, dtype=torch.float64), torch.ones(3, dtype=torch.float64), ascent=ascent
    )
    federation = Federation(getattr(algorithms, name)(), link, oracles, plan, start)
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
        again = [run(name, world, range(w, CLIENTS, 4), None, "auto", "plain") for w in [world.rank] * 2]
        check(again[0] == again[1], f"{name}: the same command gives the same bits")
        if world.rank == 0:
            print("same bits:", name, expected, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        main()
    except BaseException:
        traceback.print_exc()
        MPI.COMM_WORLD.Abort(1)
