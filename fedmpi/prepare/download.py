"""Download a file: with progress, resumed after an interruption, and checked by its checksum."""

import contextlib
import fcntl
import http.client
import sys
import urllib.error
import urllib.parse
import urllib.request

from tqdm import tqdm

from fedmpi.ground.errors import UserError
from fedmpi.ground.files.checksum import checksum

CHUNK_BYTES = 1 << 20
LOCAL = ("localhost", "127.0.0.1", "::1")  # hosts that need no https
TIMEOUT_SECONDS = 30  # without receiving a byte


def fetch(url, path, sha256):
    """Download a file to `path`, unless it exists; an interrupted download is resumed from path.part.

    Args:
        url: of the file. path: `pathlib.Path` of the file to write. sha256: its checksum, as hexadecimal text.

    Raises:
        UserError: if it cannot be downloaded, or its checksum is wrong.
    """
    if path.is_file():
        return
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("https", "file") and parts.hostname not in LOCAL:
        raise UserError(f"{url}: expected an address with https (or file: for a folder)")
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "ab") as lock:
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(lock, fcntl.LOCK_EX)  # while another process downloads this file
            if path.is_file():
                return
            _download_rest(url, part)
    except (urllib.error.URLError, OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        if part.is_file() and not part.stat().st_size:
            part.unlink()
        raise UserError(
            f"{url}: cannot be downloaded: {' '.join(str(reason).split())}; without a network, copy {path.name} "
            "into a folder and give that folder with --from"
        ) from None
    found = checksum(part)
    if found != sha256:
        part.unlink()
        raise UserError(f"{url}: the download has SHA-256 {found}, expected {sha256}: it was deleted, try again")
    part.replace(path)


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to https only."""

    def redirect_request(self, request, file, code, message, headers, url):
        if not url.startswith("https:"):
            raise urllib.error.URLError(f"it is redirected to {url}: expected an address with https")
        return super().redirect_request(request, file, code, message, headers, url)


def _download_rest(url, part):
    """Append to `part` the bytes of the file at `url` that it lacks."""
    start = part.stat().st_size if part.is_file() else 0
    headers = {"User-Agent": "fedmpi"}  # some servers refuse Python's own
    request = urllib.request.Request(url, headers=headers | ({"Range": f"bytes={start}-"} if start else {}))
    try:
        response = urllib.request.build_opener(_SafeRedirects).open(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing is missing; the checksum decides whether the part is right
        raise
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            start = 0  # the server sends the whole file
        missing = int(response.headers.get("Content-Length") or 0)
        total = start + missing if missing else None
        resumed = f", resumed after {start}" if start else ""
        print(f"{url} ({total or 'unknown number of'} bytes{resumed})", flush=True)
        bar = tqdm(total=total, initial=start, unit="B", unit_scale=True, disable=not sys.stderr.isatty())
        with open(part, "ab" if start else "wb") as file, bar:
            while chunk := response.read(CHUNK_BYTES):
                file.write(chunk)
                bar.update(len(chunk))
    if total is not None and part.stat().st_size != total:
        size = part.stat().st_size
        raise OSError(f"the connection ended after {size} of {total} bytes; run the command again to resume")
