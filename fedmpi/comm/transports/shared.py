"""Sums in the memory that the ranks of a node share."""

import torch

from fedmpi.comm.link import divide
from fedmpi.comm.transports.base import Transport, Unavailable
from fedmpi.comm.window import NodeWindow, NoWindow, divide_and_spread

SMALLEST_GAIN = 64 << 10  # bytes; below, two barriers on the node cost more than plain Allreduce


class SharedMemory(Transport):
    """Blocks live in windows of shared memory: each rank of a node sums one slice of everybody's block in place.

    No copy and no message is needed on a node; between nodes, the ranks that own the same slice Allreduce it.
    The order of summation on a node is fixed: pairwise in rank order.
    """

    name = "shared"
    preference = 1
    description = "shared memory"

    def __init__(self, topology, cuda_aware=False):
        super().__init__(topology, cuda_aware)
        self._windows = []
        self._slice_owners = None  # communicator of the ranks that sum the same slice, one per node
        if topology.num_nodes > 1:
            self.description = f"shared memory, Allreduce between {topology.num_nodes} nodes"

    def suits(self, nbytes, device):
        return device.type == "cpu" and nbytes >= SMALLEST_GAIN and self.topology.smallest_node > 1

    def allocate(self, numel, dtype, device):
        if device.type != "cpu":
            raise Unavailable(f"it needs rows on the CPU, and they are on {device}")
        if numel == 0:
            return torch.zeros(0, dtype=dtype)
        topology, window, reason = self.topology, None, "on another node"
        try:
            window = NodeWindow(topology.node, numel, dtype)
        except NoWindow as error:
            reason = str(error)
        if topology.world.first_failing(window is None) is not None:
            if window is not None:
                window.free()
            raise Unavailable(reason)
        if self._slice_owners is None and topology.num_nodes > 1:
            owns_slice = topology.node.rank < topology.smallest_node
            self._slice_owners = topology.world.split(topology.node.rank if owns_slice else None)
        self._windows.append(window)
        return window.mine

    def owns(self, block):
        return self._find(block) is not None

    def average(self, block, divisor, out):
        window, offset = self._find(block)
        topology = self.topology
        slices = window.slices(offset, offset + block.numel(), topology.smallest_node)
        mine = slices[topology.node.rank] if topology.node.rank < len(slices) else None
        self._synchronise(window)  # all blocks are complete

        def finish(parts):
            divide_and_spread(parts, divisor)

        if mine is not None and topology.num_nodes == 1:
            window.reduce(mine, finish)
        elif mine is not None:
            window.reduce(mine)
            self._slice_owners.allreduce(window.vectors[0][mine])
            finish([vector[mine] for vector in window.vectors])
        self._synchronise(window)  # all slices are complete
        divide(block, 1, out)

    def neighbours(self, block):
        window, offset = self._find(block)
        return [vector[offset : offset + block.numel()] for vector in window.vectors]

    def close(self):
        for window in reversed(self._windows):
            window.free()
        self._windows = []
        if self._slice_owners is not None:
            self._slice_owners.free()
            self._slice_owners = None

    def _find(self, block):
        """(window, offset) of the window that holds `block`; None if none does."""
        for window in self._windows:
            offset = window.offset(block)
            if offset is not None:
                return window, offset
        return None

    def _synchronise(self, window):
        """Make everybody's writes on this node visible to everybody."""
        window.sync()
        self.topology.node.barrier()
        window.sync()
