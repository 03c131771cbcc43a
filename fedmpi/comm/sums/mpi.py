"""The link over MPI, on buffers only (nothing is pickled)."""

import contextlib
import math
import platform
import weakref

import numpy as np
import torch

from fedmpi.comm.crosses import OWN, Crossed
from fedmpi.comm.faults.abort import abort
from fedmpi.comm.faults.neighbour import exit_at_once
from fedmpi.comm.faults.rollcall import RollCall
from fedmpi.comm.faults.survivors import Surviving, Survivors
from fedmpi.comm.link import Link
from fedmpi.comm.ranks import RanksLost, describe_clients
from fedmpi.comm.solo import divide
from fedmpi.comm.start.mpi_library import MPI
from fedmpi.comm.sums import transports
from fedmpi.comm.sums.comparison import Compared
from fedmpi.comm.sums.slices import add_integers, allgather_vectors, exchange_slices
from fedmpi.comm.sums.topology import LARGEST_CALL, Topology
from fedmpi.comm.sums.transports.base import SMALLEST_GAIN, Facts, Transport, Unavailable, choose
from fedmpi.comm.sums.transports.shared import SharedMemory
from fedmpi.comm.sums.window import NodeCopy, NoWindow
from fedmpi.comm.traffic import Traffic
from fedmpi.comm.vectors import Slices
from fedmpi.ground.errors import Diverged, UserError
from fedmpi.ground.machine.devices import device_number
from fedmpi.ground.registry import known
from fedmpi.ground.text import Log

log = Log(__name__)

NOISE = 0.7  # of a core: other processes that use less of it leave it free
HOST_BYTES = 64  # of a machine's name in messages


class MPILink(Link):
    """Sums over the ranks of a communicator by one of the transports (`fedmpi.comm.sums.transports`).

    Args:
        comm: an mpi4py intracommunicator; COMM_WORLD if None.
        transport: of the blocks allocated from now on: a transport's name, or "auto"; may be set later.
        colour: ranks of one machine with different colours count as on different nodes (for tests).

    Attributes:
        world_rank, world_size: of this process among all of the job.
        topology: the `Topology` of the ranks. roll_call: the `RollCall`, after `watch` on several ranks; or None.
    """

    def __init__(self, comm=None, transport="auto", colour=None):
        if MPI.Is_finalized():
            raise UserError(
                "MPI was finalized in this process (MPI.Finalize), and cannot begin again: call it at the end"
            )
        self.comm = MPI.COMM_WORLD if comm is None else comm
        if not isinstance(self.comm, MPI.Intracomm) or self.comm == MPI.COMM_NULL:
            raise UserError(
                f"comm is a {type(comm).__name__}: expected an mpi4py Intracomm of this rank, like MPI.COMM_WORLD"
            )
        self.topology = Topology(self.comm, colour)
        world, node = self.topology.world, self.topology.node
        self.rank, self.size, self.world_size = world.rank, world.size, MPI.COMM_WORLD.size
        self.world_rank = MPI.COMM_WORLD.rank
        self.local_rank, self.local_size = node.rank, node.size
        self.num_nodes, self.usable_cores = self.topology.num_nodes, self.topology.usable_cores
        self.free_cores = min(self.usable_cores, len(self.topology.cores) - int(self.topology.busy + 1 - NOISE))
        self.transport = transport
        self.traffic, self.crossed, self.progress = Traffic(), Crossed(), [0, 0]
        self.roll_call, self._survivors = None, None
        self.members, self.lost_in = tuple(range(self.size)), {}
        self.summed_by = "nothing to sum" if self.size == 1 else "Allreduce"
        classes = sorted(known(transports, Transport).values(), key=lambda cls: -cls.preference)
        # In the order in which they are asked whether they own a block: Allreduce, which owns any, is the last.
        self._transports = {cls: cls(self.topology) for cls in classes}
        self._sums = {each: Compared(each) if each.num_compared else each for each in self._transports.values()}

    @property
    def oversubscribed(self):
        """Whether this node has more ranks than cores: a rank then sleeps while it waits in a collective call."""
        return self.topology.waiter.oversubscribed

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
        facts = self._facts(numel * dtype.itemsize, device)
        if not facts.device and self.transport not in ("auto", "allreduce"):
            raise UserError(f"transport = {self.transport}: some ranks have no GPU; use --transport auto")
        for transport in map(self._transports.get, choose(facts, self._transports, self.transport)):
            try:
                return transport.allocate(numel, dtype, device)
            except Unavailable as error:
                if self.transport != "auto":
                    raise UserError(f"transport = {transport.name}: {error}; use --transport auto") from None
                if error.args != ("on another node",) and self.local_rank == 0:
                    log.warning(f"transport {transport.name} is not used: {error}")
        raise UserError(f"transport = {self.transport}: expected auto or the name of a transport")

    def allocate_copy(self, numel, dtype, device="cpu"):
        node, shares = self.topology.node, self.transport in ("auto", SharedMemory.name) and not self.survives
        is_large, on_gpu = numel * dtype.itemsize >= SMALLEST_GAIN, torch.device(device).type != "cpu"
        if shares and is_large and node.size > 1 and node.first_rank_where(on_gpu) is None:
            with contextlib.suppress(NoWindow):  # too little shared memory
                return NodeCopy(node, numel, dtype)
        return super().allocate_copy(numel, dtype, device)

    def _facts(self, nbytes, device):
        """The `Facts` of a block on this rank's device. Collective."""
        numbers = self.topology.world.allgather([device_number(device)])[:, 0]
        on_gpu = numbers >= 0
        kind = device.type if on_gpu.all() or not on_gpu.any() else ""
        gpus_are_shared = len({*numbers.tolist()}) < self.size and bool(on_gpu.all())
        return Facts(nbytes, kind, self.topology.smallest_node, self.num_nodes, gpus_are_shared)

    def average(self, block, divisor, out, kind=OWN):
        """See `Link.average`. In the account it is one Allreduce of the block, whatever the transport does."""
        self.traffic.add(block.numel() * block.element_size())
        if self.size == 1:
            divide(block, divisor, out)
            return
        self.crossed.note(kind, block.nbytes)
        transport = self._owner(block)
        with self.collective():
            self._sums[transport].average(block, divisor, out)
        self.summed_by = transport.description

    def add_integers(self, block, kind=OWN):
        self.traffic.add(block.nbytes)
        self._note(kind, block.nbytes)
        transport = self._sharing(block)
        if self.size > 1 and transport is not None:
            self._attempt(lambda: transport.average(block, 1, block))  # torch's integers wrap
            self.summed_by = f"{transport.description}, whole numbers"
        elif self.size > 1:
            host = block.cpu()
            self._attempt(lambda: add_integers(self.topology.world, host))
            block.copy_(host)
            self.summed_by = "Allreduce, whole numbers"

    def exchange_slices(self, vectors, reduce, out, dtype=None, kind=OWN):
        self.traffic.add_slices(vectors, out)
        self._note(kind, out.nbytes)
        transport = self._sharing(out)
        is_in_place = transport is not None and [vector.data_ptr() for vector in vectors] in ([], [out.data_ptr()])
        everyone = self.allgather([len(vectors), is_in_place], "machinery")
        if out.numel() == 0:
            return
        if self.size == 1:
            out.copy_(reduce(Slices(vectors, slice(0, out.numel()))))
        elif everyone[:, 1].all():
            self._attempt(lambda: transport.exchange_slices(everyone[:, 0] > 0, reduce, out))
        else:
            host = out.cpu()
            on_host = [vector.cpu() for vector in vectors]
            self._attempt(lambda: exchange_slices(self.topology.world, on_host, reduce, host, dtype or out.dtype))
            out.copy_(host)

    def allgather_vectors(self, vector, kind=OWN):
        self.traffic.add(vector.nbytes)
        if self.size == 1:
            return [vector.clone()]
        host = vector.cpu()
        parts = self._repeat(lambda: allgather_vectors(self.topology.world, host))
        self._note(kind, sum(part.nbytes for part in parts))
        return [part.to(vector.device) for part in parts]

    def _owner(self, block):
        """The transport that allocated a block; Allreduce, if none did."""
        return next(transport for transport in self._transports.values() if transport.owns(block))

    def _sharing(self, block):
        """The transport whose blocks, this one among them, are in memory that all ranks read; or None."""
        transport = self._owner(block)
        return transport if self.num_nodes == 1 and isinstance(transport, SharedMemory) else None

    def _note(self, kind, nbytes):
        """Take note of a message to other ranks, of so many bytes."""
        if self.size > 1:
            self.crossed.note(kind, nbytes)

    def allgather(self, values, kind=OWN):
        everyone = self._repeat(lambda: self.topology.world.allgather(values))
        self._note(kind, everyone.nbytes)
        if self.size > 1:
            self.traffic.other_bytes += everyone[0].nbytes
        return everyone

    def allgatherv(self, values, kind=OWN):
        own_values, world = np.ascontiguousarray(values, dtype=np.float64), self.topology.world

        def exchange():
            counts = world.allgather([own_values.size])[:, 0].astype(int)
            everyone = np.empty(counts.sum())
            self.topology.waiter(world.mpi.Iallgatherv(own_values, [everyone, counts]))
            return everyone

        self.traffic.other_bytes += own_values.nbytes + 8
        everyone = self._repeat(exchange)
        self._note(kind, everyone.nbytes)
        return everyone

    def begin_allgather(self, values, kind=OWN):
        self._note(kind, len(values))
        return super().begin_allgather(values) if self.size == 1 else self.topology.world.begin_allgather(values)

    def alltoallv(self, rows, wanted, kind=OWN):
        counts = [len(indices) for indices in wanted]
        everyone = self.allgather(counts, "machinery")
        self._note(kind, everyone.sum())
        incoming = everyone[:, self.rank].astype(int)
        sent = rows[np.concatenate(wanted)]
        received = np.empty((incoming.sum(), *rows.shape[1:]), rows.dtype)
        # Counted in rows: the number of bytes may exceed MPI's 32 bits.
        row = MPI.BYTE.Create_contiguous(rows.dtype.itemsize * math.prod(rows.shape[1:])).Commit()
        with self.collective():
            self.topology.waiter(self.comm.Ialltoallv([sent, counts, row], [received, incoming, row]))
        row.Free()
        self.traffic.other_bytes += sent.nbytes
        return received

    def broadcast(self, array, kind=OWN):
        data, world = array.reshape(-1).view(np.uint8), self.topology.world
        for begin in range(0, data.size, LARGEST_CALL):
            self._repeat(lambda begin=begin: self.topology.waiter(world.mpi.Ibcast(data[begin : begin + LARGEST_CALL])))
        self._note(kind, data.size)
        self.traffic.other_bytes += data.size

    def barrier(self):
        self._repeat(self.topology.world.barrier)

    def watch(self, limit, clients=()):
        self.clients = clients
        if self.roll_call is not None:
            self.roll_call.limit = limit
        elif self.size > 1:
            self._begin_watch(limit)

    def _begin_watch(self, limit):
        own_host = np.frombuffer(platform.node().encode()[:HOST_BYTES].ljust(HOST_BYTES), np.uint8)
        everyone = self.allgather(own_host, "machinery").astype(np.uint8)
        hosts = [bytes(row).decode(errors="replace").strip() for row in everyone]
        link = weakref.proxy(self)  # the watch outlives a link that is dropped without `close`

        def describe(rank):
            whose = f" ({describe_clients(link.clients[rank])})" if link.clients else ""
            return f"rank {rank} on {hosts[rank]}{whose}"

        self._describe = describe
        self.roll_call = RollCall(self.comm, limit, describe, lambda: (link.phase, link.how_to_resume()))
        self.roll_call.while_waiting = lambda: link.while_waiting()
        self.topology.waiter.roll_call = self.roll_call

    def call(self, number, place=0):
        if self.roll_call is not None:
            self.roll_call.call(number, place)

    def called(self):
        return super().called() if self.roll_call is None else self.roll_call.called()

    def survive(self):
        if self.size > 1 and not self.survives:
            waiter = self.topology.waiter
            self._survivors, self.survives = Survivors(self.comm, waiter), True
            self._sums = {each: Surviving(each, self._attempt_once) for each in self._transports.values()}
            waiter.may_block = False  # inside a blocking call, a rank cannot answer that it waits
            if self.roll_call is not None:
                self.roll_call.goes_on = True
            self._adopt()

    def _attempt(self, action):
        """What a collective action returns; RanksLost on all ranks that are left, if others are lost."""
        with self.collective():
            return action() if self._survivors is None else self._attempt_once(action)

    def _attempt_once(self, action):
        """The same among survivors."""
        try:
            return self._survivors.attempt(action)
        except RanksLost:
            self._adopt()
            raise

    @contextlib.contextmanager
    def collective(self):
        """A context for what all ranks do at once: after an error of one of them, that rank is where no other one is.

        The job ends when such a rank goes on all the same, and enters this context again.
        """
        if self.roll_call is not None:
            self.roll_call.check_finished()
        try:
            yield
        except (RanksLost, UserError, Diverged):  # of all ranks
            raise
        except BaseException as error:  # a signal's, or that of a user's aggregation
            if self.roll_call is not None:
                self.roll_call.unfinished = type(error).__name__
            raise

    def _repeat(self, action):
        """What a collective action returns; repeated by the ranks that are left, if others are lost."""
        while True:
            try:
                return self._attempt(action)
            except RanksLost:
                continue

    def _adopt(self):
        """Use the communicator of the ranks that are left; the lowest of them says who is lost."""
        world, survivors = self.topology.world, self._survivors
        world.mpi, world.rank, world.size = survivors.comm, survivors.comm.rank, survivors.comm.size
        lost = sorted({*self.members} - {*survivors.members})
        self.rank, self.size, self.members = world.rank, world.size, tuple(survivors.members)
        self.lost = (*self.lost, *lost)
        self.lost_in |= dict.fromkeys(lost, self.phase)
        if self.roll_call is not None:
            self.roll_call.lost.update(lost)
        for rank in lost if self.rank == 0 else ():
            log.warning(
                f"{self._describe(rank)} was lost during {self.phase}; {self.size} of "
                f"{self.size + len(self.lost)} ranks continue"
            )

    def wait_for_survivors(self):
        """Wait until all ranks that are left are here; some may have gone on from here already. Collective."""
        with contextlib.suppress(RanksLost):
            self._survivors.attempt(self.topology.world.barrier)

    def close(self):
        if self.lost:
            return  # what ranks free together cannot be freed without those that are lost
        if self.roll_call is not None:
            self.topology.waiter.roll_call = None
            self.roll_call.close()
        for transport in self._transports.values():
            transport.close()
        self.topology.close()

    def finalize(self):
        """Finalize MPI, which this process cannot use afterwards. Collective over all ranks."""
        MPI.Finalize()

    def abort(self, code):
        """End the whole job at once, also ranks that wait inside a collective. Not collective."""
        if self._survivors is not None and self._survivors.is_alone():
            exit_at_once(code)  # of an abort by the last rank, Open MPI's mpirun makes the exit code 0
        abort(code)


def mpi_name():
    """The MPI library with its version, like "MPICH 5.0.2"."""
    vendor, version = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, version))}"
