"""How all ranks agree on an error that only some of them met."""

import json

import numpy as np

from fedmpi.errors import AgreedUserError, UserError


def share(link, action):
    """What rank 0 finds, on all ranks; the others call nothing. Collective on the link.

    Args:
        action: called on rank 0; returns nested dicts and lists of text, numbers and None.

    If rank 0 is lost meanwhile, the next one calls `action`.

    Raises:
        AgreedUserError: on every rank, if `action` raises a `UserError`; its text is empty except on rank 0.
    """
    members, text = None, b""
    while members != link.members:
        members, text = link.members, _share_once(link, action)
    return json.loads(text)


def _share_once(link, action):
    """What rank 0 finds as text, on all ranks; anything, if it is lost."""
    found = json.dumps(agree(link, action if link.rank == 0 else lambda: None)).encode()
    size = int(link.allgather([len(found)])[0, 0])
    text = np.frombuffer(found, np.uint8).copy() if link.rank == 0 else np.empty(size, np.uint8)
    link.broadcast(text)
    return text.tobytes()


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
