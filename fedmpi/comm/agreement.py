"""How all ranks agree on an error that only some of them met."""

from fedmpi.errors import AgreedUserError, UserError


def agree(link, action):
    """Do something that may meet a user's error on some ranks only; all ranks raise, or none. Collective on the link.

    If `action` itself is collective, it must fail on all ranks or on none.

    Returns:
        what `action()` returns.

    Raises:
        AgreedUserError: on every rank if on any; its text is empty except on the lowest rank that met an error.
    """
    result, error = None, None
    try:
        result = action()
    except AgreedUserError:  # met and agreed on inside of the action
        raise
    except UserError as met:
        error = met
    failing = link.first_failing(error is not None)
    if failing is None:
        return result
    where = f"on rank {failing}: " if failing > 0 else ""
    raise AgreedUserError(f"{where}{error}" if failing == link.rank else "") from error
