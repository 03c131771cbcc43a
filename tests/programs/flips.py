"""An algorithm whose server changes one number on one rank only, as a broken memory would."""

import dataclasses

from mpi4py import MPI

from fedmpi.algorithms import FedAvgM


@dataclasses.dataclass(frozen=True)
class Flips(FedAvgM):
    """FedAvgM whose rank 1 differs from the others in the third round by `change`."""

    change: float = 1e-3

    def server_step(self, server):
        super().server_step(server)
        if MPI.COMM_WORLD.rank == 1 and server.round_index == 2:
            server.rows["x"][7] += self.change
