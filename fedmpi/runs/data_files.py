"""Which data a run was trained on: a salted checksum of each data file, in the run folder.

The run folder lies with rank 0, and a silo's file with another rank. What leaves that rank is the SHA-256 of a salt and
the file's SHA-256: it says whether a file is still the same, and is another one in every run folder.
"""

import contextlib
import hmac
import json
import os
import pathlib
import secrets

from fedmpi.data.checksum import checksum
from fedmpi.errors import UserError
from fedmpi.run_files import DATA_FILES


def file_digest(path):
    """The SHA-256 of a data file; computed again only if its size or time of change differ.

    Raises:
        UserError: if the file cannot be read.
    """
    path = pathlib.Path(path)
    try:
        status = path.stat()
        key = f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}"
        known = _read_cache()
        digest = known.get(key)
        if digest is None:
            digest = checksum(path)
            _write_cache({**known, key: digest})
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return digest


def salted(digest, salt):
    """What may be known of a file with this digest: another text with another salt."""
    return hmac.new(salt.encode(), digest.encode(), "sha256").hexdigest()


def read_data_files(folder):
    """(salt, salted digests of the data files) as `write_data_files` wrote them; (a new salt, []) if it did not."""
    try:
        found = json.loads((folder / DATA_FILES).read_text(encoding="utf-8"))
        if isinstance(found, list):  # of an earlier version, which wrote {"path", "bytes", "sha256"} of each file
            salt = secrets.token_hex(16)
            return salt, [salted(file["sha256"], salt) for file in found]
        return str(found["salt"]), [str(digest) for digest in found["files"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return secrets.token_hex(16), []


def write_data_files(folder, salt, digests):
    """Write the salted digest of each of a run's data files, and the salt, into its folder.

    Raises:
        UserError: if it cannot be written.
    """
    path = folder / DATA_FILES
    try:
        path.write_text(json.dumps({"salt": salt, "files": digests}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def difference(before, now):
    """How the data files of two runs differ, as text; "" if their contents are the same in the same order.

    `before`, `now`: digests with the same salt; `before` is [] if it is not known.
    """
    if not before or before == now:
        return ""
    if len(before) != len(now):
        return f"{len(now)} data files instead of {len(before)}"
    number = next(number for number, pair in enumerate(zip(before, now), 1) if pair[0] != pair[1])
    where = f" number {number} of {len(now)}, in the order of the clients," if len(now) > 1 else ""
    return f"the data file{where} has another content"


def _cache():
    """Path of the file with the checksums computed so far: "path|size|time of change" -> SHA-256."""
    folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return folder / "fedmpi" / "checksums.json"


def _read_cache():
    try:
        found = json.loads(_cache().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):
        return {}
    return {key: text for key, text in found.items() if isinstance(text, str)} if isinstance(found, dict) else {}


def _write_cache(known):
    """Best effort: several programs may write it, and the home may be read-only."""
    with contextlib.suppress(OSError, RuntimeError):
        path = _cache()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(json.dumps(dict(list(known.items())[-1000:])), encoding="utf-8")
        part.replace(path)
