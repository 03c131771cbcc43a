"""What all ranks exchange besides sums: errors of some of them, values of rank 0, lines of text."""

import json

import numpy as np

from fedmpi.errors import AgreedUserError, UserError


def share(link, action):
    """What `action` returns on rank 0, on all ranks. Collective on the link.

    Args:
        action: a function without arguments, called on rank 0 only; it returns what JSON can hold.

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
    """Call `action`, and if it raises a `UserError` on some ranks, raise an error on all. Collective on the link.

    Args:
        action: a function without arguments. If it is collective itself, it must fail on all ranks or on none.

    Returns:
        what `action()` returns.

    Raises:
        AgreedUserError: on every rank, if `action` fails on any; the text is that of the lowest such rank, and empty
            on the others.
    """
    result, error = None, None
    try:
        result = action()
    except AgreedUserError:  # the action has agreed on it itself
        raise
    except UserError as met:
        error = met
    failing = link.first_rank_where(error is not None)
    if failing is None:
        return result
    where = f"on rank {failing}: " if failing > 0 else ""
    raise AgreedUserError(f"{where}{error}" if failing == link.rank else "") from error


def allgather_lines(link, lines):
    """All ranks' lines of text in one list, in rank order. Collective on the link.

    Args:
        lines: list of str without line breaks; the ranks may have different numbers of them.
    """
    mine = "".join(f"{line}\n" for line in lines).encode()
    return link.allgatherv(list(mine)).astype(np.uint8).tobytes().decode().split("\n")[:-1]
