"""What a part between the clients and the server may have: state, facts, rows of each client, secret random numbers."""

import abc
import functools
import math
import os
import threading
from typing import Any, ClassVar

import torch

BLOCK = 16  # bytes of AES
ZEROS = bytes(1 << 18)  # what is encrypted, at once


class SecretStream:
    """Random numbers that no seed determines: AES-256 in counter mode, keyed once by the operating system.

    They are never saved and never printed. A forked process has a key of its own, and so has a copy.
    """

    def __init__(self) -> None:
        self._process, self._lock = 0, threading.Lock()
        self._encryptor: Any = None

    def __reduce__(self) -> Any:
        return SecretStream, ()

    def bits(self, num: int) -> torch.Tensor:
        """[num] int64, each of the 2^64 values as likely as any other."""
        if not num:
            return torch.empty(0, dtype=torch.int64)
        size, found = 8 * num, torch.empty(num + BLOCK // 8, dtype=torch.int64)  # the library wants a block more
        memory = memoryview(found.view(torch.uint8).numpy())
        with self._lock:
            if self._process != os.getpid():
                self._process, self._encryptor = os.getpid(), _new_encryptor()
            for begin in range(0, size, len(ZEROS)):
                zeros = ZEROS[: size - begin]
                self._encryptor.update_into(zeros, memory[begin : begin + len(zeros) + BLOCK])
        return found[:num]

    def uniform(self, num: int) -> torch.Tensor:
        """[num] float64 in [0, 1), multiples of 2^-53."""
        return ((self.bits(num) >> 11) & ((1 << 53) - 1)).double() * 2.0**-53

    def normal(self, num: int) -> torch.Tensor:
        """[num] float64 of the standard normal distribution (by Box and Muller).

        It is not for differential privacy: the gaps between floating-point numbers can tell what noise was added to.
        """
        radius = (-2 * torch.log1p(-self.uniform(num))).sqrt_()
        return radius.mul_(torch.cos(2 * math.pi * self.uniform(num)))


def _new_encryptor() -> Any:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes  # takes a while to load

    return Cipher(algorithms.AES(os.urandom(32)), modes.CTR(os.urandom(BLOCK))).encryptor()


class Part(abc.ABC):  # noqa: B024  its subclasses have abstract methods
    """What aggregations, stages, codecs and kinds of oracles have in common.

    Attributes:
        kept_rows: names of the sets of rows that it keeps for each client, which are part of checkpoints.
        kept_of: number of a client of this rank -> name in `kept_rows` -> {name of a row -> vector}, zeros at first.
            The float buffers are one more row, "float buffers".
        secret: a `SecretStream`, for noise and keys.
    """

    kept_rows: ClassVar[tuple[str, ...]] = ()

    @functools.cached_property
    def kept_of(self) -> dict[int, dict[str, dict[str, torch.Tensor]]]:
        return {}

    @functools.cached_property
    def secret(self) -> "SecretStream":
        return SecretStream()

    def state(self) -> dict[str, Any]:
        """What goes on after a checkpoint, the same on every rank: name -> value.

        Values are tensors, numpy arrays, numbers, texts, None, and lists, tuples, sets and dicts of them.
        """
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027  most have no state
        """Take what `state` gave, after `open`; its tensors are the part's own."""

    def client_state(self, client: int) -> dict[str, Any]:
        """The same for one client of this rank, which may be on another rank when the run goes on."""
        return {}

    def restore_client(self, client: int, state: dict[str, Any]) -> None:  # noqa: B027
        """Take what `client_state` gave; {} for a client whose state is lost."""

    def facts(self) -> dict[str, float]:
        """What the user should know, name -> number, for the records and the closing table (epsilon, ...)."""
        return {}
