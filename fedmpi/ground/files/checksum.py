"""Checksums of files, those computed before from a cache of the user."""

import contextlib
import hashlib
import hmac
import json
import os
import pathlib
import stat
import time
from collections.abc import Callable

from fedmpi.ground.errors import UserError
from fedmpi.ground.text import Log, format_bytes

log = Log(__name__)

PIECE = 1 << 20  # bytes read at once
QUIET_SECONDS = 2.0  # of reading, after which a line says what takes so long
SETTLED_SECONDS = 2.0  # since a file changed: another change may have the same time of change, a tick of the clock
MOST_CACHED = 1000  # files
_known: dict[str, str] = {}  # those of this process, as in the cache, which may not be writable


def checksum(path: str | os.PathLike[str], on_wait: Callable[[], object] | None = None) -> str:
    """The SHA-256 of a file as hexadecimal text.

    Args:
        on_wait: called once if it takes longer than `QUIET_SECONDS`.

    Raises:
        OSError: if the file cannot be read.
    """
    digest, begin = hashlib.sha256(), time.monotonic()
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
            if on_wait is not None and time.monotonic() - begin > QUIET_SECONDS:
                on_wait()
                on_wait = None
    return digest.hexdigest()


def file_digest(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a data file; computed again if the file was written, moved or replaced since.

    A program can set the time of the last change (mtime) to anything, but not that of the last change of the file's
    entry (ctime), which is compared, too.

    Raises:
        UserError: if it is not a regular file (of a FIFO, reading might never end), or cannot be read.
    """
    path = pathlib.Path(path)
    try:
        status = regular(path)
        key = "|".join(map(str, (path.resolve(), *identity(status))))
        digest = _known.get(key) or _read_cache().get(key)
        if digest is not None:
            return digest
        size = format_bytes(status.st_size)
        digest = checksum(path, lambda: log.warning(f"{path}: reading {size} for a checksum, which is then cached"))
        if identity(path.stat()) != identity(status):
            raise UserError(f"{path}: was changed while it was read: start again when it is complete")
        if time.time() - status.st_ctime > SETTLED_SECONDS:
            _known[key] = digest
            _write_cache({**_read_cache(), key: digest})
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return digest


def regular(path: str | os.PathLike[str]) -> os.stat_result:
    """The `os.stat_result` of a regular file.

    Raises:
        UserError: if it is something else. OSError: if it cannot be looked at.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path}: is a folder, a FIFO or a device: expected a file")
    return status


def identity(status: os.stat_result) -> tuple[int, ...]:
    """What changes in an `os.stat_result` if the file is another one, or was written."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def salted(digest: str, salt: str) -> str:
    """What may be known of a file with this digest: another text with another salt."""
    return hmac.new(salt.encode(), digest.encode(), "sha256").hexdigest()


def _cache() -> pathlib.Path:
    """Path of the file with the checksums computed so far: "path|`identity`" -> SHA-256."""
    folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return folder / "fedmpi" / "checksums.json"


def _read_cache() -> dict[str, str]:
    try:
        found = json.loads(_cache().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError, RecursionError):
        return {}
    return {key: text for key, text in found.items() if isinstance(text, str)} if isinstance(found, dict) else {}


def _write_cache(known: dict[str, str]) -> None:
    """Best effort: several programs may write it, and the home may be read-only. Only its user can read it."""
    with contextlib.suppress(OSError, RuntimeError):
        path = _cache()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.touch(0o600)
        part.write_text(json.dumps(dict(list(known.items())[-MOST_CACHED:])), encoding="utf-8")
        part.replace(path)
