"""What a file of the user's may be, and how much it may unpack to: a few bytes can stand for more than all memory."""

import contextlib
import contextvars
import io
import math
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO

from fedmpi.ground.errors import UserError
from fedmpi.ground.text import format_bytes, short

LEAST, TIMES = 1 << 30, 100  # what every file may unpack to: so many bytes, and so many times its own
VARIABLE = "FEDMPI_MAX_UNPACKED"  # GiB that any file may unpack to, for all programs
PIECE, BLOCK = 1 << 20, 512  # bytes read together; of the unit in which st_blocks counts
_given: contextvars.ContextVar[float | None] = contextvars.ContextVar("max_unpacked", default=None)


@contextlib.contextmanager
def unpacking(gib: float | None) -> Iterator[None]:
    """A context in which files may unpack to so many GiB, whatever their sizes; None: as without it.

    Raises:
        UserError: if it is not a number > 0.
    """
    if gib is not None and not 0 < gib < math.inf:
        raise UserError(f"--max-unpacked {gib}: expected a number of GiB > 0")
    before = _given.set(_given.get() if gib is None else gib)
    try:
        yield
    finally:
        _given.reset(before)


def most_unpacked(packed: int, times: int = TIMES) -> int:
    """Bytes that a file of `packed` bytes may unpack to.

    Raises:
        UserError: if the variable FEDMPI_MAX_UNPACKED is not a number > 0.
    """
    gib = _given.get()
    if gib is None and VARIABLE in os.environ:
        try:
            gib = float(os.environ[VARIABLE])
        except ValueError:
            gib = math.nan
        if not 0 < gib < math.inf:
            raise UserError(f"{VARIABLE}={short(os.environ[VARIABLE], 50)}: expected a number of GiB > 0")
    return max(LEAST, times * packed) if gib is None else int(gib * 2**30)


def check_unpacked(path: object, unpacked: int, packed: int, times: int = TIMES) -> None:
    """Check how many bytes a file, or a part of one, makes in memory, before it does.

    Raises:
        UserError: if they are too many for one of `packed` bytes.
    """
    if unpacked > (most := most_unpacked(packed, times)):
        raise UserError(
            f"{path}: unpacks to {format_bytes(unpacked)} from {format_bytes(packed)}: expected at most "
            f"{format_bytes(most)}; if that is right, data prepare --max-unpacked GIB or {VARIABLE}=GIB allows more"
        )


class Limited(io.RawIOBase):
    """An open file that unpacks what it reads, and raises `UserError` as soon as that is too much.

    Args:
        file: the open file, in binary. path: of the file, for messages. packed: its size in bytes.
    """

    def __init__(self, file: BinaryIO, path: object, packed: int) -> None:
        self._file, self._path, self._packed, self._most = file, path, packed, most_unpacked(packed)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        self._most -= len(content)
        if self._most < 0:
            most = most_unpacked(self._packed)
            check_unpacked(self._path, most + 1, self._packed)
        return len(content)

    def close(self) -> None:
        self._file.close()
        super().close()


def unpacked(file: BinaryIO, path: object, packed: int) -> bytes:
    """The content of an open file that unpacks what it reads; see `Limited`."""
    with Limited(file, path, packed) as limited:
        return b"".join(iter(lambda: limited.read(PIECE), b""))


def check_members(path: pathlib.Path) -> None:
    """Check that what is in a zip file, as those of numpy and Excel are, unpacks to an allowed size.

    Raises:
        UserError: if it is too large. OSError, zipfile.BadZipFile: if it cannot be read.
    """
    import zipfile

    with zipfile.ZipFile(path) as archive:  # it reads no more of a member than what it declares here
        check_unpacked(path, sum(member.file_size for member in archive.infolist()), path.stat().st_size)


def check_file(path: str | os.PathLike[str], given: str = "") -> None:
    """Check that a path is a regular file, or leads to one: reading a FIFO or a device might never end.

    Raises:
        UserError: if it is something else, or missing; the message begins with `given` and the path.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or short(error)
        raise UserError(f"{given}{path}: cannot be read: {reason}") from None
    if not stat.S_ISREG(found.st_mode):
        kind = "is a folder" if stat.S_ISDIR(found.st_mode) else "is a FIFO, a socket or a device"
        raise UserError(f"{given}{path}: {kind}: expected a regular file")
    if found.st_size > LEAST:  # a file may have holes, which are read as zeros
        check_unpacked(f"{given}{path}", found.st_size, found.st_blocks * BLOCK)
