"""Which layers are private or frozen: patterns of names, as `--private` and `--freeze` give them. Not collective."""

from fedmpi.federation.private import matching, private_places
from fedmpi.ground.errors import UserError


def freeze(module, text):
    """Exclude the parameters that `--freeze` names from training; None: none.

    Returns:
        the modules whose float buffers (batch-norm statistics) are all among them: these must not change either.

    Raises:
        UserError: if a pattern matches nothing, or nothing would be left to train.
    """
    if text is None:
        return []
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


def _is_float(buffer):
    return buffer is not None and buffer.is_floating_point()


def private_parts(config, task, flat):
    """(slices of x, slices of the float buffers) that `--private` names.

    Raises:
        UserError: if a pattern matches nothing, or the run cannot have private layers.
    """
    if config.layers.private is None:
        return (), ()
    if not task.is_personal:
        raise UserError(
            f"private = {config.layers.private}: this task has no model that a client could have for itself"
        )
    if config.evaluation.result == "uniform":
        raise UserError(
            f"private = {config.layers.private}: expected result = last or best: each client has its own model"
        )
    return private_places(flat, config.layers.private)
