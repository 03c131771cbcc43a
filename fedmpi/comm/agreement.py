"""What all ranks exchange besides sums: errors of some of them, values of rank 0, lines of text."""

import hashlib
import json
import sys
import traceback

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
    text = np.frombuffer(found, np.uint8).copy() if link.rank == 0 else np.zeros(size, np.uint8)
    link.broadcast(text, kind)
    return text.tobytes()


def agree(link, action, tells=False):
    """What `action()` returns; if it raises a `UserError` (or OSError) on some ranks, an error on all. Collective.

    If `action` is collective itself, it must fail on all ranks or on none.

    `tells`: whether the line goes to the other ranks: only if it is about settings, for it quotes what is wrong. If
    not, or if code of the user has raised it, they know which rank has an error, and `UserError.where`, and the line
    may quote what a silo's data contain.

    Raises:
        AgreedUserError: on every rank, if `action` fails on any; the lowest such rank prints its line.
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
    cause = error and error.__cause__
    where = f"on rank {failing}: " if failing > 0 else ""
    if tells:
        is_told = failing != link.rank or not _may_quote(error)
        text = f"{where}{error}" if is_told else f"on rank {failing}: an error, which that rank prints"
        agreed = agreed_error(link, text if failing == link.rank else None)
        raise (agreed if is_told else AgreedUserError(f"{where}{error}", failing == link.rank)) from cause
    place = error.where if error is not None and failing == link.rank else ""
    place = link.allgatherv(list(place.encode()), "errors").astype(np.uint8).tobytes().decode()
    if error is None:
        error, where = f"an error{place and f' in {place}'}, which that rank prints", f"on rank {failing}: "
    raise AgreedUserError(f"{where}{error}", failing == link.rank) from cause


def _may_quote(error):
    """Whether it says what code of the user has raised, which may have read data."""
    is_raised = error.__traceback__ is not None  # else `agree` has made it, of its cause
    trace = (error if is_raised else error.__cause__).__traceback__
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in traceback.walk_tb(trace)]
    others = [package for package in packages if package not in sys.stdlib_module_names]
    return others[-1:] != ["fedmpi"] or (is_raised and error.__cause__ is not None)


def agreed_error(link, text):
    """The error to raise on all ranks, of which one has the text and prints it, the others None. Collective.

    The text goes to all ranks: it may not quote what a silo's data contain.
    """
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
    # A hash of 48 bits, which a float64 holds exactly; names and hashes of texts are exchanged only if it differs.
    if len({*link.allgather([_hash(json.dumps([*entries.items()]))], "settings")[:, 0]}) == 1:
        return ""
    own = {**entries, "the order of names": ", ".join(entries)}
    lines = [json.dumps([(name, _hash(text)) for name, text in own.items()])]
    tables = [dict(json.loads(line)) for line in allgather_lines(link, lines, "settings")]
    names = [*dict.fromkeys(name for theirs in tables for name in [*theirs][:-1]), [*own][-1]]
    name = next(name for name in names if len({theirs.get(name) for theirs in tables}) > 1)
    ranks = {}
    for rank, text in enumerate(allgather_lines(link, [json.dumps(own.get(name, "missing"))], "settings")):
        ranks.setdefault(json.loads(text), []).append(rank)
    values = [f"{short(value, 100)} on rank{'s' * (len(which) > 1)} {_some(which)}" for value, which in ranks.items()]
    return f"{name} is {', '.join(values[:4])}" + (", ..." if len(values) > 4 else "")


def _hash(text):
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=6).digest(), "little")


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
