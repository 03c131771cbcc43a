"""Updates compiled into one pass over the rows, for models whose update is bound by memory.

What they compute is what the algorithm's own arithmetic computes; the last digits may differ.
"""

import dataclasses
import functools
import types

import torch

from fedmpi.algorithms.fafed import FAFED
from fedmpi.errors import UserError


class FusedFAFED(FAFED):
    """FAFED with the diagonal matrix, its local update compiled."""

    def advance(self, client, server, g, g_prev, eta):
        """See `FAFED.advance`."""
        numbers = [self.alpha(client), self.second_moment_decay, self.prev_grad_scale, eta or 0.0]
        rows = (client.x, client.x_prev, client.m, client.v, server.A, g, g_prev)
        _compiled(_advance_fafed)(*rows, g.new_tensor(numbers))


def fuse(algorithm, like):
    """The same algorithm with its update compiled; compiles it at once, which takes some seconds.

    Args:
        algorithm: an `Algorithm`. like: a [dim] tensor of the rows' dtype and device.

    Raises:
        UserError: one line, if there is no compiled update of it or no compiler.
    """
    if type(algorithm) is not FAFED or algorithm.adaptive_matrix != "diagonal":
        raise UserError(
            f"fused_update = true: there is none for {type(algorithm).__name__}, only for FAFED with "
            "adaptive_matrix = diagonal: leave it off"
        )
    fused = FusedFAFED(**{field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)})
    rows = dict(zip(("x", "x_prev", "m", "v", "A"), like.new_ones(5, 64)))
    client, server = types.SimpleNamespace(iteration=1, round_index=0, **rows), types.SimpleNamespace(A=rows["A"])
    try:
        fused.advance(client, server, *like.new_ones(2, 64), 0.1)
    except RuntimeError as error:  # what torch raises where there is no compiler
        raise UserError(
            f"fused_update = true: torch cannot compile here ({str(error).strip().splitlines()[0]}): "
            "install a C++ compiler or leave it off"
        ) from error
    return fused


@functools.cache
def _compiled(function):
    return torch.compile(function, fullgraph=True, dynamic=True)


def _advance_fafed(x, x_prev, m, v, A, g, g_prev, numbers):
    """Lines 5-7 and 14 of FAFED; numbers = α, β, the scale of g⁻, and η (0: it does not move)."""
    alpha, beta, scale, eta = numbers.unbind()
    m.copy_(g + (1 - alpha) * (m - scale * g_prev))
    v.copy_(beta * v + (1 - beta) * g * g)
    x_prev.copy_(x)
    x.copy_(x - eta * m / A)
