"""The checkpoints in a run folder: their files and manifests, writing, reading and removing them. Not collective.

    checkpoints/000120/manifest.json            settings, versions, round, and every file's size and checksum
    checkpoints/000120/server.safetensors       the state that all ranks share
    checkpoints/000120/client-0003.safetensors  the own state of one client, written by the rank that holds it

The manifest is written last and gets its name in one step: with it a checkpoint is complete. A state file contains the
tensors of a state under their names, and its numbers as text; those of a type that safetensors lacks are bytes there.
"""

import concurrent.futures
import contextlib
import datetime
import errno
import json
import os
import pathlib
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import safetensors
import torch

from fedmpi.ground.errors import UserError
from fedmpi.ground.files.own_files import check_regular, make_folder, read_mark, remove, replacing
from fedmpi.ground.files.run_files import CHECKPOINTS, MANIFEST
from fedmpi.ground.machine.versions import versions
from fedmpi.ground.text import short
from fedmpi.oracles.flat_module import FlatModule

FORMAT = 1  # of the manifest and the files
# Names of a checkpoint's files; the last is of a manifest that was being written when a process was killed.
FILES = re.compile(r"manifest\.json(\.part)?|(server|client-\d{4,}|rank-\d{4,})\.safetensors|\.[0-9a-f]{16}\.json")
TYPES = {"versions": dict, "round": int, "layout": list, "records": int, "settings": dict}
TYPES |= {"architecture": dict, "run_name": str}
PIECE = 8 << 20  # bytes that are written at once, while their checksum is computed
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
          torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
          torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64"}  # fmt: skip


class Damaged(Exception):
    """A file of a checkpoint that is not as it was written; the text says which and why."""


def checkpoint_folder(run_folder: str | os.PathLike[str], round_index: int) -> pathlib.Path:
    """The folder of the checkpoint after `round_index` rounds."""
    return pathlib.Path(run_folder) / CHECKPOINTS / f"{round_index:06d}"


def client_file(
    pattern: str | None, run_folder: pathlib.Path, round_index: int, client: int, rank: int, run_name: str
) -> pathlib.Path:
    """The path of a client's file.

    Args:
        pattern: a folder's path that may contain {client} and {rank}, or None for the run folder.
        run_name: see `unique_name`: several runs may share such a folder.
    """
    name = f"client-{client:04d}.safetensors"
    if pattern is None:
        return checkpoint_folder(run_folder, round_index) / name
    folder = pathlib.Path(str(pattern).replace("{client}", str(client)).replace("{rank}", str(rank)))
    return folder / run_name / f"{round_index:06d}" / name


def own_place() -> pathlib.Path:
    """A folder of this rank's user, for the clients' files of a run whose rows other users must not see.

    Raises:
        UserError: if the user has no home.
    """
    try:
        folder = pathlib.Path(os.environ.get("XDG_STATE_HOME") or pathlib.Path.home() / ".local" / "state")
    except RuntimeError as error:
        raise UserError(f"checkpoint_clients: expected a folder: {error}") from None
    return folder / "fedmpi" / "checkpoints"


def unique_name(run_folder: pathlib.Path, identity: str) -> str:
    """A name that only this run has, also among copies of its folder."""
    return f"{pathlib.Path(run_folder).absolute().name}-{identity[:12]}"


def describe_layout(flat: FlatModule) -> list[list[Any]]:
    """[name, shape, where it begins, whether channels lie last] of each parameter of a `FlatModule`: its row."""
    begins = [segment.start for segment in flat.segments]
    return [[name, list(shape), *rest] for name, shape, *rest in zip(flat.names, flat.shapes, begins, flat.permuted)]


def write_state(path: pathlib.Path, state: Mapping[str, Any]) -> tuple[int, int]:
    """Write a state and flush it to the disk (fsync), in place of what was written there before.

    In one pass from front to back: the disk's room is reserved first, and the checksum is computed on the way, which
    safetensors' own function for writing does not do.

    Args:
        path: a `pathlib.Path`.
        state: name -> tensor, number, or list of numbers; names are paths like "clients/0/rows/c_i".

    Returns:
        (size in bytes, CRC-32) of the file.

    Raises:
        OSError: if the disk is full (before anything is written, if the file system can reserve room) or fails.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    others = {n: [_name(t.dtype), list(t.shape)] for n, t in tensors.items() if t.dtype not in DTYPES}
    metadata = {"numbers": json.dumps({k: state[k] for k in state if k not in tensors})}
    metadata |= {"bits": json.dumps(others)} if others else {}
    header: dict[str, dict[str, Any]] = {"__metadata__": metadata}
    size = 0
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))  # all are aligned
    for name, tensor in tensors.items():
        place = [size, size := size + tensor.nbytes]
        kind = {"dtype": DTYPES.get(tensor.dtype, "U8"), "shape": list(tensor.shape)}
        header[name] = {**kind, "shape": [tensor.nbytes]} if name in others else kind
        header[name]["data_offsets"] = place
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    size, checksum = 8 + len(text) + size, 0
    remove(path.parent, [path.name])  # what a killed process left, or another name of a file in a backup
    with open(path, "xb", opener=_for_one_user) as file, concurrent.futures.ThreadPoolExecutor(1) as pool:
        _reserve(file.fileno(), size)
        for piece in pieces(len(text).to_bytes(8, "little") + text, tensors.values()):
            computed = pool.submit(zlib.crc32, piece, checksum)
            file.write(piece)
            checksum = computed.result()
        file.flush()
        os.fsync(file.fileno())
    return size, checksum


def _for_one_user(path: str, flags: int) -> int:
    """Open a file that only this user can read: it may contain a silo's rows."""
    return os.open(path, flags, 0o600)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def pieces(header: bytes, tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The bytes of a header and of tensors, at most `PIECE` at a time."""
    yield header
    for tensor in tensors:
        data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
        for begin in range(0, data.size, PIECE):
            yield data[begin : begin + PIECE]


def _reserve(file: int, nbytes: int) -> None:
    """Reserve room on the disk, so that a full one is known before anything is written."""
    try:
        getattr(os, "posix_fallocate", lambda *arguments: None)(file, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot
            raise


def read_state(path: pathlib.Path, nbytes: int, checksum: int) -> dict[str, Any]:
    """Read what `write_state` wrote.

    Args:
        path: a `pathlib.Path`. nbytes, checksum: what `write_state` returned.

    Returns:
        name -> tensor, number or list; tensors are mapped from the file, and read when they are used.

    Raises:
        Damaged: if the file is missing or differs from what was written.
    """
    check_file(path, nbytes, checksum)
    try:
        with safetensors.safe_open(path, "pt") as file:
            numbers = json.loads(file.metadata()["numbers"])
            if not all(isinstance(number, int | float) for value in numbers.values() for number in _as_list(value)):
                raise ValueError("expected numbers besides the tensors")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
            for name, (dtype, shape) in json.loads(file.metadata().get("bits", "{}")).items():
                tensors[name] = tensors[name].clone().view(getattr(torch, dtype)).reshape(shape)
            return {**tensors, **numbers}
    except Exception as error:  # noqa: BLE001  another program can have written anything, and its checksum
        raise Damaged(f"{path}: cannot be read: {short(error)}") from None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def check_file(path: pathlib.Path, nbytes: int, checksum: int) -> None:
    """Check that a file is as it was written.

    Raises:
        Damaged: if it is missing, shorter or longer, or has other bytes.
    """
    try:
        check_regular(path)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != nbytes:
                raise Damaged(f"{path}: has {size:,} bytes, expected {nbytes:,}")
            found = 0
            while piece := file.read(PIECE):
                found = zlib.crc32(piece, found)
    except OSError as error:
        raise Damaged(f"{path}: cannot be read: {error.strerror}") from None
    except UserError as error:
        raise Damaged(str(error)) from None
    if found != checksum:
        raise Damaged(f"{path}: its bytes are not those that were written (checksum {found:08x}, not {checksum:08x})")


def write_manifest(folder: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Complete a checkpoint: write its manifest and flush it to the disk (fsync).

    Args:
        folder: of the checkpoint.
        content: a dict for JSON, to which format, versions and date are added; "server" is (size, checksum) of that
            file, "clients" has for each client (round after which its file was written, size, checksum), or None.

    Raises:
        OSError: if it cannot be written; the checkpoint is not complete then.
    """
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    with replacing(folder / MANIFEST) as part, open(part, "xb") as file:
        file.write(_signed({"format": FORMAT, "written": now, "versions": versions(), **content}))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """What `write_manifest` wrote.

    Raises:
        Damaged: if it differs from what was written, or a newer version of fedmpi wrote it.
    """
    path = folder / MANIFEST
    try:
        check_regular(path)
        text = path.read_bytes()
        content = json.loads(text)
        del content["crc32"]
        is_signed = _signed(content) == text
    except UserError as error:
        raise Damaged(str(error)) from None
    except OSError as error:
        raise Damaged(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        is_signed = False
    if not is_signed:
        raise Damaged(f"{path}: its bytes are not those that were written")
    try:
        if content["format"] > FORMAT:
            raise Damaged(f"{path}: fedmpi {content['versions']['fedmpi']} wrote it; continue with that version")
        clients = [[int(client), *(file or [0] * 3)] for client, file in content["clients"].items()]
        is_right = all(type(content[key]) is kind for key, kind in TYPES.items())
        is_right = is_right and all([*map(type, numbers)] == [int] * 4 for numbers in clients)
        is_right = is_right and [*map(type, content["server"])] == [int] * 2
    except (KeyError, ValueError, TypeError, AttributeError):
        is_right = False
    if not is_right:
        raise Damaged(f"{path}: another program wrote it: values are missing, or of other types")
    return dict(content)


def _signed(content: Mapping[str, Any]) -> bytes:
    """A manifest as bytes that end in their own checksum."""
    checksum = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    return (json.dumps({**content, "crc32": f"{checksum:08x}"}, indent=1, sort_keys=True) + "\n").encode()


def remove_checkpoints(
    run_folder: pathlib.Path, keep: Collection[int], needed: Collection[tuple[int, int]] = ()
) -> None:
    """Remove all checkpoints but those after the rounds in `keep`, and what incomplete ones left.

    `needed`: (client, round) of older files that belong to kept checkpoints: of clients that are lost.
    """
    stems = {(written, f"client-{client:04d}") for client, written in needed}
    with contextlib.suppress(OSError):  # what cannot be removed now is tried again after the next checkpoint
        for folder in (pathlib.Path(run_folder) / CHECKPOINTS).iterdir():
            if not folder.name.isdecimal() or int(folder.name) in keep:
                continue
            number = int(folder.name)
            ours = filter(FILES.fullmatch, os.listdir(folder))
            unneeded = [name for name in ours if (number, name.partition(".")[0]) not in stems]
            # The manifest before the files that it lists: the checkpoint is incomplete from now on.
            remove(folder, sorted(unneeded, key=lambda name: name != MANIFEST), with_folder=True)


def remove_state(path: pathlib.Path) -> None:
    """Remove a state file, and its folder if nothing else is in it."""
    with contextlib.suppress(OSError):
        remove(path.parent, [path.name], with_folder=True)


def sync_folder(folder: pathlib.Path) -> None:
    """Flush the names in a folder to the disk (fsync)."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def make_folders(folder: pathlib.Path) -> None:
    """Make a folder and those above it, and flush their names to the disk."""
    if not folder.is_dir():
        make_folders(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def make_checkpoint_folder(folder: pathlib.Path, identity: str) -> None:
    """Make the folder of a checkpoint, which several ranks may do at once; flush the names to the disk.

    Its mark has the `identity` of the run.

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
