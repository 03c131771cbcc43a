"""Which layers are private: patterns of names, as `--private` gives them. Not collective."""

from fedmpi.federation.private import private_places
from fedmpi.ground.errors import UserError


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
