"""Comparison of sums with those that MPI makes in host memory, for transports that have not run where they belong."""

import torch

from fedmpi.comm.sums.transports.base import Transport


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
