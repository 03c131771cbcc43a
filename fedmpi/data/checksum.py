"""Checksums of files."""

import hashlib

PIECE = 1 << 20  # bytes read at once


def checksum(path, kind):
    """The checksum of a file as hexadecimal text; kind is "md5" or "sha256".

    Raises:
        OSError: if the file cannot be read.
    """
    digest = hashlib.new(kind, usedforsecurity=False)
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()
