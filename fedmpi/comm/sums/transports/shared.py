"""Sums in the memory that the ranks of a node share."""

import torch

from fedmpi.comm.solo import divide
from fedmpi.comm.sums.transports.base import SMALLEST_GAIN, Transport, Unavailable
from fedmpi.comm.sums.window import NodeWindow, NoWindow, divide_and_spread
from fedmpi.comm.vectors import Slices


class SharedMemory(Transport):
    """Blocks live in windows of shared memory: each rank of a node sums one slice of all ranks' blocks in place.

    No copy and no message is needed on a node; between nodes, the ranks that own the same slice Allreduce it.
    The order of summation on a node is fixed: pairwise in rank order.
    """

    name = "shared"
    preference = 1
    description = "shared memory"

    def __init__(self, topology):
        super().__init__(topology)
        self._windows = []
        # Communicator of the ranks that sum the same slice, one per node; None until there is a window, and on ranks
        # that sum none because another node has fewer ranks.
        self._slice_owners = None
        if topology.num_nodes > 1:
            self.description = f"shared memory, Allreduce between {topology.num_nodes} nodes"

    @classmethod
    def suits(cls, facts):
        return facts.device == "cpu" and facts.nbytes >= SMALLEST_GAIN and facts.smallest_node > 1

    def allocate(self, numel, dtype, device):
        if numel == 0:
            return torch.zeros(0, dtype=dtype, device=device)
        topology, window, reason = self.topology, None, "on another node"
        try:
            window = self._open(numel, dtype, device)
        except NoWindow as error:
            reason = str(error)
        if topology.world.first_rank_where(window is None) is not None:
            if window is not None:
                window.free()
            raise Unavailable(reason)
        if not self._windows and topology.num_nodes > 1:
            owns_slice = topology.node.rank < topology.smallest_node
            self._slice_owners = topology.world.split(topology.node.rank if owns_slice else None)
        self._windows.append(window)
        return window.mine

    def _open(self, numel, dtype, device):
        """The `NodeWindow` of a block."""
        if device.type != "cpu":
            raise Unavailable(f"it needs rows on the CPU, and they are on {device}")
        return NodeWindow(self.topology.node, numel, dtype)

    def owns(self, block):
        return self._find(block) is not None

    def average(self, block, divisor, out):
        window, offset = self._find(block)
        topology = self.topology
        parts = window.slices(offset, offset + block.numel(), topology.smallest_node)
        own_slice = parts[topology.node.rank] if topology.node.rank < len(parts) else None
        window.synchronise()  # all blocks are complete

        def finish(vectors):
            divide_and_spread(vectors, divisor)

        if own_slice is not None and topology.num_nodes == 1:
            window.reduce(own_slice, finish)
        elif own_slice is not None:
            window.reduce(own_slice)
            self._slice_owners.allreduce(window.vectors[0][own_slice])
            finish([vector[own_slice] for vector in window.vectors])
        window.synchronise()  # all slices are complete
        divide(block, 1, out)

    def exchange_slices(self, has_vector, reduce, out):
        """See `Link.exchange_slices`, on one node.

        `has_vector`: for each rank, whether what its `out` contains is its vector.
        """
        window, offset = self._find(out)
        everyone = self.neighbours(out)
        own_slice = window.slices(offset, offset + out.numel(), len(everyone))[self.topology.node.rank]
        own_slice = slice(own_slice.start - offset, own_slice.stop - offset)
        window.synchronise()  # all vectors are complete
        vectors = [vector for vector, has in zip(everyone, has_vector) if has]
        for strip in window.strips(own_slice):  # the result goes to all while it is in the cache
            result = reduce(Slices((vector[strip] for vector in vectors), strip))
            for vector in everyone:
                vector[strip] = result
        window.synchronise()  # all slices are complete

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
