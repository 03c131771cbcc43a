"""How all ranks agree on an error that only some of them met."""

import numpy as np

from fedmpi.errors import AgreedUserError, UserError


def agree(link, action):
    """Do something that may meet a user's error on some ranks only, and let all ranks agree on it.

    Collective on the link; if `action` itself is, it must fail on all ranks alike.

    Raises:
        AgreedUserError: on every rank if on any; with text only on the lowest rank that met one.
    """
    result, error = None, None
    try:
        result = action()
    except UserError as met:
        error = met
    failing = np.flatnonzero(link.allgather([float(error is not None)])[:, 0])
    if not len(failing):
        return result
    where = f"on rank {failing[0]}: " if failing[0] > 0 else ""
    raise AgreedUserError(f"{where}{error}" if failing[0] == link.rank else "") from error
