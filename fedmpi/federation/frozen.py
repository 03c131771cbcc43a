"""Which parameters are not trained: patterns of names, as `--freeze` gives them. Not collective."""

import torch
from torch import nn

from fedmpi.federation.private import matching
from fedmpi.ground.errors import UserError


def freeze(module: nn.Module, text: str | None) -> list[nn.Module]:
    """Exclude the parameters that `--freeze` names from training; None: none.

    Returns:
        the modules whose float buffers (batch-norm statistics) are all among them: these must not change either.

    Raises:
        UserError: if a pattern matches nothing, or nothing would be left to train.
    """
    if text is None:
        return []
    if not isinstance(text, str):
        raise UserError(f"freeze = {text!r}: expected names with commas between them, like 'body,*.bias'")
    names = matching(module, text, "freeze")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in names)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError(f"freeze = {text}: leaves nothing to train")
    parts = []
    for prefix, part in module.named_modules():
        floats = [f"{prefix}.{key}".lstrip(".") for key, value in part._buffers.items() if _is_float(value)]
        parts += [part] if floats and names.issuperset(floats) else []
    return parts


def _is_float(buffer: torch.Tensor | None) -> bool:
    return buffer is not None and buffer.is_floating_point()
