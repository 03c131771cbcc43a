"""The link over MPI: the only module that talks to mpi4py, on buffers only (nothing is pickled)."""

import math
import os
import time

import mpi4py
import numpy as np
import torch

mpi4py.rc.thread_level = "funneled"  # progress bars have a thread; only the main one calls MPI

from mpi4py import MPI  # noqa: E402  (initialises MPI)

from fedmpi.comm.host import usable_cores  # noqa: E402
from fedmpi.comm.link import Traffic  # noqa: E402
from fedmpi.errors import UserError  # noqa: E402

# How a rank waits on a crowded node: yields first, which costs others nothing, then naps (seconds).
LOOKS_BEFORE_NAPS, SHORTEST_NAP, LONGEST_NAP = 100, 1e-5, 2e-3
LARGEST_CALL = 1 << 30  # elements of one Allreduce; MPI-3 counts are 32-bit

# What the launchers of MPICH-likes, Open MPI and SLURM's PMI tell each process about its job.
LAUNCHER_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


class MPILink:
    """Sums over the ranks of a communicator.

    Args:
        comm: an mpi4py intracommunicator; COMM_WORLD if None.
        cuda_aware: whether MPI may read and write GPU memory; otherwise GPU buffers are staged
            through pinned host memory.

    Attributes:
        rank, size: in `comm`; local_rank, local_size: among the ranks of this node.
        crowded: whether this node has more ranks than cores; collective calls then sleep while waiting
            for ranks that still work.
        traffic: the account of this rank's collectives.
    """

    def __init__(self, comm=None, cuda_aware=False):
        self.comm = comm or MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size
        self.node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = self.node.rank, self.node.size
        self.usable_cores = self._count_cores()
        self.crowded = self.local_size > self.usable_cores
        self.cuda_aware = cuda_aware
        self.traffic = Traffic()
        self._staging = None

    def sum(self, block):
        """Sum a contiguous 1-d tensor over all ranks, in place. Collective.

        Every rank gets the same bits: MPI reduces once and distributes the result.

        Args:
            block: [n] float32 or float64, the same n and dtype on every rank.
        """
        self.traffic.add(block.numel() * block.element_size())
        if self.size == 1:
            return
        if block.device.type == "cpu" or self.cuda_aware:
            if block.device.type != "cpu":
                torch.cuda.synchronize(block.device)  # MPI does not know of the stream that fills it
            self._allreduce(block)
            return
        if self._staging is None or self._staging.numel() < block.numel() or self._staging.dtype != block.dtype:
            self._staging = torch.empty(block.numel(), dtype=block.dtype, pin_memory=True)
        staged = self._staging[: block.numel()]
        staged.copy_(block)
        self._allreduce(staged)
        block.copy_(staged, non_blocking=True)

    def _allreduce(self, block):
        for piece in block.split(LARGEST_CALL):
            # mpi4py takes numpy arrays by the buffer protocol and GPU tensors by DLPack
            buffer = piece.numpy() if piece.device.type == "cpu" else piece
            if self.crowded:
                self._wait(self.comm.Iallreduce(MPI.IN_PLACE, buffer))
            else:
                self.comm.Allreduce(MPI.IN_PLACE, buffer)

    def gather(self, values):
        """[size, n] float64: every rank's [n] `values`, in rank order. Collective."""
        mine = np.ascontiguousarray(values, dtype=np.float64)
        everyone = np.empty((self.size, mine.size))
        self._wait(self.comm.Iallgather(mine, everyone))
        self.traffic.other_bytes += mine.nbytes
        return everyone

    def _wait(self, request):
        """Wait for a request; on a crowded node by giving the core away between looks at it.

        Waiting inside MPI spins, and where ranks outnumber cores that takes the cores from the
        ranks that others wait for.
        """
        if self.crowded:
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

    def concatenate(self, values):
        """All ranks' [n_r] float64 `values`, one after the other, n_r of any length. Collective."""
        mine = np.ascontiguousarray(values, dtype=np.float64)
        counts = self.gather(np.array([mine.size]))[:, 0].astype(int)
        everyone = np.empty(counts.sum())
        self._wait(self.comm.Iallgatherv(mine, [everyone, counts]))
        self.traffic.other_bytes += mine.nbytes
        return everyone

    def exchange(self, rows, wanted):
        """[m, ...] the rows that the others have for this rank, in rank order. Collective.

        Args:
            rows: [n, ...] array of this rank; dtype and shape of a row are the same on every rank.
            wanted: for each rank the indices into `rows` of what goes to it, in the order it is sent.
        """
        counts = [len(indices) for indices in wanted]
        come = self.gather(counts)[:, self.rank].astype(int)
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
        flags = self.gather(np.array([float(failed)]))[:, 0]
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
