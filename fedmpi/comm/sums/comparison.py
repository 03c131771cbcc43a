"""Comparison of sums with those that MPI makes in host memory, for transports that have not run where they belong."""

import torch

from fedmpi.comm.sums.transports.base import Transport
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
        if before is not None:
            self._end_if(average_differs(self._world, before, divisor, out))

    def combine(self, vectors, partials, divisor, out):
        """See `Transport.combine`, and `average`."""
        before = [vector.clone() for vector in vectors] if self._transport.num_compared else None
        self._transport.combine(vectors, partials, divisor, out)
        if before is not None:
            self._end_if(combination_differs(self._transport, before, partials, divisor, out))

    def _end_if(self, differs):
        """Note that a sum was compared."""
        self._transport.num_compared -= 1
        if self._world.first_rank_where(differs) is not None:
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


def combination_differs(transport, vectors, partials, divisor, out):
    """Whether sums of vectors in a given order have other bits than those in host memory. Collective.

    `vectors` are what this rank put in; the others are as of `Link.combine`.
    """
    expected = torch.empty_like(out, device="cpu")
    Transport.combine(transport, [vector.cpu() for vector in vectors], partials, divisor, expected)
    return not torch.equal(expected.nan_to_num(), out.cpu().nan_to_num())
