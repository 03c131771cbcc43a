"""The link over MPI, on buffers only (nothing is pickled)."""

import math
import os
import sys
import time

import mpi4py
import numpy as np
import torch

mpi4py.rc.thread_level = "funneled"  # progress bars have a thread; only the main one calls MPI

from mpi4py import MPI  # noqa: E402  (initialises MPI)

from fedmpi.comm.host import usable_cores  # noqa: E402
from fedmpi.comm.link import Traffic, divide  # noqa: E402
from fedmpi.comm.window import NodeWindow, NoWindow, divide_and_spread  # noqa: E402
from fedmpi.errors import UserError  # noqa: E402

# How a rank waits on a oversubscribed node: yields first, which costs others nothing, then naps (seconds).
LOOKS_BEFORE_NAPS, SHORTEST_NAP, LONGEST_NAP = 100, 1e-5, 2e-3
PIECE = 8 << 20  # bytes of CPU memory in one call of MPI: 96 MiB at once took 1.3 to 2 times as long
LARGEST_CALL = 1 << 30  # elements in one call; MPI-3 counts are 32-bit
SMALLEST_WINDOW = 64 << 10  # bytes; below, two barriers on the node cost more than plain Allreduce

# What the launchers of MPICH-likes, Open MPI and SLURM's PMI tell each process about its job.
LAUNCHER_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


class MPILink:
    """Sums over the ranks of a communicator.

    Two transports: MPI's own in-place Allreduce, and the node's shared memory. There the block that
    is to be summed lies in a window, so that each rank of the node sums one slice of everybody's
    block where it is, without a copy or a message; between nodes, the owners of a slice Allreduce it.
    The order of summation on a node is fixed: pairwise in rank order.

    Args:
        comm: an mpi4py intracommunicator; COMM_WORLD if None.
        cuda_aware: whether MPI may read and write GPU memory; otherwise GPU buffers are staged
            through pinned host memory.
        transport: of the blocks allocated from now on, see `allocate`; may be set later.
        colour: ranks of one machine with different colours count as on different nodes (for tests).

    Attributes:
        rank, size: in `comm`; local_rank, local_size: among the ranks of this node.
        oversubscribed: whether this node has more ranks than cores; collective calls then sleep while waiting
            for ranks that still work.
        traffic: the account of this rank's collectives.
        num_nodes: that the ranks are on.
        used: words for how the last block was summed.
    """

    def __init__(self, comm=None, cuda_aware=False, transport="auto", colour=None):
        self.comm = comm or MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size
        self.node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        cores = self._count_cores()
        self.oversubscribed = self.node.size > cores
        if colour is not None:
            machine, self.node = self.node, self.node.Split(colour)
            machine.Free()
        self.local_rank, self.local_size = self.node.rank, self.node.size
        self.usable_cores = cores
        self.cuda_aware = cuda_aware
        self.transport = transport
        self.traffic = Traffic()
        self.used = "nothing to sum" if self.size == 1 else "Allreduce"
        sizes = self.allgather([self.local_size])[:, 0].astype(int)
        self._smallest_node = int(sizes.min())
        self.num_nodes = round(sum(1 / sizes))
        self._windows = []
        self._slice_owners = None  # communicator of the ranks that sum the same slice, one per node
        self._staging = None

    def allocate(self, numel, dtype, device="cpu"):
        """[numel] zeros for a block that will be summed; valid until `close`. Collective.

        Under the transport "shared" they lie in the node's window; under "auto" if they are on the
        CPU, no node has a single rank only, and the block is large enough to gain. Where a node has
        no room for the window, all ranks take plain memory and Allreduce, and rank 0 says so.

        Raises:
            UserError: on every rank, if the transport is "shared" and the device is not the CPU.
        """
        on_cpu = torch.device(device).type == "cpu"
        if self.transport == "shared" and not on_cpu:
            raise UserError(f"transport = shared: needs rows on the CPU, and they are on {device}; use auto")
        large = numel * dtype.itemsize >= SMALLEST_WINDOW
        wanted = self.transport == "shared" or (
            self.transport == "auto" and on_cpu and large and self._smallest_node > 1
        )
        if wanted and self.size > 1 and numel > 0:
            window = self._open_window(numel, dtype)
            if window is not None:
                return window.mine
        return torch.zeros(numel, dtype=dtype, device=device)

    def _open_window(self, numel, dtype):
        window, reason = None, ""
        try:
            window = NodeWindow(self.node, numel, dtype)
        except NoWindow as error:
            reason = str(error)
        failing = self.first_failing(window is None)
        if failing is None:
            if self._slice_owners is None and self.num_nodes > 1:
                owns = self.local_rank < self._smallest_node
                self._slice_owners = self.comm.Split(self.local_rank if owns else MPI.UNDEFINED)
            self._windows.append(window)
            return window
        if window is not None:
            window.free()
        if failing == self.rank:
            print(f"fedmpi: no shared window, using Allreduce: {reason}", file=sys.stderr, flush=True)
        return None

    def close(self):
        """Free what `allocate` gave, and the communicators; the link is of no use then. Collective."""
        for window in reversed(self._windows):
            window.free()
        self._windows = []
        for comm in (self._slice_owners, self.node):
            if comm:
                comm.Free()

    def allreduce(self, block):
        """Sum a contiguous 1-d tensor over all ranks, in place; see `average`. Collective."""
        self.average(block, 1, block)

    def average(self, block, divisor, out):
        """out = (sum of `block` over all ranks) / divisor. Collective.

        Every rank gets the same bits. In the account it is one Allreduce of the block, whatever the
        transport does.

        Args:
            block: [n] float32 or float64, contiguous, the same n and dtype on every rank; part of
                what `allocate` gave, or any other memory (then by plain Allreduce). Used up.
            divisor: a number, the same on every rank.
            out: [n]; may be `block` itself.
        """
        self.traffic.add(block.numel() * block.element_size())
        if self.size == 1:
            divide(block, divisor, out)
            return
        for window in self._windows:
            offset = window.offset(block)
            if offset is not None:
                self._sum_in_window(window, offset, offset + block.numel(), divisor)
                divide(block, 1, out)
                return
        self.used = "Allreduce"
        if block.device.type == "cpu" or self.cuda_aware:
            if block.device.type != "cpu":
                torch.cuda.synchronize(block.device)  # MPI does not know of the stream that fills it
            self._allreduce(block)
        else:
            if self._staging is None or self._staging.numel() < block.numel() or self._staging.dtype != block.dtype:
                self._staging = torch.empty(block.numel(), dtype=block.dtype, pin_memory=True)
            staged = self._staging[: block.numel()]
            staged.copy_(block)
            self._allreduce(staged)
            block.copy_(staged, non_blocking=True)
        divide(block, divisor, out)

    def _sum_in_window(self, window, start, stop, divisor):
        """Sum and divide [start, stop) of all ranks' vectors of a window, for all ranks."""
        slices = window.slices(start, stop, self._smallest_node)
        mine = slices[self.local_rank] if self.local_rank < len(slices) else None
        self._meet(window)  # all blocks are complete

        def finish(parts):
            divide_and_spread(parts, divisor)

        if mine is not None and self.num_nodes == 1:
            window.reduce(mine, finish)
            self.used = "shared memory"
        elif mine is not None:
            window.reduce(mine)
            self._allreduce(window.vectors[0][mine], self._slice_owners)
            finish([vector[mine] for vector in window.vectors])
            self.used = f"shared memory, Allreduce between {self.num_nodes} nodes"
        self._meet(window)  # all slices are complete

    def _meet(self, window):
        window.sync()
        self._wait(self.node.Ibarrier())
        window.sync()

    def _allreduce(self, block, comm=None):
        comm = comm or self.comm
        on_cpu = block.device.type == "cpu"
        for piece in block.split(PIECE // block.element_size() if on_cpu else LARGEST_CALL):
            # mpi4py takes numpy arrays by the buffer protocol and GPU tensors by DLPack
            buffer = piece.numpy() if on_cpu else piece
            if self.oversubscribed:
                self._wait(comm.Iallreduce(MPI.IN_PLACE, buffer))
            else:
                comm.Allreduce(MPI.IN_PLACE, buffer)

    def allgather(self, values):
        """[size, n] float64: every rank's [n] `values`, in rank order. Collective."""
        mine = np.ascontiguousarray(values, dtype=np.float64)
        everyone = np.empty((self.size, mine.size))
        if self.size == 1:
            everyone[0] = mine
            return everyone
        self._wait(self.comm.Iallgather(mine, everyone))
        self.traffic.other_bytes += mine.nbytes
        return everyone

    def _wait(self, request):
        """Wait for a request; on a oversubscribed node by giving the core away between looks at it.

        Waiting inside MPI spins, and where ranks outnumber cores that takes the cores from the
        ranks that others wait for.
        """
        if self.oversubscribed:
            looks, nap = 0, SHORTEST_NAP
            while not request.Test():
                looks += 1
                if looks < LOOKS_BEFORE_NAPS:
                    os.sched_yield()
                else:
                    time.sleep(nap)
                    nap = min(1.3 * nap, LONGEST_NAP)
        else:
            request.Wait()

    def allgatherv(self, values):
        """All ranks' [n_r] float64 `values`, one after the other, n_r of any length. Collective."""
        mine = np.ascontiguousarray(values, dtype=np.float64)
        counts = self.allgather(np.array([mine.size]))[:, 0].astype(int)
        everyone = np.empty(counts.sum())
        self._wait(self.comm.Iallgatherv(mine, [everyone, counts]))
        self.traffic.other_bytes += mine.nbytes
        return everyone

    def alltoallv(self, rows, wanted):
        """[m, ...] the rows that the others have for this rank, in rank order. Collective.

        Args:
            rows: [n, ...] array of this rank; dtype and shape of a row are the same on every rank.
            wanted: for each rank the indices into `rows` of what goes to it, in the order it is sent.
        """
        counts = [len(indices) for indices in wanted]
        come = self.allgather(counts)[:, self.rank].astype(int)
        sent = rows[np.concatenate(wanted)]
        received = np.empty((come.sum(), *rows.shape[1:]), rows.dtype)
        # Counted in rows: the number of bytes may exceed MPI's 32 bits.
        row = MPI.BYTE.Create_contiguous(rows.dtype.itemsize * math.prod(rows.shape[1:])).Commit()
        self._wait(self.comm.Ialltoallv([sent, counts, row], [received, come, row]))
        row.Free()
        self.traffic.other_bytes += sent.nbytes
        return received

    def _count_cores(self):
        """Number of cores that any rank of this node may use. Collective on the node."""
        mask = np.zeros(4096, dtype=np.uint8)
        mask[[core for core in usable_cores() if core < mask.size]] = 1
        everyone = np.empty_like(mask)
        self.node.Allreduce(mask, everyone, op=MPI.MAX)
        return int(everyone.sum())

    def barrier(self):
        """Wait for all ranks. Collective."""
        self._wait(self.comm.Ibarrier())

    def first_failing(self, failed):
        """The lowest rank that says it failed, or None. Collective."""
        flags = self.allgather(np.array([float(failed)]))[:, 0]
        return int(np.argmax(flags)) if flags.any() else None

    def abort(self, code):
        """End the whole job at once, also ranks that wait inside a collective."""
        self.comm.Abort(code)


def check_launch(link, expected=None):
    """See that all processes of the job found each other.

    A launcher of another MPI than mpi4py's starts N jobs of one rank each, and all of them would
    train and end well.

    Args:
        link: an `MPILink`.
        expected: the number of ranks that the user says there are (``--ranks``), or None.

    Raises:
        UserError: if the numbers differ.
    """
    if expected is not None and expected != link.size:
        raise UserError(
            f"ranks = {expected}: but {link.size} ranks found each other; "
            "start with the mpirun of the MPI that mpi4py uses (python -m mpi4py --mpi-library)"
        )
    for name in LAUNCHER_SIZES:
        started = os.environ.get(name, "")
        if started.isdigit() and int(started) > 1 and link.size == 1:
            raise UserError(
                f"the launcher started {started} processes ({name}) but each of them is alone: "
                "this mpirun belongs to another MPI than mpi4py's (python -m mpi4py --mpi-library)"
            )


def cuda_aware_by_environment():
    """Whether the environment says that this MPI reads GPU memory."""
    return any(
        os.environ.get(name, "").lower() in ("1", "true")
        for name in ("MPICH_GPU_SUPPORT_ENABLED", "OMPI_MCA_opal_cuda_support", "MV2_USE_CUDA", "PSM3_CUDA")
    )
