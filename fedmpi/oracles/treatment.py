"""What is done with a gradient before an algorithm sees it."""

import torch


def clip_and_decay(
    gradient: torch.Tensor, z: torch.Tensor, clip_norm: float | None, weight_decay: float
) -> torch.Tensor:
    """Shorten a [dim] gradient to the norm `clip_norm` unless that is None, then add weight_decay times z; in place."""
    if clip_norm is not None:
        gradient.mul_((clip_norm / torch.linalg.vector_norm(gradient)).clamp(max=1))
    if weight_decay:
        gradient.add_(z, alpha=weight_decay)
    return gradient


def negate_ascent(gradient: torch.Tensor, ascent: slice | None, scale: float = 1.0) -> None:
    """Change the sign of the ascent block of a gradient, in place: descending there is ascending.

    Args:
        gradient: [dim]. ascent: a slice of it, or None. scale: further factor of the block.
    """
    if ascent is not None:
        gradient[ascent].mul_(-scale)
