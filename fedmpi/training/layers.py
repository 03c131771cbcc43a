"""Which layers are private or frozen: patterns of names, as `--private` and `--freeze` give them. Not collective."""

import fnmatch

from torch.nn.modules.batchnorm import _BatchNorm

from fedmpi.errors import UserError
from fedmpi.settings import nearest

BATCH_NORM = "bn"  # in a list of patterns: all batch-norm layers


def matching(module, text, setting):
    """The names of a module's parameters and buffers that match some patterns.

    Args:
        module: a `torch.nn.Module`. text: patterns separated by commas, each of names of parameters, buffers or
            modules; or "bn". setting: how the user gave it, for the message.

    Raises:
        UserError: if a pattern matches nothing.
    """
    names, found = list(module.state_dict()), set()
    norms = [prefix for prefix, part in module.named_modules() if isinstance(part, _BatchNorm)]
    for pattern in filter(None, map(str.strip, text.split(","))):
        patterns = [pattern, f"{pattern}.*"]
        if pattern == BATCH_NORM and norms:
            patterns = [f"{prefix}.*" for prefix in norms]
        meant = {name for name in names if any(fnmatch.fnmatchcase(name, one) for one in patterns)}
        if not meant:
            known = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
            raise UserError(
                f"{setting} = {text}: no layer is called {pattern}; the model has {known}{nearest(pattern, names)}"
            )
        found |= meant
    return found


def freeze(module, text):
    """Exclude the parameters that `--freeze` names from training; None: none.

    Raises:
        UserError: if a pattern matches nothing, or nothing would be left to train.
    """
    if text is None:
        return
    names = matching(module, text, "freeze")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in names)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError(f"freeze = {text}: leaves nothing to train")


def private_parts(run, task, flat):
    """(slices of x, slices of the float buffers) that `--private` names.

    Raises:
        UserError: if a pattern matches nothing, or the run cannot have private layers.
    """
    if run.private is None:
        return (), ()
    if not task.is_personal:
        raise UserError(f"private = {run.private}: this task cannot evaluate a model per client; classification can")
    for name, needed in {"result": "last", "fused_update": False, "stack": 1}.items():
        value = getattr(run, name)
        if value != needed:
            raise UserError(
                f"private = {run.private}: expected {name} = {needed}, because each client has its own model"
            )
    names = matching(flat.module, run.private, "private")
    private = tuple(part for name, part in zip(flat.names, flat.segments) if name in names)
    buffers = tuple(part for name, part in flat.buffer_slices.items() if name in names)
    if not private and not buffers:
        raise UserError(
            f"private = {run.private}: selects only frozen layers or counters, which are not averaged anyway"
        )
    return private, buffers
