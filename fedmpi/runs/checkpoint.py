"""The checkpoints in a run folder: their files and manifests, finding and removing them.

    checkpoints/000120/manifest.json    settings, versions, round, and every file's size and checksum
    checkpoints/000120/server.h5        the state that all ranks share
    checkpoints/000120/client-0003.h5   the own state of one client, written by the rank that holds it

The manifest is written last and gets its name in one step: with it a checkpoint is complete.
"""

import contextlib
import datetime
import json
import os
import pathlib
import platform
import shutil
import zlib

import h5py
import numpy as np
import torch

import fedmpi
from fedmpi.run_files import CHECKPOINTS, MANIFEST
from fedmpi.runs.state_file import Damaged

FORMAT = 1  # of the manifest and the files
REQUIRED = ("format", "versions", "round", "clients", "layout", "records", "files", "settings")  # keys of a manifest


def checkpoint_folder(run_folder, round_index):
    """The folder of the checkpoint after `round_index` rounds."""
    return pathlib.Path(run_folder) / CHECKPOINTS / f"{round_index:06d}"


def client_file(client):
    """The name of a client's file."""
    return f"client-{client:04d}.h5"


def client_folder(pattern, run_folder, round_index, client, rank):
    """The folder of a client's file.

    Args:
        pattern: a path that may contain {client} and {rank}, or None for the run folder.
    """
    if pattern is None:
        return checkpoint_folder(run_folder, round_index)
    folder = pattern.replace("{client}", str(client)).replace("{rank}", str(rank))
    return pathlib.Path(folder) / f"{round_index:06d}"


def describe_layout(flat):
    """What the elements of a row are: [name, shape, where it begins, whether channels lie last] of each parameter.

    Args:
        flat: a `FlatModule`.
    """
    begins = [segment.start for segment in flat.segments]
    return [[name, list(shape), *rest] for name, shape, *rest in zip(flat.names, flat.shapes, begins, flat.permuted)]


def versions():
    """Name -> version of what a run's bits depend on."""
    found = {"fedmpi": fedmpi.__version__, "python": platform.python_version(), "torch": torch.__version__}
    return found | {"numpy": np.__version__, "h5py": h5py.__version__}


def write_manifest(folder, content):
    """Complete a checkpoint: write its manifest and flush it to the disk (fsync).

    Args:
        folder: of the checkpoint. content: a dict for JSON; format, versions and date are added.

    Raises:
        OSError: if it cannot be written; the checkpoint is not complete then.
    """
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    content = {"format": FORMAT, "written": now, "versions": versions(), **content}
    part = folder / f"{MANIFEST}.part"
    with open(part, "wb") as file:
        file.write(_signed(content))
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, folder / MANIFEST)
    sync_folder(folder)


def read_manifest(folder):
    """What `write_manifest` wrote.

    Raises:
        Damaged: if it differs from what was written, or a newer version of fedmpi wrote it.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
        content = json.loads(text)
        is_signed = isinstance(content, dict) and _signed({k: v for k, v in content.items() if k != "crc32"}) == text
    except OSError as error:
        raise Damaged(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        is_signed = False
    if not is_signed:
        raise Damaged(f"{path}: its bytes are not those that were written")
    if missing := [key for key in REQUIRED if key not in content]:
        raise Damaged(f"{path}: {', '.join(missing)} is missing")
    if content["format"] != FORMAT:
        raise Damaged(f"{path}: is of format {content['format']}, and this fedmpi reads {FORMAT}")
    return content


def _signed(content):
    """A manifest as bytes that end in their own checksum."""
    checksum = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    return (json.dumps({**content, "crc32": f"{checksum:08x}"}, indent=1, sort_keys=True) + "\n").encode()


def find_checkpoints(run_folder):
    """Numbers of rounds after which there is a checkpoint with a manifest, the newest first."""
    folders = (pathlib.Path(run_folder) / CHECKPOINTS).glob(f"*/{MANIFEST}")
    return sorted((int(path.parent.name) for path in folders if path.parent.name.isdecimal()), reverse=True)


def remove_checkpoints(run_folder, keep, needed=()):
    """Remove all checkpoints but those after the rounds in `keep`, and what incomplete ones left.

    Args:
        needed: (client, round) of older files that belong to kept checkpoints: of clients that are lost.
    """
    names = {(written, client_file(client)) for client, written in needed if written is not None}
    with contextlib.suppress(OSError):  # what cannot be removed now is tried again after the next checkpoint
        for folder in (pathlib.Path(run_folder) / CHECKPOINTS).iterdir():
            if not folder.name.isdecimal() or int(folder.name) in keep:
                continue
            number = int(folder.name)
            (folder / MANIFEST).unlink(missing_ok=True)  # before its files: it is incomplete from now on
            if any(written == number for written, _ in names):
                for path in folder.iterdir():
                    if (number, path.name) not in names:
                        path.unlink(missing_ok=True)
            else:
                shutil.rmtree(folder, ignore_errors=True)


def remove_client_file(folder, client):
    """Remove a client's file, and its folder if nothing else is in it."""
    with contextlib.suppress(OSError):
        (folder / client_file(client)).unlink()
        folder.rmdir()


def sync_folder(folder):
    """Flush the names in a folder to the disk (fsync)."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def make_folders(folder):
    """Make a folder and those above it, and flush their names to the disk."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for inner in reversed(missing):
        inner.mkdir(exist_ok=True)
        sync_folder(inner.parent)
