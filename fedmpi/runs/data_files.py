"""Which data a run was trained on: size and checksum of each data file, in the run folder."""

import contextlib
import json
import os
import pathlib

from fedmpi.data.checksum import checksum
from fedmpi.errors import UserError
from fedmpi.run_files import DATA_FILES


def describe_file(path):
    """{"path", "bytes", "sha256"} of a data file; the checksum is computed again only if size or time of change differ.

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
    return {"path": str(path), "bytes": status.st_size, "sha256": digest}


def read_data_files(folder):
    """What `write_data_files` wrote into a run folder; [] if there is nothing that can be read."""
    try:
        found = json.loads((folder / DATA_FILES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    keys = {"path", "bytes", "sha256"}
    is_list = isinstance(found, list) and all(isinstance(one, dict) and keys <= one.keys() for one in found)
    return found if is_list else []


def write_data_files(folder, files):
    """Write what `describe_file` gave for each of a run's data files into its folder.

    Raises:
        UserError: if it cannot be written.
    """
    path = folder / DATA_FILES
    try:
        path.write_text(json.dumps(files, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def difference(before, now):
    """How the data files of two runs differ, as text; "" if their contents are the same in the same order."""
    if not before or [one["sha256"] for one in before] == [one["sha256"] for one in now]:
        return ""
    if len(before) != len(now):
        return f"{len(now)} data files instead of {len(before)}"
    old, new = next(pair for pair in zip(before, now) if pair[0]["sha256"] != pair[1]["sha256"])
    size = f"{new['bytes']:,} bytes, sha256 {new['sha256'][:12]}"
    return f"the content of {new['path']} ({size}) is not that of {old['path']}"


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
