"""MPI's Allreduce on GPU memory itself, by an MPI that can read it.

It has not run on a GPU, so its first averages are compared with those in host memory.
"""

import torch

from fedmpi.comm.solo import divide
from fedmpi.comm.start.gpu_transfer import why_not
from fedmpi.comm.sums.transports.base import COMPARED, SMALLEST_GAIN, Transport, Unavailable, lies_in


class CudaAware(Transport):
    """Blocks on a GPU that MPI reads and writes; on each node, the first rank tries it before in another process."""

    name = "cuda_aware"
    preference = 2
    description = "Allreduce in GPU memory"
    num_compared = COMPARED

    def __init__(self, topology):
        super().__init__(topology)
        self._blocks, self._is_tried = [], False

    @classmethod
    def suits(cls, facts):
        # On a node of its own it gains too little for the seconds that the process needs which tries it.
        return facts.device == "cuda" and facts.num_nodes > 1 and facts.nbytes >= SMALLEST_GAIN

    def allocate(self, numel, dtype, device):
        if device.type == "cpu":
            raise Unavailable("it needs rows on a GPU, and they are on the CPU")
        if not self._is_tried:
            self._try(device)
        self._blocks.append(torch.zeros(numel, dtype=dtype, device=device))
        return self._blocks[-1]

    def owns(self, block):
        return any(lies_in(block, own) for own in self._blocks)

    def average(self, block, divisor, out):
        torch.accelerator.synchronize(block.device)  # MPI does not know the stream that fills the block
        self.topology.world.allreduce(block)
        divide(block, divisor, out)

    def close(self):
        self._blocks = []

    def _try(self, device):
        """Let one process of each node transfer GPU memory by MPI. Collective.

        Raises:
            Unavailable: on all ranks, if it fails on a node.
        """
        reason = why_not(device) if self.topology.node.rank == 0 else ""
        if self.topology.world.first_rank_where(bool(reason)) is not None:
            raise Unavailable(reason or "on another node")
        self._is_tried = True
