"""Proof that all ranks have the same file where a setting names one path for all of them. Collective on the link.

Behind one path, each hospital may have a file of its own. So nothing of a file's content is exchanged, not even a
header, before the ranks have compared its digest: a SHA-256 that is salted with random bytes of this start, by which
nobody can look it up in a list of digests.
"""

import contextlib
import hmac
import pathlib
import secrets

import numpy as np

from fedmpi.comm.agreement import agree
from fedmpi.ground.errors import AgreedUserError
from fedmpi.ground.files.checksum import file_digest, identity, regular

BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")  # of the running kernel: another one on every node
DIGEST_BYTES = 32


def check_same_files(link, given, paths, hint):
    """Check that the contents of some files are the same on all ranks.

    Ranks for which the system has one and the same file need its digest only once: the lowest of them reads it.

    Args:
        given: the setting that names them, like "task.data = silo.h5". paths: of the files, in an order that is the
            same on all ranks. hint: the end of the message.

    Raises:
        AgreedUserError: on every rank, which ones differ; or if a file is not a regular one, or cannot be read.
    """
    if link.size == 1:
        return
    salt = common_salt(link)
    places = allgather_salted(link, salt, agree(link, lambda: _place(paths)))
    reader = places.index(places[link.rank])
    content = agree(link, lambda: " ".join(map(file_digest, paths)) if reader == link.rank else "")
    digests = allgather_salted(link, salt, content)
    different = in_groups([digests[places.index(place)] for place in places])
    if different:
        text = f"{given}: is another file, with other content, on different ranks ({different}): {hint}"
        raise AgreedUserError(text, link.rank == 0)


def common_salt(link):
    """[32] uint8 random numbers of rank 0, on all ranks: those of one comparison."""
    salt = np.frombuffer(secrets.token_bytes(DIGEST_BYTES), np.uint8).copy()
    link.broadcast(salt, "file digests")
    return salt


def allgather_salted(link, salt, text):
    """The salted digest of every rank's text, in rank order."""
    own_digest = hmac.digest(salt.tobytes(), text.encode(), "sha256")
    everyone = link.allgather(np.frombuffer(own_digest, np.uint8), "file digests").astype(np.uint8)
    return [row.tobytes() for row in everyone]


def in_groups(digests, most=4):
    """The groups of ranks whose digests are equal as text, like "ranks 0, 2; rank 1"; "" if all are."""
    ranks_of = {}
    for rank, digest in enumerate(digests):
        ranks_of.setdefault(digest, []).append(rank)
    groups = [f"rank{'s' * (len(ranks) > 1)} {_some(ranks)}" for ranks in ranks_of.values()]
    return "" if len(groups) == 1 else "; ".join(groups[:most] + ["..."] * (len(groups) > most))


def _place(paths):
    """A text that is the same on two ranks only if the same files, unchanged, are there for both."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = BOOT.read_text(encoding="ascii")
    return f"{boot or secrets.token_hex(16)} {[identity(regular(path)) for path in paths]}"


def _some(ranks, most=8):
    return ", ".join(map(str, ranks[:most])) + (", ..." if len(ranks) > most else "")
