"""Which ranks there are, and which of them share a node."""

import numpy as np

from fedmpi.comm.ranks import lowest_true
from fedmpi.comm.start.mpi_library import MPI
from fedmpi.comm.sums.waiting import Waiter
from fedmpi.comm.vectors import Gathering
from fedmpi.ground.machine.cores import count_at_a_time, usable_cores, work_since_start

PIECE = 8 << 20  # bytes of CPU memory in one call of MPI: 96 MiB at once took 1.3 to 2 times as long
LARGEST_CALL = 1 << 30  # elements in one call; MPI-3 counts are 32-bit


class Communicator:
    """An MPI communicator whose collectives wait by a `Waiter`. All methods are collective on it.

    Attributes:
        mpi: the mpi4py intracommunicator. rank, size: in it.
    """

    def __init__(self, mpi, waiter):
        self.mpi, self.wait = mpi, waiter
        self.rank, self.size = mpi.rank, mpi.size

    def allgather(self, values):
        """[size, n] float64: every rank's [n] `values`, in rank order."""
        own_values = np.ascontiguousarray(values, dtype=np.float64)
        everyone = np.empty((self.size, own_values.size))
        if self.size == 1:
            everyone[0] = own_values
        else:
            self.wait(self.mpi.Iallgather(own_values, everyone))
        return everyone

    def begin_allgather(self, values):
        """See `Link.begin_allgather`."""
        own_values = np.ascontiguousarray(values, dtype=np.float64)
        everyone = np.empty((self.size, own_values.size))
        gathering = Gathering(everyone, self.mpi.Iallgather(own_values, everyone), self.wait)
        gathering.own_values = own_values  # MPI reads it until then
        return gathering

    def allgather_bytes(self, data):
        """Every rank's bytes, in rank order; equally many of each rank."""
        rows = self.allgather(np.frombuffer(data, np.uint8))
        return [row.astype(np.uint8).tobytes() for row in rows]

    def first_rank_where(self, condition):
        """The lowest rank whose `condition` is true, or None."""
        return lowest_true(self.allgather([float(condition)]))

    def allreduce(self, block):
        """Sum a contiguous 1-d tensor over the ranks, in place and in pieces.

        It is float32 or float64, on the CPU or (if MPI can read it) on a GPU.
        """
        on_cpu = block.device.type == "cpu"
        for piece in block.split(PIECE // block.element_size() if on_cpu else LARGEST_CALL):
            # mpi4py takes numpy arrays by the buffer protocol and GPU tensors by DLPack
            buffer = piece.numpy() if on_cpu else piece
            if self.wait.may_block:
                with self.wait.inside_mpi():
                    self.mpi.Allreduce(MPI.IN_PLACE, buffer)
            else:
                self.wait(self.mpi.Iallreduce(MPI.IN_PLACE, buffer))

    def start_allreduce(self, block):
        """Begin to sum a contiguous 1-d tensor in host memory over the ranks, in place; returns what `wait` takes."""
        return self.mpi.Iallreduce(MPI.IN_PLACE, block.numpy())

    def barrier(self):
        """Wait for all ranks."""
        self.wait(self.mpi.Ibarrier())

    def split(self, colour):
        """The communicator of the ranks that give the same `colour`; None where it is None."""
        part = self.mpi.Split(MPI.UNDEFINED if colour is None else colour, self.rank)
        return Communicator(part, self.wait) if part else None

    def free(self):
        """Free the communicator."""
        self.mpi.Free()


class Topology:
    """The ranks of a communicator and the nodes that they are on. Collective, as is `close`.

    Args:
        mpi: an mpi4py intracommunicator.
        colour: ranks of one machine with different colours count as on different nodes (for tests).

    Attributes:
        world, node: `Communicator` of all ranks, and of this node's.
        num_nodes: that the ranks are on; smallest_node: number of ranks on the node with the fewest.
        node_ranks: for each rank, (number of its node, its rank there); node_index: number of this node.
        cores: numbers of those of this machine that any of its ranks may use; usable_cores: how many at a time.
        busy: how many of them other processes have used, on average, while the ranks started.
        waiter: the `Waiter` of both.
    """

    def __init__(self, mpi, colour=None):
        machine = mpi.Split_type(MPI.COMM_TYPE_SHARED)
        self.cores, self.busy = _measure_cores(machine)
        self.usable_cores = count_at_a_time(self.cores)
        self.waiter = Waiter()
        self.world, self.node = Communicator(mpi, self.waiter), Communicator(machine, self.waiter)
        if colour is not None:
            self.node = self.node.split(colour)
            machine.Free()
        lowest = np.array([self.world.rank])
        self.node.mpi.Allreduce(MPI.IN_PLACE, lowest, op=MPI.MIN)
        self.waiter.oversubscribed = self.node.size > self.usable_cores
        everyone = self.world.allgather([lowest[0], self.node.rank, self.node.size, self.waiter.oversubscribed])
        lowest, local_ranks, sizes, oversubscribed = everyone.astype(int).T
        self.waiter.may_block = not oversubscribed.any()
        self.smallest_node = int(sizes.min())
        nodes = sorted({*lowest.tolist()})  # np.unique would import numpy.ma at every start
        self.num_nodes = len(nodes)
        self.node_ranks = [(nodes.index(first), local) for first, local in zip(lowest.tolist(), local_ranks.tolist())]
        self.node_index = self.node_ranks[self.world.rank][0]

    def close(self):
        """Free the node's communicator; the world's belongs to whoever made it."""
        self.node.free()


def _measure_cores(machine):
    """(`cores`, `busy`) of a `Topology`. Collective on the machine's communicator."""
    mask = np.zeros(4096, dtype=np.uint8)
    mask[[core for core in usable_cores() if core < mask.size]] = 1
    machine.Allreduce(MPI.IN_PLACE, mask, op=MPI.MAX)
    cores = np.flatnonzero(mask).tolist()
    work = np.array(work_since_start(cores))
    machine.Allreduce(MPI.IN_PLACE, work)
    ranks, without_work = work[0], work[1] / machine.size
    return cores, max(0.0, len(cores) - without_work - ranks)
