"""Downloads that show their progress, go on where they stopped, and are checked."""

import hashlib
import http.client
import pathlib
import sys
import urllib.error
import urllib.request

from tqdm import tqdm

from fedmpi.errors import UserError

PIECE = 1 << 20  # bytes
PATIENCE_SECONDS = 30  # without a byte


def fetch(url, path, md5):
    """Download a file to `path`, unless it is there; what an earlier attempt left in path.part is kept.

    Args:
        url: where it is. path: where it goes, a `pathlib.Path`. md5: its checksum, as hexadecimal text.

    Raises:
        UserError: if it cannot be had or is not what it should be, with what to do.
    """
    if path.is_file():
        return
    part = path.with_name(path.name + ".part")
    try:
        _go_on(url, part)
    except (urllib.error.URLError, OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(
            f"{url}: cannot be downloaded: {' '.join(str(reason).split())}; without network, get {path.name} "
            "elsewhere and name its folder with --from"
        ) from None
    found = checksum(part, "md5")
    if found != md5:
        part.unlink()
        raise UserError(f"{url}: the MD5 of what came is {found}, expected {md5}: deleted, try again")
    part.replace(path)


def _go_on(url, part):
    """Append to `part` what is missing of the file at `url`."""
    have = part.stat().st_size if part.is_file() else 0
    headers = {"User-Agent": "fedmpi"}  # some servers refuse Python's own
    request = urllib.request.Request(url, headers=headers | ({"Range": f"bytes={have}-"} if have else {}))
    try:
        answer = urllib.request.urlopen(request, timeout=PATIENCE_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing is missing; the checksum tells whether what is there is right
        raise
    with answer:
        if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
            have = 0  # the server begins at the beginning
        missing = int(answer.headers.get("Content-Length") or 0)
        total = have + missing if missing else None
        print(f"{url} ({total or 'unknown number of'} bytes{f', {have} of them here' if have else ''})", flush=True)
        bar = tqdm(total=total, initial=have, unit="B", unit_scale=True, disable=not sys.stderr.isatty())
        with open(part, "ab" if have else "wb") as file, bar:
            while piece := answer.read(PIECE):
                file.write(piece)
                bar.update(len(piece))
    if total is not None and part.stat().st_size != total:
        raise OSError(f"the connection ended after {part.stat().st_size} of {total} bytes; run it again to go on")


def checksum(path, kind):
    """The checksum of a file as hexadecimal text; kind is "md5" or "sha256"."""
    digest = hashlib.new(kind, usedforsecurity=False)
    with open(pathlib.Path(path), "rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()
