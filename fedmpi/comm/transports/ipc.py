"""Sums on the GPUs of one node, whose ranks read and write each other's memory (CUDA IPC).

It has not run on a GPU, so its first averages are compared with MPI's. On the CPU files in shared memory stand in for
GPU memory, so that all but the opening of a peer's GPU memory is tested.
"""

import os
import struct
import tempfile

import torch

from fedmpi.comm.shared_memory import SHARED_FOLDER
from fedmpi.comm.transports.base import COMPARED, SMALLEST_GAIN, Unavailable
from fedmpi.comm.transports.shared import SharedMemory
from fedmpi.comm.window import NodeWindow, NoWindow

HANDLE_BYTES = 1024  # of what a rank needs to know to open another one's memory


class GpuMemory:
    """Vectors on a GPU, and those of other processes of the node, opened by torch's shared CUDA storages.

    Args:
        device: of torch, of this process.
    """

    def __init__(self, device):
        self._device = device

    def allocate(self, numel, dtype):
        """[numel] zeros."""
        return torch.zeros(numel, dtype=dtype, device=self._device)

    def handle(self, vector):
        """What one other process needs to open a vector, as bytes; each process needs one of its own."""
        # (device, memory, bytes, offset, counter, its offset, event, whether to wait for it), see reduce_tensor in
        # torch/multiprocessing/reductions.py. torch counts for each handle whether it is still in use.
        _, memory, nbytes, offset, counter, counter_offset, event, waits = vector.untyped_storage()._share_cuda_()
        numbers = (nbytes, offset, counter_offset, int(waits), len(memory), len(counter), len(event))
        return struct.pack("<7q", *numbers) + memory + counter + event

    def open(self, handle, numel, dtype):
        """The vector of another process that a handle is of; kernels of this process's GPU read and write it."""
        nbytes, offset, counter_offset, waits, *lengths = struct.unpack_from("<7q", handle)
        parts, begin = [], struct.calcsize("<7q")
        for length in lengths:
            parts.append(handle[begin : begin + length])
            begin += length
        memory, counter, event = parts
        # Opened for this process's own GPU, into whose address space CUDA maps the memory of its peer.
        storage = torch.UntypedStorage._new_shared_cuda(
            self._device.index, memory, nbytes, offset, counter, counter_offset, event, bool(waits)
        )
        return torch.empty(0, dtype=dtype, device=self._device).set_(storage, 0, (numel,))

    def opened(self):
        """No further process will open what was allocated last."""

    def wait(self):
        """Wait until this process's GPU has computed all that was begun."""
        torch.accelerator.synchronize(self._device)


class HostMemory(GpuMemory):
    """The same on the CPU: vectors in files in shared memory, whose handle is the file's name."""

    def __init__(self, device):
        super().__init__(device)
        self._path = None

    def allocate(self, numel, dtype):
        file, self._path = tempfile.mkstemp(prefix="fedmpi-", dir=SHARED_FOLDER)
        os.ftruncate(file, numel * dtype.itemsize)
        os.close(file)
        return torch.from_file(self._path, shared=True, size=numel, dtype=dtype)

    def handle(self, vector):
        return self._path.encode()

    def open(self, handle, numel, dtype):
        return torch.from_file(handle.rstrip(b"\0").decode(), shared=True, size=numel, dtype=dtype)

    def opened(self):
        if self._path is not None:
            os.unlink(self._path)  # the memory stays until the last process has closed it
            self._path = None

    def wait(self):
        pass


class PeerWindow(NodeWindow):
    """What `NodeWindow` is, in memory that every rank allocates for itself and the others open. Collective on `node`.

    Args:
        node, numel, dtype: see `NodeWindow`. memory: a `GpuMemory`.

    Raises:
        NoWindow: on all ranks or on none.
    """

    def __init__(self, node, memory, numel, dtype):
        self._node, self._memory, self._itemsize = node, memory, dtype.itemsize
        self.vectors, self.mine, problem = [], None, ""
        handles = [b""] * node.size
        try:
            self.mine = memory.allocate(numel, dtype)
            self._begin = self.mine.data_ptr()
            memory.wait()
            handles = [b"" if rank == node.rank else memory.handle(self.mine) for rank in range(node.size)]
            if max(map(len, handles)) > HANDLE_BYTES:
                raise RuntimeError(f"a handle has {max(map(len, handles))} bytes: expected at most {HANDLE_BYTES}")
        except (OSError, RuntimeError) as error:
            problem = _line(error)
        self._agree(problem)
        mine = b"".join(handle.ljust(HANDLE_BYTES, b"\0") for handle in handles)
        for rank, theirs in enumerate(node.allgather_bytes(mine)):
            begin = node.rank * HANDLE_BYTES
            try:
                if rank == node.rank:
                    self.vectors.append(self.mine)
                elif not problem:
                    self.vectors.append(memory.open(theirs[begin : begin + HANDLE_BYTES], numel, dtype))
            except (OSError, RuntimeError) as error:
                problem = _line(error)
        self._agree(problem)
        memory.opened()

    def strips(self, where):
        """The slice as one: a GPU has nothing to gain from short ones."""
        return super().strips(where) if self.mine.device.type == "cpu" else [where]

    def synchronise(self):
        self._memory.wait()
        self._node.barrier()

    def free(self):
        self._memory.wait()
        self.vectors = [self.mine]  # the others' are closed
        self._node.barrier()
        self.vectors, self.mine = [], None

    def _agree(self, problem):
        """NoWindow on all ranks, if one has a problem."""
        if self._node.first_rank_where(bool(problem)) is not None:
            self.vectors = []
            self._memory.opened()
            raise NoWindow(problem or "another rank cannot open its neighbours' memory")


class Ipc(SharedMemory):
    """Blocks in the memory of GPUs that the ranks of a node open; each rank sums one slice, as in shared memory."""

    name = "ipc"
    preference = 4
    description = "memory of the node's GPUs (CUDA IPC)"
    num_compared = COMPARED

    @classmethod
    def suits(cls, facts):
        return facts.device == "cuda" and facts.num_nodes == 1 and facts.nbytes >= SMALLEST_GAIN

    def _open(self, numel, dtype, device):
        if self.topology.num_nodes > 1:
            raise Unavailable("it needs all ranks on one node")
        if device.type not in ("cpu", "cuda"):
            raise Unavailable(f"torch shares no memory between processes on {device.type}")
        if device.type == "cpu":
            self.description = "files in shared memory in the place of GPU memory"
        return PeerWindow(self.topology.node, (HostMemory if device.type == "cpu" else GpuMemory)(device), numel, dtype)


def _line(error):
    return " ".join(str(error).split()) or type(error).__name__
