"""Sums of device memory through host memory, in chunks whose copies and sums overlap.

It has run on one kind of GPU only, so its first averages are compared with MPI's. On the CPU a plain copy stands
in for the way between device and host, so that the order of its steps is tested.
"""

import contextlib

import torch

from fedmpi.comm.solo import divide
from fedmpi.comm.sums.transports.base import COMPARED, SMALLEST_GAIN, Transport, lies_in
from fedmpi.comm.sums.window import NodeWindow, NoWindow, divide_and_spread

CHUNK = 4 << 20  # bytes of a copy; two are on their way while a third is summed
NUM_BUFFERS = 3  # one comes from the device, one is summed, one goes back


class HostCopies:
    """Copies between a device and host memory; on the CPU, where nothing has to be awaited."""

    def buffer(self, numel, dtype):
        """[numel] host memory that copies go through."""
        return torch.empty(numel, dtype=dtype)

    def copy(self, target, source):
        """Begin to copy; returns what `wait` takes. Copies of one direction run in the order of their calls."""
        target.copy_(source)

    def pin(self, memory):
        """Make copies through some host memory as fast as through `buffer`, until `unpin`."""

    def unpin(self, memory):
        """Undo `pin`."""

    def wait(self, copy):
        """Wait until a copy is complete."""

    def begin(self):
        """Let the copies that follow wait for all that was computed so far on the device."""

    def end(self):
        """Let the device's computations that follow wait for all copies so far."""


class GpuCopies(HostCopies):
    """Copies between a GPU and host memory: pinned buffers, and a stream for each direction."""

    def __init__(self, device):
        self._device, self._backend = device, torch.get_device_module(device)
        self._to_host, self._to_device = self._backend.Stream(device), self._backend.Stream(device)
        self._pinned = set()  # where the memory begins that `pin` could pin

    def buffer(self, numel, dtype):
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def pin(self, memory):
        if self._device.type != "cuda":  # torch has no such call for others; without it, copies are slower
            return
        if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
            self._pinned.add(memory.data_ptr())
            return
        with contextlib.suppress(RuntimeError):  # torch reports the failure at its next kernel, and then forgets it
            torch.zeros(1, device=self._device)

    def unpin(self, memory):
        if memory.data_ptr() in self._pinned:
            self._pinned.remove(memory.data_ptr())
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def copy(self, target, source):
        stream = self._to_host if source.device.type != "cpu" else self._to_device
        with self._backend.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()

    def wait(self, copy):
        copy.synchronize()

    def begin(self):
        current = self._backend.current_stream(self._device)
        self._to_host.wait_stream(current)
        self._to_device.wait_stream(current)

    def end(self):
        self._backend.current_stream(self._device).wait_stream(self._to_device)


class Staged(Transport):
    """Blocks on a device, summed in host memory chunk by chunk.

    While a chunk is summed, the next one comes from the device and the previous one goes back to it. On a single node
    the host memory is a window that its ranks share, and they sum there; between nodes MPI sums.
    """

    name = "staged"
    preference = 1
    description = "Allreduce in host memory, staged"
    num_compared = COMPARED

    def __init__(self, topology):
        super().__init__(topology)
        self._blocks, self._copies = [], {}
        self._windows = []  # (`NodeWindow`, the `HostCopies` that pinned it)
        self._hosts = {}  # dtype -> (what sums, buffers of a chunk)

    @classmethod
    def suits(cls, facts):
        return facts.device not in ("", "cpu") and facts.nbytes >= SMALLEST_GAIN

    def allocate(self, numel, dtype, device):
        block = torch.zeros(numel, dtype=dtype, device=device)
        self._blocks.append(block)
        if device not in self._copies:
            self._copies[device] = HostCopies() if device.type == "cpu" else GpuCopies(device)
        if dtype not in self._hosts:
            self._hosts[dtype] = self._open(self._copies[device], CHUNK // dtype.itemsize, dtype)
        return block

    def owns(self, block):
        return any(lies_in(block, own) for own in self._blocks)

    def average(self, block, divisor, out):
        copies = self._copies[block.device]
        sums, buffers = self._hosts[block.dtype]
        copies.begin()
        sum_in_chunks(sums, block.split(len(buffers[0])), buffers, copies)
        copies.end()
        divide(block, divisor, out)

    def close(self):
        for window, copies in reversed(self._windows):
            copies.unpin(window.mine)
            window.free()
        self._blocks, self._copies, self._windows, self._hosts = [], {}, [], {}

    def _open(self, copies, numel, dtype):
        """(what sums, `NUM_BUFFERS` host buffers of `numel`): in a window on a single node, if there is room for it."""
        if self.topology.num_nodes == 1:
            with contextlib.suppress(NoWindow):
                window = NodeWindow(self.topology.node, NUM_BUFFERS * numel, dtype)
                copies.pin(window.mine)
                self._windows.append((window, copies))
                self.description = "shared memory of the host, staged"
                return WindowSums(window, self.topology.node), window.mine.split(numel)
        return self.topology.world, [copies.buffer(numel, dtype) for _ in range(NUM_BUFFERS)]


class WindowSums:
    """Sums of buffers in a window of a node's shared memory, for `sum_in_chunks` in the place of a `Communicator`.

    Args:
        window: a `NodeWindow`; a buffer is the same part of every rank's vector. node: its `Communicator`.
    """

    def __init__(self, window, node):
        self._window, self._node = window, node

    def start_allreduce(self, block):
        """Nothing is done until `wait`, to which this gives the block."""
        return block

    def wait(self, block):
        """Sum a buffer over the ranks, in place: each rank sums one slice of it for all."""
        window = self._window
        start = window.offset(block)
        own_slice = window.slices(start, start + block.numel(), self._node.size)[self._node.rank]
        window.synchronise()  # all buffers are complete
        window.reduce(own_slice, lambda vectors: divide_and_spread(vectors, 1))
        window.synchronise()  # all slices are complete


def sum_in_chunks(comm, chunks, buffers, copies):
    """Sum some chunks over the ranks, in place, through host buffers. Collective on `comm`.

    Args:
        comm: a `Communicator` or `WindowSums`. chunks: [n] each, at most as long as a buffer.
        buffers: three or more on the host. copies: a `HostCopies`.
    """
    hosts = [buffers[number % len(buffers)][: chunk.numel()] for number, chunk in enumerate(chunks)]
    arriving, leaving = [copies.copy(hosts[0], chunks[0])] if chunks else [], []
    for number, chunk in enumerate(chunks):
        copies.wait(arriving[number])
        request = comm.start_allreduce(hosts[number])
        following = number + 1
        if following < len(chunks):
            previous = following - len(buffers)  # used the same buffer
            if previous >= 0:
                copies.wait(leaving[previous])
            arriving.append(copies.copy(hosts[following], chunks[following]))
        comm.wait(request)
        leaving.append(copies.copy(chunk, hosts[number]))
    for copy in leaving[-len(buffers) :]:
        copies.wait(copy)
