"""MPI's own Allreduce."""

import torch

from fedmpi.comm.solo import divide
from fedmpi.comm.sums.transports.base import Transport


class Allreduce(Transport):
    """MPI's in-place Allreduce, in pieces; averages blocks in any memory, also those that no transport allocated.

    Blocks on a GPU go through pinned host memory.
    """

    name = "allreduce"
    description = "Allreduce"

    def __init__(self, topology):
        super().__init__(topology)
        self._staging = None

    @classmethod
    def suits(cls, facts):
        return True

    def allocate(self, numel, dtype, device):
        return torch.zeros(numel, dtype=dtype, device=device)

    def owns(self, block):
        return True

    def average(self, block, divisor, out):
        if block.device.type == "cpu":
            self.topology.world.allreduce(block)
        else:
            staged = self._host_memory(block)
            staged.copy_(block)
            self.topology.world.allreduce(staged)
            block.copy_(staged, non_blocking=True)
        divide(block, divisor, out)

    def _host_memory(self, block):
        """Pinned memory of the block's length and dtype."""
        if self._staging is None or self._staging.numel() < block.numel() or self._staging.dtype != block.dtype:
            self._staging = torch.empty(block.numel(), dtype=block.dtype, pin_memory=True)
        return self._staging[: block.numel()]
