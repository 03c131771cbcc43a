"""What all ranks exchange besides sums: errors of some of them, values of rank 0, lines of text."""

import hashlib
import json

import numpy as np

from fedmpi.ground.errors import AgreedUserError, UserError
from fedmpi.ground.text import short


def share(link, action, kind="run"):
    """What `action()` returns on rank 0, on all ranks: what JSON can hold. Collective on the link.

    `kind`: of the message, see `Link`. If rank 0 is lost meanwhile, the next one calls `action`.

    Raises:
        AgreedUserError: on every rank, if `action` raises a `UserError`; rank 0 prints it.
    """
    members, text = None, b""
    while members != link.members:
        members, text = link.members, _share_once(link, action, kind)
    return json.loads(text)


def _share_once(link, action, kind):
    """What rank 0 finds as text, on all ranks; anything, if it is lost."""
    found = json.dumps(agree(link, action if link.rank == 0 else lambda: None)).encode()
    size = int(link.allgather([len(found)], "machinery")[0, 0])
    text = np.frombuffer(found, np.uint8).copy() if link.rank == 0 else np.empty(size, np.uint8)
    link.broadcast(text, kind)
    return text.tobytes()


def agree(link, action):
    """What `action()` returns; if it raises a `UserError` (or OSError) on some ranks, an error on all. Collective.

    If `action` is collective itself, it must fail on all ranks or on none.

    Raises:
        AgreedUserError: on every rank, if `action` fails on any; the lowest such rank prints it.
    """
    result, error = None, None
    try:
        result = action()
    except AgreedUserError:  # the action has agreed on it itself
        raise
    except UserError as met:
        error = met
    except OSError as met:  # a file or folder that no check expected: too long a name, no right to look into it
        error = UserError(f"{met.filename}: {met.strerror}" if met.filename and met.strerror else str(met))
        error.__cause__ = met
    failing = link.first_rank_where(error is not None)
    if failing is None:
        return result
    where = f"on rank {failing}: " if failing > 0 else ""
    raise agreed_error(link, f"{where}{error}" if failing == link.rank else None) from (error and error.__cause__)


def agreed_error(link, text):
    """The error to raise on all ranks, of which one has the text and prints it, the others None. Collective."""
    everywhere = link.allgatherv(list((text or "").encode()), "errors")
    return AgreedUserError(everywhere.astype(np.uint8).tobytes().decode(), text is not None)


def allgather_lines(link, lines, kind):
    """All ranks' lines of text, without line breaks, in one list, in rank order. Collective on the link.

    `kind`: of the message, see `Link`.
    """
    own_bytes = "".join(f"{line}\n" for line in lines).encode()
    return link.allgatherv(list(own_bytes), kind).astype(np.uint8).tobytes().decode().split("\n")[:-1]


def difference(link, entries):
    """The first of some entries that is not the same on all ranks, with its values and ranks. Collective on the link.

    `entries`: name -> text, the same on all ranks if all is well, also in their order. Returns a text like
    "rounds is 5 on rank 0, 7 on ranks 1, 2"; "" if all are the same.
    """
    text = json.dumps(list(entries.items())).encode()
    # A hash of 48 bits, which a float64 holds exactly; the whole texts are exchanged only if the hashes differ.
    whole = int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little")
    everyone = link.allgather([whole, len(text)], "settings")
    if (everyone == everyone[0]).all():
        return ""
    joined = link.allgatherv(list(text), "settings").astype(np.uint8).tobytes()
    ends = np.cumsum(everyone[:, 1]).astype(int)
    of_ranks = [json.loads(joined[end - int(size) : end]) for end, size in zip(ends, everyone[:, 1])]
    orders = [", ".join(name for name, _ in theirs) for theirs in of_ranks]
    tables = [{**dict(theirs), "the order of names": order} for theirs, order in zip(of_ranks, orders)]
    names = dict.fromkeys([name for theirs in of_ranks for name, _ in theirs] + ["the order of names"])
    name = next(name for name in names if len({theirs.get(name) for theirs in tables}) > 1)
    ranks = {}
    for rank, theirs in enumerate(tables):
        ranks.setdefault(theirs.get(name, "missing"), []).append(rank)
    values = [f"{short(value, 100)} on rank{'s' * (len(which) > 1)} {_some(which)}" for value, which in ranks.items()]
    return f"{name} is {', '.join(values[:4])}" + (", ..." if len(values) > 4 else "")


def _some(numbers, most=8):
    return ", ".join(map(str, numbers[:most])) + (", ..." if len(numbers) > most else "")


def check_equal(link, entries, hint):
    """Check that all ranks have the same entries, see `difference`; `hint` ends the message. Collective on the link.

    Raises:
        AgreedUserError: on every rank.
    """
    found = difference(link, entries)
    if found:
        raise AgreedUserError(f"the ranks differ: {found}: {hint}", link.rank == 0)
