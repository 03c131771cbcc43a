"""When a client changes a float buffer for the first time: every rank sends it from then on."""

from fedmpi.federation.parts import Parts
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import command_name


def check_seen(federation: Parts, are_more: bool) -> None:
    """After the buffers that are sent may have become more (`are_more`): check that all parts see them.

    Raises:
        UserError: on every rank, if one of them is summed apart from the rows, which a part must see.
    """
    aggregation, tail = federation.aggregation, federation.store.tail
    parts = [*federation.stages.values(), *([] if aggregation.is_mean else [aggregation])]
    if parts and (names := tail.sent.wide_names()):
        raise UserError(
            f"buffer '{names[0]}' has float64 values, or very large ones, in a model of another type, and changes: "
            f"{command_name(type(parts[0]))} would not see it; expected a buffer of the model's type"
        )
    if are_more and federation.round_start is not None:
        federation.round_start.give()  # the buffers have other places
