"""Which words several silos have, without telling a word that one of them has alone.

A word's hash is a point of Curve25519, and every rank multiplies it by a secret number of its own, which it draws anew
each time. The lists of points go round all ranks, so that in the end each point has been multiplied by all numbers:
equal words are then equal points, whatever the order, and can be counted. To find out whether a point stands for some
word, one would need all ranks' numbers; so nobody can try the words of a dictionary afterwards, as with hashes under a
common key.

What a rank learns: how many words each rank's clients have; of its own words, which other ranks have them, too; of
other words, how many ranks have the same one. It hides nothing from a rank that lies: who puts a word into its list
that its clients do not have learns whether others have it.
"""

import collections
import hashlib
import os

import numpy as np

from fedmpi.comm.agreement import agree
from fedmpi.ground.errors import UserError

BYTES = 32  # of a point
PRIME = 2**255 - 19
CURVE = 486662  # v² = u³ + CURVE u² + u


def num_holders(link, words_of_clients):
    """word -> number of clients that have it, for each word of this rank's clients. Collective on the link.

    `words_of_clients`: for each client of this rank, its words as bytes, each once.
    """
    own = collections.Counter(word for words in words_of_clients for word in words)
    sizes = link.allgather([len(own)], "blind words").astype(int).ravel()
    if link.size == 1 or not sizes.any():
        return own
    salt = os.urandom(BYTES)
    words = sorted(own, key=lambda word: hashlib.sha256(salt + word).digest())  # an order without meaning
    points = _points_of_all(link, words)
    numbers = link.allgatherv([own[word] for word in words], "blind words").astype(np.int64)
    everyone = link.alltoallv(points, [np.arange(len(words))] * link.size, "blind words")
    total = collections.Counter()
    for point, number in zip(map(bytes, everyone), numbers.tolist()):
        total[point] += number
    begin = int(sizes[: link.rank].sum())
    return {word: total[bytes(point)] for word, point in zip(words, everyone[begin:])}


def check_equal_words(link, words, data):
    """Check that some texts are the same in all clients' files, without telling them. Collective on the link.

    Args:
        words: for each client of this rank, kind -> text; [] if all clients have one file.
        data: the name of the data, for the message.

    Raises:
        AgreedUserError: on every rank.
    """
    marked = [{f"{kind}: {text}".encode() for kind, text in own.items()} for own in words]
    number, least = num_holders(link, marked), int(link.allgather([len(words)], "machinery").sum())

    def check():
        for kind, text in (pair for own in words for pair in own.items()):
            held = number[f"{kind}: {text}".encode()]
            if held < least:
                raise UserError(
                    f"{data}: the {kind} are not the same in the files of all {least} clients, those of one are in "
                    f"{held}: expected the same; see data show FILE, and data prepare --columns (tables)"
                )

    agree(link, check)


def _points_of_all(link, words):
    """[n, BYTES] uint8: the points of this rank's words, multiplied by the numbers of all ranks. Collective."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey  # takes a while to load

    secret, points = X25519PrivateKey.generate(), list(map(_point, words))
    for _ in range(link.size):
        rows = np.frombuffer(b"".join(_multiplied(secret, points)), np.uint8).reshape(-1, BYTES)
        wanted = [np.arange(len(rows) * (rank == (link.rank + 1) % link.size)) for rank in range(link.size)]
        points = [row.tobytes() for row in link.alltoallv(rows, wanted, "blind words")]
    return np.frombuffer(b"".join(points), np.uint8).reshape(-1, BYTES)


def _multiplied(secret, points):
    """The points times a secret number."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    return [secret.exchange(X25519PublicKey.from_public_bytes(point)) for point in points]


def _point(word):
    """The bytes of a point of the curve, which depend on the word only."""
    digest = word
    while True:
        digest = hashlib.sha256(b"fedmpi word" + digest).digest()
        u = int.from_bytes(digest, "little") % 2**255 % PRIME
        if pow(u * (u * u + CURVE * u + 1), (PRIME - 1) // 2, PRIME) == 1:  # otherwise no point has this u
            return u.to_bytes(BYTES, "little")
