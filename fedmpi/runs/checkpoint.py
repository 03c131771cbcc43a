"""The checkpoints in a run folder: their files and manifests, finding and removing them.

    checkpoints/000120/manifest.json    settings, versions, round, and every file's size and checksum
    checkpoints/000120/server.h5        the state that all ranks share
    checkpoints/000120/client-0003.h5   the own state of one client, written by the rank that holds it

The manifest is written last and gets its name in one step: with it a checkpoint is complete.
"""

import contextlib
import datetime
import errno
import json
import os
import pathlib
import platform
import re
import zlib

import h5py
import numpy as np
import torch

import fedmpi
from fedmpi.own_files import check_regular, make_folder, read_mark, remove, write_mark
from fedmpi.run_files import CHECKPOINTS, MANIFEST, SERVER_STATE
from fedmpi.runs.state_file import Damaged

FORMAT = 1  # of the manifest and the files
FILES = re.compile(
    rf"{re.escape(MANIFEST)}(\.part)?|{re.escape(SERVER_STATE)}|client-[0-9]{{4,}}\.h5"
)  # of a checkpoint
# Keys of a manifest -> type of the value.
REQUIRED = {
    "format": int,
    "versions": dict,
    "round": int,
    "clients": int,
    "layout": list,
    "records": int,
    "files": dict,
}
REQUIRED |= {"settings": dict}


def checkpoint_folder(run_folder, round_index):
    """The folder of the checkpoint after `round_index` rounds."""
    return pathlib.Path(run_folder) / CHECKPOINTS / f"{round_index:06d}"


def client_file(client):
    """The name of a client's file."""
    return f"client-{client:04d}.h5"


def client_folder(pattern, run_folder, round_index, client, rank, run_name=""):
    """The folder of a client's file.

    Args:
        pattern: a path that may contain {client} and {rank}, or None for the run folder.
        run_name: see `unique_name`: several runs may share such a folder; "" in runs of earlier versions.
    """
    if pattern is None:
        return checkpoint_folder(run_folder, round_index)
    folder = str(pattern).replace("{client}", str(client)).replace("{rank}", str(rank))
    return pathlib.Path(folder) / run_name / f"{round_index:06d}"


def unique_name(run_folder, identity):
    """A name that only this run has, also among copies of its folder."""
    return f"{pathlib.Path(run_folder).absolute().name}-{identity[:12]}"


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
    check_regular(part, is_changed=True)
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
    except (ValueError, RecursionError):
        is_signed = False
    if not is_signed:
        raise Damaged(f"{path}: its bytes are not those that were written")
    wrong = [key for key, kind in REQUIRED.items() if type(content.get(key)) is not kind]
    wrong += [] if wrong or all(_are_numbers(sizes) for sizes in content["files"].values()) else ["files"]
    wrong += [] if _are_rounds(content.get("lost", {})) else ["lost"]
    if wrong:
        raise Damaged(f"{path}: {', '.join(wrong)} is missing, or not what is written there")
    if content["format"] != FORMAT:
        raise Damaged(f"{path}: is of format {content['format']}, and this fedmpi reads {FORMAT}")
    return content


def _are_numbers(sizes):
    return isinstance(sizes, list) and [*map(type, sizes)] == [int, int]


def _are_rounds(lost):
    """Whether a value is a dict from clients' numbers to rounds or None."""
    return isinstance(lost, dict) and all(c.isdecimal() and type(r) in (int, type(None)) for c, r in lost.items())


def _signed(content):
    """A manifest as bytes that end in their own checksum."""
    checksum = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    return (json.dumps({**content, "crc32": f"{checksum:08x}"}, indent=1, sort_keys=True) + "\n").encode()


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
            ours = [name for name in os.listdir(folder) if FILES.fullmatch(name) and (number, name) not in names]
            # The manifest before the files that it lists: the checkpoint is incomplete from now on.
            remove(folder, sorted(ours, key=lambda name: name != MANIFEST), with_folder=True)


def remove_client_file(folder, client):
    """Remove a client's file, and its folder if nothing else is in it."""
    with contextlib.suppress(OSError):
        remove(folder, [client_file(client)], with_folder=True)


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


def make_checkpoint_folder(folder, identity):
    """Make the folder of a checkpoint, which several ranks may do at once; flush the names to the disk.

    Args:
        identity: of the run, which is in the folder's mark.

    Raises:
        OSError: if something else is there, or it cannot be made.
    """
    make_folders(folder.parent)
    if folder.parent.is_symlink():
        raise OSError(errno.ELOOP, "is a symbolic link", str(folder.parent))
    with contextlib.suppress(FileExistsError):
        make_folder(folder, "checkpoint", identity)
        sync_folder(folder.parent)
    if read_mark(folder, "checkpoint").get("identity") != identity:
        raise OSError(errno.EEXIST, "exists, and is not a checkpoint of this run", str(folder))


def adopt(run_folder, identity):
    """Mark a run folder, and the checkpoints in it, that a version of fedmpi without marks made.

    Raises:
        OSError: if a mark cannot be written.
    """
    write_mark(run_folder, "run", identity, checkpoints=True)
    for folder in (run_folder / CHECKPOINTS).iterdir():
        if folder.name.isdecimal() and folder.is_dir() and all(map(FILES.fullmatch, os.listdir(folder))):
            write_mark(folder, "checkpoint", identity)
