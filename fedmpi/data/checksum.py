"""Checksums of files."""

import hashlib

PIECE = 1 << 20  # bytes read at once


def checksum(path):
    """The SHA-256 of a file as hexadecimal text.

    Raises:
        OSError: if the file cannot be read.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()
