"""The link over MPI, on buffers only (nothing is pickled)."""

import math
import os
import platform
import sys

import numpy as np
import torch
from mpi4py import MPI

import fedmpi.comm.transports
from fedmpi.comm.link import Link, Traffic, divide
from fedmpi.comm.rollcall import RollCall
from fedmpi.comm.topology import LARGEST_CALL, Topology
from fedmpi.comm.transports.base import Facts, Transport, Unavailable, choose
from fedmpi.errors import UserError
from fedmpi.registry import known

HOST_BYTES = 64  # of a machine's name in messages


class MPILink(Link):
    """Sums over the ranks of a communicator by one of the transports (`fedmpi.comm.transports`).

    Args:
        comm: an mpi4py intracommunicator; COMM_WORLD if None.
        cuda_aware: whether MPI may read and write GPU memory.
        transport: of the blocks allocated from now on: a transport's name, or "auto"; may be set later.
        colour: ranks of one machine with different colours count as on different nodes (for tests).

    Attributes:
        topology: the `Topology` of the ranks.
    """

    def __init__(self, comm=None, cuda_aware=False, transport="auto", colour=None):
        self.comm = comm or MPI.COMM_WORLD
        self.topology = Topology(self.comm, colour)
        world, node = self.topology.world, self.topology.node
        self.rank, self.size = world.rank, world.size
        self.local_rank, self.local_size = node.rank, node.size
        self.num_nodes, self.usable_cores = self.topology.num_nodes, self.topology.usable_cores
        self.transport = transport
        self.traffic = Traffic()
        self._roll_call = None
        self.summed_by = "nothing to sum" if self.size == 1 else "Allreduce"
        classes = sorted(known(fedmpi.comm.transports, Transport).values(), key=lambda cls: -cls.preference)
        self._transports = {cls: cls(self.topology, cuda_aware) for cls in classes}  # the one that owns all memory last

    @property
    def oversubscribed(self):
        """Whether this node has more ranks than cores: a rank then sleeps while it waits in a collective call."""
        return self.topology.waiter.oversubscribed

    @oversubscribed.setter
    def oversubscribed(self, value):
        self.topology.waiter.oversubscribed = value

    def allocate(self, numel, dtype, device="cpu"):
        """[numel] zeros for a block that will be summed; valid until `close`. Collective.

        With the transport "auto", the block comes from the first transport that suits it and is available here;
        the first rank of a node prints why a suitable one is not.

        Raises:
            UserError: on every rank, if the transport that the user named is not available.
        """
        device = torch.device(device)
        if self.size == 1:
            return torch.zeros(numel, dtype=dtype, device=device)
        facts = Facts(numel * dtype.itemsize, device.type, self.topology.smallest_node)
        for transport in map(self._transports.get, choose(facts, self._transports, self.transport)):
            try:
                return transport.allocate(numel, dtype, device)
            except Unavailable as error:
                if self.transport != "auto":
                    raise UserError(f"transport = {transport.name}: {error}; use --transport auto") from None
                if error.args != ("on another node",) and self.local_rank == 0:
                    print(f"fedmpi: transport {transport.name} is not used: {error}", file=sys.stderr, flush=True)
        raise UserError(f"transport = {self.transport}: expected auto or the name of a transport")

    def average(self, block, divisor, out):
        """See `Link.average`. In the account it is one Allreduce of the block, whatever the transport does."""
        self.traffic.add(block.numel() * block.element_size())
        if self.size == 1:
            divide(block, divisor, out)
            return
        transport = next(one for one in self._transports.values() if one.owns(block))
        transport.average(block, divisor, out)
        self.summed_by = transport.description

    def combine(self, vectors, partials, divisor, out):
        """See `Link.combine`; in the account as `average`."""
        self.traffic.add(out.numel() * out.element_size())
        if self.size == 1:
            divide(vectors[partials.places[partials.root][1]], divisor, out)
            return
        transport = next(one for one in self._transports.values() if one.owns(vectors[0]))
        transport.combine(vectors, partials, divisor, out)
        self.summed_by = f"{transport.description}, reproducible"

    def allgather(self, values):
        everyone = self.topology.world.allgather(values)
        if self.size > 1:
            self.traffic.other_bytes += everyone[0].nbytes
        return everyone

    def allgatherv(self, values):
        mine = np.ascontiguousarray(values, dtype=np.float64)
        counts = self.allgather(np.array([mine.size]))[:, 0].astype(int)
        everyone = np.empty(counts.sum())
        self._wait(self.comm.Iallgatherv(mine, [everyone, counts]))
        self.traffic.other_bytes += mine.nbytes
        return everyone

    def alltoallv(self, rows, wanted):
        counts = [len(indices) for indices in wanted]
        incoming = self.allgather(counts)[:, self.rank].astype(int)
        sent = rows[np.concatenate(wanted)]
        received = np.empty((incoming.sum(), *rows.shape[1:]), rows.dtype)
        # Counted in rows: the number of bytes may exceed MPI's 32 bits.
        row = MPI.BYTE.Create_contiguous(rows.dtype.itemsize * math.prod(rows.shape[1:])).Commit()
        self._wait(self.comm.Ialltoallv([sent, counts, row], [received, incoming, row]))
        row.Free()
        self.traffic.other_bytes += sent.nbytes
        return received

    def broadcast(self, array):
        data = array.reshape(-1).view(np.uint8)
        for begin in range(0, data.size, LARGEST_CALL):
            self._wait(self.comm.Ibcast(data[begin : begin + LARGEST_CALL]))
        self.traffic.other_bytes += data.size

    def barrier(self):
        self.topology.world.barrier()

    def watch(self, limit, clients):
        if self.size == 1:
            return
        mine = np.frombuffer(platform.node().encode()[:HOST_BYTES].ljust(HOST_BYTES), np.uint8)
        hosts = [bytes(row.astype(np.uint8)).decode(errors="replace").strip() for row in self.allgather(mine)]

        def describe(rank):
            return f"rank {rank} on {hosts[rank]} ({describe_clients(clients[rank])})"

        self._roll_call = RollCall(self.comm, limit, describe, lambda: (self.phase, self.way_on()))
        self.topology.waiter.roll_call = self._roll_call

    def close(self):
        if self._roll_call is not None:
            self.topology.waiter.roll_call = None
            self._roll_call.close()
        for transport in self._transports.values():
            transport.close()
        self.topology.close()

    def leave(self):
        """End MPI in order; this process can use it no more. Collective over all ranks."""
        MPI.Finalize()

    def abort(self, code):
        """End the whole job at once, also ranks that wait inside a collective. Not collective."""
        self.comm.Abort(code)

    def _wait(self, request):
        self.topology.waiter(request)


def describe_clients(clients):
    """Clients' numbers in words: "client 3", "clients 3 to 5", "clients 1, 4"."""
    numbers = sorted(clients)
    if len(numbers) == 1:
        return f"client {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"clients {numbers[0]} to {numbers[-1]}"
    return f"clients {', '.join(map(str, numbers))}"


def cuda_aware_by_environment():
    """Whether the environment says that this MPI reads GPU memory."""
    return any(
        os.environ.get(name, "").lower() in ("1", "true")
        for name in ("MPICH_GPU_SUPPORT_ENABLED", "OMPI_MCA_opal_cuda_support", "MV2_USE_CUDA", "PSM3_CUDA")
    )
