"""Sums of device memory through host memory, in chunks whose copies and sums overlap.

It has not run on a GPU, so ``--transport auto`` does not take it: ``--transport staged`` does. On the CPU a plain copy
stands in for the way between device and host, so that the order of its steps is tested.
"""

import torch

from fedmpi.comm.link import divide
from fedmpi.comm.transports.base import Transport, lies_in

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

    def wait(self, copy):
        """Wait until a copy is complete."""

    def begin(self):
        """Let the copies that follow wait for all that was computed so far on the device."""

    def end(self):
        """Let the device's computations that follow wait for all copies so far."""


class CudaCopies(HostCopies):
    """Copies between a CUDA device and host memory: pinned buffers, and a stream for each direction."""

    def __init__(self, device):
        self._device = device
        self._to_host, self._to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def buffer(self, numel, dtype):
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def copy(self, target, source):
        stream = self._to_host if source.device.type == "cuda" else self._to_device
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()

    def wait(self, copy):
        copy.synchronize()

    def begin(self):
        current = torch.cuda.current_stream(self._device)
        self._to_host.wait_stream(current)
        self._to_device.wait_stream(current)

    def end(self):
        torch.cuda.current_stream(self._device).wait_stream(self._to_device)


class Staged(Transport):
    """Blocks on a device, summed in host memory chunk by chunk.

    While MPI sums a chunk, the next one comes from the device and the previous one goes back to it.
    """

    name = "staged"
    preference = 1
    description = "Allreduce in host memory, staged"

    def __init__(self, topology):
        super().__init__(topology)
        self._blocks, self._copies, self._buffers = [], {}, {}

    @classmethod
    def suits(cls, facts):
        return False  # only if the user names it

    def allocate(self, numel, dtype, device):
        block = torch.zeros(numel, dtype=dtype, device=device)
        self._blocks.append(block)
        if device not in self._copies:
            self._copies[device] = HostCopies() if device.type == "cpu" else CudaCopies(device)
        return block

    def owns(self, block):
        return any(lies_in(block, own) for own in self._blocks)

    def average(self, block, divisor, out):
        copies = self._copies[block.device]
        chunks = block.split(CHUNK // block.element_size())
        buffers = self._host_buffers(copies, block)
        copies.begin()
        sum_in_chunks(self.topology.world, chunks, buffers, copies)
        copies.end()
        divide(block, divisor, out)

    def close(self):
        self._blocks, self._copies, self._buffers = [], {}, {}

    def _host_buffers(self, copies, block):
        """`NUM_BUFFERS` host buffers of a chunk, made once for each dtype."""
        key = block.device, block.dtype
        if key not in self._buffers:
            numel = CHUNK // block.element_size()
            self._buffers[key] = [copies.buffer(numel, block.dtype) for _ in range(NUM_BUFFERS)]
        return self._buffers[key]


def sum_in_chunks(comm, chunks, buffers, copies):
    """Sum some chunks over the ranks, in place, through host buffers. Collective on `comm`.

    Args:
        comm: a `Communicator`. chunks: [n] each, at most as long as a buffer.
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
