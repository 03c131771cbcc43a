"""Sums in the memory that the ranks of a node share."""

import collections

import torch

from fedmpi.comm.solo import divide
from fedmpi.comm.summation_order import Partials, split
from fedmpi.comm.sums.ordered_sum import combine
from fedmpi.comm.sums.transports.base import SMALLEST_GAIN, Transport, Unavailable
from fedmpi.comm.sums.window import NodeWindow, NoWindow, divide_and_spread, slices
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

    def combine(self, vectors, partials, divisor, out):
        window, topology = self._find(vectors[0])[0], self.topology
        me, node = topology.node.rank, topology.node_index
        begins = [window.offset(vector) for vector in vectors]
        held = {
            name: (topology.node_ranks[rank][1], begins[slot])
            for name, (rank, slot) in partials.holders.items()
            if topology.node_ranks[rank][0] == node
        }
        inner, outer = split(
            partials.steps, {n: topology.node_ranks[rank][0] for n, (rank, _) in partials.holders.items()}
        )
        parts = slices(0, out.numel(), topology.smallest_node, out.element_size())
        own_slice = parts[me] if me < len(parts) else None

        def spread(part, total, divisor):
            """Divide a part of the total and copy it to the first vector of every rank of this node."""
            firsts = [vector[begins[0] + part.start : begins[0] + part.stop] for vector in window.vectors]
            divide_and_spread([total, *firsts], divisor)

        window.synchronise()  # all partial sums are complete
        if own_slice is not None and topology.num_nodes == 1:
            root, begin = held[partials.root]
            total = window.vectors[root][begin : begin + out.numel()]
            window.take_steps(own_slice, held, inner.get(node, ()), lambda part: spread(part, total[part], divisor))
        elif own_slice is not None:
            window.take_steps(own_slice, held, inner.get(node, ()))
            total = window.vectors[me][begins[0] + own_slice.start : begins[0] + own_slice.stop]
            left = self._left_after(inner, outer, partials)
            terms = [
                window.vectors[rank][begin + own_slice.start : begin + own_slice.stop]
                for rank, begin in (held[name] for name in left.holders if name in held)
            ]
            combine(self._slice_owners, terms, left, divisor, total)
            spread(own_slice, total, 1)
        window.synchronise()  # all slices are complete
        divide(vectors[0], 1, out)

    def exchange_slices(self, has_vector, reduce, out):
        """See `Link.exchange_slices`, on one node.

        `has_vector`: for each rank, whether what its `out` contains is its vector.
        """
        window, offset = self._find(out)
        everyone = self.neighbours(out)
        own_slice = window.slices(offset, offset + out.numel(), len(everyone))[self.topology.node.rank]
        own_slice = slice(own_slice.start - offset, own_slice.stop - offset)
        window.synchronise()  # all vectors are complete
        if own_slice.stop > own_slice.start:
            result = reduce(Slices((vector[own_slice] for vector, has in zip(everyone, has_vector) if has), own_slice))
            for vector in everyone:
                vector[own_slice] = result
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

    def _left_after(self, inner, outer, partials):
        """The `Partials` that the owners of this rank's slice hold after the steps within their nodes."""
        node_ranks = self.topology.node_ranks
        nodes = [node for node, local_rank in node_ranks if local_rank == self.topology.node.rank]  # of the owners
        done = {b for steps in inner.values() for _, b in steps}
        left, slots = {}, collections.Counter()
        for name, (rank, _) in partials.holders.items():
            if name not in done:
                owner = nodes.index(node_ranks[rank][0])
                left[name] = owner, slots[owner]
                slots[owner] += 1
        return Partials(left, tuple(outer), partials.root)

    def _find(self, block):
        """(window, offset) of the window that holds `block`; None if none does."""
        for window in self._windows:
            offset = window.offset(block)
            if offset is not None:
                return window, offset
        return None
