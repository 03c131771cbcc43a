"""Comparison of sums with those that MPI makes in host memory, for transports that have not run where they belong."""

import torch

from fedmpi.ground.errors import AgreedUserError


class Compared:
    """A transport that ends the job if one of its first sums differs from MPI's. Collective.

    Args:
        transport: a `Transport`, whose `num_compared` says how many sums are still to be compared.
    """

    def __init__(self, transport):
        self._transport, self._world = transport, transport.topology.world

    def average(self, block, divisor, out):
        """See `Transport.average`.

        Raises:
            AgreedUserError: on every rank, if the sum differs on one.
        """
        before = block.clone() if self._transport.num_compared else None
        self._transport.average(block, divisor, out)
        if before is None:
            return
        self._transport.num_compared -= 1
        if self._world.first_rank_where(average_differs(self._world, before, divisor, out)) is not None:
            text = f"transport = {self._transport.name}: its sums differ from MPI's; use --transport allreduce"
            raise AgreedUserError(text, self._world.rank == 0)


def average_differs(world, block, divisor, average):
    """Whether this rank's average of a block differs from MPI's by more than rounding can explain. Collective.

    `block` is what this rank put in; `divisor`, `average`: as of `Link.average`.
    """
    values = block.cpu()
    sums = torch.cat([values, values.abs()])
    world.allreduce(sums)
    total, scale = sums.split(len(values)) if len(values) else (sums, sums)
    bound = 8 * world.size * torch.finfo(sums.dtype).eps * scale / divisor
    is_right = (average.cpu() - total / divisor).abs() <= bound
    return bool((~is_right & scale.isfinite()).any())
