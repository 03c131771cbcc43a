"""Streams of random words that two ranks have in common, and that no other one can compute."""

import hashlib
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmpi.comm.agreement import agree
from fedmpi.comm.link import Link
from fedmpi.ground.errors import UserError
from fedmpi.ground.part import BLOCK

KEY, NONCE, SIGNATURE = 32, 16, 64  # bytes
TAG = 16  # bytes that say that a key is whole
WORD = 8  # bytes


class Stream:
    """Words of AES-256 in counter mode: 8 bytes of the nonce, then 8 of the counter.

    Args:
        key: 32 bytes. nonce: a number that the key has not had before.
    """

    def __init__(self, key: bytes, nonce: int) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes  # takes a while to load

        start = nonce.to_bytes(8, "big") + bytes(8)
        self._encryptor: Any = Cipher(algorithms.AES(key), modes.CTR(start)).encryptor()

    def fill(self, zeros: memoryview, memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """The next len(zeros) / 8 words, in `memory`, which is a block longer than `zeros`."""
        self._encryptor.update_into(zeros, memory.data[: len(zeros) + BLOCK])
        return memory[: len(zeros)].view("<i8")


class Session:
    """The keys of one start of the ranks; each rank pair has one. Making it is collective on the link.

    Every rank draws an X25519 key from the operating system, and sends its public part; nothing of it outlives the
    process. A pair's key follows from both, and from what all ranks have sent, by HKDF-SHA256.

    Args:
        link: the `Link`.
        known_keys: file with the long-term public key (Ed25519) of each rank, as ssh-keygen writes them, a line each;
            "": none are known. key: file with this rank's private one; {rank} in it becomes the rank's number.

    Attributes:
        order: the ranks in an order that is known only once all have sent their keys.

    Raises:
        AgreedUserError: on all ranks, with the rank whose key is not the known one.
    """

    def __init__(self, link: Link, known_keys: str, key: str) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._own, self._rank = X25519PrivateKey.generate(), link.members[link.rank]
        rows = _allgather(link, self._own.public_key().public_bytes_raw() + os.urandom(NONCE))
        self._public = {rank: row[:KEY] for rank, row in zip(link.members, rows, strict=True)}
        self.id = hashlib.sha256(b"".join(rows)).digest()
        self.order = sorted(self._public, key=lambda rank: hashlib.sha256(self.id + _number(rank)).digest())
        self._keys: dict[int, bytes] = {}
        if known_keys:
            agree(link, lambda: None if key else _no_key())
            signature = agree(link, lambda: _private(key, self._rank).sign(self._signed(self._rank)))
            signatures = _allgather(link, signature)
            agree(link, lambda: self._check(known_keys, signatures))

    def _signed(self, rank: int) -> bytes:
        return b"fedmpi session" + self.id + _number(rank) + self._public[rank]

    def _check(self, known_keys: str, signatures: list[bytes]) -> None:
        from cryptography.exceptions import InvalidSignature

        lines = [line for line in pathlib.Path(known_keys).read_text(encoding="utf-8").splitlines() if line.strip()]
        if len(lines) != len(signatures):
            raise UserError(
                f"aggregation.known_keys = {known_keys}: {len(lines)} lines: expected one for each of the "
                f"{len(signatures)} ranks"
            )
        for rank, line, signature in zip(self._public, lines, signatures, strict=True):
            try:
                _public(line, f"{known_keys}, line {rank + 1}").verify(signature, self._signed(rank))
            except InvalidSignature:
                raise UserError(
                    f"rank {rank} has signed its key of this run with another key than that of line {rank + 1} of "
                    f"{known_keys}: expected the ranks in the order of the lines; otherwise someone stands between"
                ) from None

    def between(self, other: int) -> bytes:
        """The key that this rank and another one have in common."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        if other not in self._keys:
            info = b"fedmpi mask" + b"".join(map(_number, sorted([self._rank, other])))
            shared = self._own.exchange(X25519PublicKey.from_public_bytes(self._public[other]))
            self._keys[other] = HKDF(algorithm=SHA256(), length=KEY, salt=self.id, info=info).derive(shared)
        return self._keys[other]

    def neighbours(self, ranks: Iterable[int], number: int) -> list[int]:
        """Those of some ranks with which this one has masks: `number` of them, or one more if it is odd; 0: all."""
        ring = [rank for rank in self.order if rank in set(ranks)]
        others = [rank for rank in ring if rank != self._rank]
        if self._rank not in ring or not number or number >= len(others):
            return others if self._rank in ring else []
        here = ring.index(self._rank)
        return sorted(
            {ring[(here + sign * d) % len(ring)] for d in range(1, (number + 1) // 2 + 1) for sign in (1, -1)}
        )


def with_tag(key: bytes, nonce: int, rank: int) -> bytes:
    """A key with what says, for this nonce and rank, that it is whole: `KEY` + `TAG` bytes."""
    return key + hashlib.sha256(b"fedmpi self mask" + _number(nonce) + _number(rank) + key).digest()[:TAG]


def _number(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _allgather(link: Link, data: bytes) -> list[bytes]:
    rows = link.allgather(np.frombuffer(data, np.uint8), "public keys")
    return [row.astype(np.uint8).tobytes() for row in rows]


def _no_key() -> None:
    raise UserError("aggregation.known_keys is given, and no aggregation.key: expected the file of this rank's own key")


def _private(path: str, rank: int) -> Any:
    """The private key in a file of ssh-keygen."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    file = pathlib.Path(path.replace("{rank}", str(rank))).expanduser()
    try:
        found = load_ssh_private_key(file.read_bytes(), None)
    except (ValueError, TypeError) as error:  # TypeError: it has a passphrase
        raise UserError(f"aggregation.key = {file}: {error}: {_EXPECTED}") from None
    if not isinstance(found, Ed25519PrivateKey):
        raise UserError(f"aggregation.key = {file}: another kind of key: {_EXPECTED}")
    return found


_EXPECTED = "expected a file of ssh-keygen -t ed25519, without a passphrase"


def _public(line: str, where: str) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        found = load_ssh_public_key(line.encode())
    except ValueError:
        found = None
    if not isinstance(found, Ed25519PublicKey):
        raise UserError(f"aggregation.known_keys: {where}: expected a line like ssh-ed25519 AAAAC3Nza...")
    return found
