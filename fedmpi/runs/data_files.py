"""Which data a run was trained on: a salted checksum of each data file, in the run folder.

The run folder lies with rank 0, and a silo's file with another rank. What leaves that rank is the SHA-256 of a salt and
the file's SHA-256: it says whether a file is still the same, and is another one in every run folder.
"""

import json
import pathlib
import secrets
from collections.abc import Sequence

from fedmpi.ground.errors import UserError
from fedmpi.ground.files.run_files import DATA_FILES


def read_data_files(folder: pathlib.Path) -> tuple[str, list[str]]:
    """(salt, salted digests of the data files) as `write_data_files` wrote them; (a new salt, []) if it did not."""
    try:
        found = json.loads((folder / DATA_FILES).read_text(encoding="utf-8"))
        return str(found["salt"]), [str(digest) for digest in found["files"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return secrets.token_hex(16), []


def write_data_files(folder: pathlib.Path, salt: str, digests: Sequence[str]) -> None:
    """Write the salted digest of each of a run's data files, and the salt, into its folder.

    Raises:
        UserError: if it cannot be written.
    """
    path = folder / DATA_FILES
    try:
        path.write_text(json.dumps({"salt": salt, "files": digests}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def difference(before: Sequence[str], now: Sequence[str]) -> str:
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
