"""Which files are fedmpi's own: nothing else is removed, renamed or overwritten, and these only by this module.

A folder that fedmpi makes bears a mark, a file whose content says what the folder is. Files are removed by their names,
which the caller lists, from a folder with such a mark; a file that a user names (``--out``) is replaced if its first
bytes say that fedmpi wrote it. Symbolic links are never followed to what is removed, renamed or replaced.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fedmpi.ground.errors import UserError

MARK = ".fedmpi"
LOCK, OWNER = ".lock", b'{"host": '  # of a run folder, see `fedmpi.runs.lock`; how what is in it begins
# Names of what is written before it gets its own: a folder, a mark, a file.
UNNAMED, PART = re.compile(r"\.[0-9a-f]{16}\.new"), re.compile(rf"{re.escape(MARK)}\.[0-9a-f]{{8}}")
UNFINISHED = re.compile(r"\.[0-9a-f]{16}(\.\w+)?")
LONGEST_MARK, LONGEST_END = 4096, 1 << 16  # bytes: of a mark, and read from both ends of a file that a user names
KINDS = {
    "run": "a run folder",
    "checkpoint": "a checkpoint",
    "sweep": "a sweep's folder",
    "report": "a report's folder",
}


def make_folder(
    path: pathlib.Path, kind: str, identity: str | None = None, prepare: Callable[[pathlib.Path], object] | None = None
) -> str:
    """Make a folder with a mark, in one step: no other process ever sees it without its mark.

    An empty folder of that name is taken; it stays the same folder, for those who work in it.

    Args:
        path: a `pathlib.Path`; the folder above it exists. kind: a key of `KINDS`.
        identity: for the mark; default: a new one, of 32 hexadecimal digits.
        prepare: called with the folder, before it has its mark and its name.

    Returns:
        the identity.

    Raises:
        FileExistsError: if something else of that name exists. OSError: if it cannot be made.
    """
    if _is_empty_folder(path):
        if prepare is not None:
            prepare(path)  # first, as below: a run's lock
        return write_mark(path, kind, identity, is_first=True)
    _remove_unnamed(path.parent)
    unnamed, held = _make_unnamed(path)
    try:
        identity = write_mark(unnamed, kind, identity)
        if prepare is not None:
            prepare(unnamed)
        if os.path.lexists(path):
            raise FileExistsError
        unnamed.rename(path)  # fails if `path` is a file, or a folder with something in it
    except BaseException as error:
        for inner in unnamed.iterdir():
            inner.unlink()
        unnamed.rmdir()
        if isinstance(error, OSError) and os.path.lexists(path):
            raise FileExistsError(17, "exists already", str(path)) from None
        raise
    finally:
        os.close(held)
    return identity


def _make_unnamed(path: pathlib.Path) -> tuple[pathlib.Path, int]:
    """(a new folder beside a path, a descriptor that holds it): no other process takes it for a leftover until then."""
    while True:
        unnamed = path.with_name(f".{secrets.token_hex(8)}.new")
        unnamed.mkdir()
        with contextlib.suppress(FileNotFoundError):  # taken for one before it was held
            held = os.open(unnamed, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # a file system without locks, where nothing is taken for a leftover
                fcntl.flock(held, fcntl.LOCK_EX)
            if unnamed.exists():
                return unnamed, held
            os.close(held)


def _remove_unnamed(parent: pathlib.Path) -> None:
    """Remove what `make_folder` has left in a folder when its process was killed."""
    names = []
    with contextlib.suppress(OSError):  # a folder that may be changed but not listed
        names = os.listdir(parent)
    for name in filter(UNNAMED.fullmatch, names):
        with contextlib.suppress(OSError):  # another process is at it, or may be: this file system has no locks
            held = os.open(parent / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.lstat(parent / name)  # it may have got its own name before it was held here
                inner = os.listdir(held)
                is_ours = not inner or any(mark == MARK or PART.fullmatch(mark) for mark in inner)
                if is_ours and all(mark in (MARK, LOCK) or PART.fullmatch(mark) for mark in inner):
                    for mark in inner:
                        os.unlink(mark, dir_fd=held)
                    os.rmdir(parent / name)
            finally:
                os.close(held)


def remove_parts(folder: pathlib.Path) -> None:
    """Remove what a process has left in a folder with a mark when it was killed while it wrote a file; not others'.

    The caller knows that no other process writes there.
    """
    remove(folder, [name for name in os.listdir(folder) if PART.fullmatch(name) or UNFINISHED.fullmatch(name)])


def _is_empty_folder(path: pathlib.Path) -> bool:
    """Whether a path is a folder, no link, with nothing in it but marks that are being written, and a run's lock."""
    if not path.is_dir() or path.is_symlink():
        return False
    others = [name for name in os.listdir(path) if not name.startswith(f"{MARK}.")]
    return not others or (others == [LOCK] and check_regular(path / LOCK) and _is_written(path / LOCK, OWNER))


def write_mark(
    folder: pathlib.Path, kind: str, identity: str | None = None, is_first: bool = False, **facts: object
) -> str:
    """Write the mark of a folder that this process has made, or that it has found to be fedmpi's; returns the identity.

    Raises:
        FileExistsError: if `is_first`, and there is a mark, or another process writes it; or if something else has the
            mark's name. OSError: if it cannot be written.
    """
    if os.path.lexists(folder / MARK) and not read_mark(folder.resolve()):
        raise FileExistsError(17, "exists, and fedmpi did not write it", str(folder / MARK))
    content = {"fedmpi": kind, "identity": identity or secrets.token_hex(16), **facts}
    part = folder / f"{MARK}.{secrets.token_hex(4)}"
    with open(part, "x", encoding="utf-8") as file:
        file.write(json.dumps(content) + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        if is_first:
            os.link(part, folder / MARK)  # fails if there is one
        else:
            part.replace(folder / MARK)
    except FileExistsError:
        raise FileExistsError(17, "exists already", str(folder)) from None
    except OSError:
        if not is_first:
            raise
        part.replace(folder / MARK)  # a file system without links
    finally:
        part.unlink(missing_ok=True)
    return str(content["identity"])


def read_mark(folder: pathlib.Path, kind: str | None = None) -> dict[str, Any]:
    """The content of a folder's mark, a dict; {} if it has none, is another kind of folder, or is a symbolic link."""
    path = folder / MARK
    try:
        if folder.is_symlink() or not stat.S_ISREG(os.lstat(path).st_mode):
            return {}
        with open(path, "rb") as file:
            content = json.loads(file.read(LONGEST_MARK))
    except (OSError, ValueError, RecursionError):
        return {}
    is_mark = (
        isinstance(content, dict) and isinstance(content.get("identity"), str) and str(content.get("fedmpi")) in KINDS
    )
    return content if is_mark and kind in (None, content["fedmpi"]) else {}


def check_folder(path: pathlib.Path, kind: str) -> bool:
    """Check that a folder is missing, empty, or one that fedmpi made; whether it is the latter.

    Raises:
        UserError: if it is anything else, or cannot be read.
    """
    if not os.path.lexists(path):
        return False
    if read_mark(path, kind):
        return True
    try:
        if path.is_symlink():
            problem = "is a symbolic link"
        elif not path.is_dir():
            problem = "is a file"
        elif not _is_empty_folder(path):
            problem = "is not empty, and fedmpi did not make it"
        else:
            return False
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    raise UserError(
        f"{path}: {problem}: expected {KINDS[kind]}, an empty folder, or a name that is free; nothing changed"
    )


def set_aside(path: pathlib.Path) -> pathlib.Path:
    """Rename a folder with a mark, or a file in one, to a name that is free: NAME.old-1, NAME.old-2, ...; return it.

    Raises:
        UserError: if it is not fedmpi's. OSError: if it cannot be renamed.
    """
    if path.is_symlink() or not (read_mark(path) or (path.is_file() and read_mark(path.parent))):
        raise UserError(f"{path}: fedmpi did not make it: move it, or choose another name; nothing changed")
    number = 1
    while True:
        aside = path.with_name(f"{path.name}.old-{number}")
        try:
            if path.is_dir():
                aside.mkdir()  # reserves the name; a folder may be renamed to an empty one
            else:
                open(aside, "x").close()
            path.replace(aside)
            return aside
        except FileExistsError:
            number += 1
        except OSError:
            if path.is_dir():
                aside.rmdir()
            else:
                aside.unlink()
            raise


def remove(folder: pathlib.Path, names: Iterable[str], with_folder: bool = False) -> None:
    """Remove files from a folder with a mark; those that are missing, links, or no files are left.

    `with_folder`: whether the folder is removed, too, if nothing else is in it.

    Raises:
        OSError: if one cannot be removed.
    """
    if folder.parent.is_symlink() or not read_mark(folder):
        return
    for name in (name for name in names if os.path.basename(name) == name):
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISREG(os.lstat(folder / name).st_mode):
                os.unlink(folder / name)
    if with_folder and os.listdir(folder) == [MARK]:
        os.unlink(folder / MARK)
        os.rmdir(folder)


def check_regular(path: pathlib.Path, is_changed: bool = False) -> bool:
    """Check that a file of a run folder is a file itself: a link could show any file, and a FIFO or device never ends.

    Args:
        is_changed: whether it is going to be changed where it is: then it may have no second name, a hard link.

    Returns:
        whether it exists.

    Raises:
        UserError: if it is something else, or cannot be looked at.
    """
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path}: is a link, a folder, a FIFO or a device: expected the file itself")
    if is_changed and found.st_nlink > 1:
        raise UserError(f"{path}: has a second name (a hard link), which would change with it: expected a copy")
    return True


def check_replaceable(path: pathlib.Path, signature: bytes) -> None:
    """Check that a file which a user names is missing or empty, or that fedmpi wrote it.

    Args:
        path: a `pathlib.Path`.
        signature: bytes that are among the first or last of such files when fedmpi writes them.

    Raises:
        UserError: if it is something else; see also `is_stream`.
    """
    try:
        if is_stream(path):
            return
        mode = os.lstat(path).st_mode
        if stat.S_ISREG(mode) and (not path.stat().st_size or _is_written(path, signature)):
            return
        problem = "is a folder" if stat.S_ISDIR(mode) else "exists, and fedmpi did not write it"
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    raise UserError(f"{path}: {problem}: choose another name, or move it; nothing changed")


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a pipe or device that the system names, like /dev/stdout: what is written there replaces
    nothing. One that lies elsewhere may wait for a reader forever."""
    with contextlib.suppress(OSError, ValueError):
        mode = os.stat(path).st_mode
        return str(path).startswith(("/dev/", "/proc/")) and (stat.S_ISCHR(mode) or stat.S_ISFIFO(mode))
    return False


def _is_written(path: pathlib.Path, signature: bytes) -> bool:
    with open(path, "rb") as file:
        begin = file.read(LONGEST_MARK)
        file.seek(-min(LONGEST_END, path.stat().st_size), os.SEEK_END)
        return signature in begin or signature in file.read()


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], signature: bytes | None = None) -> Iterator[pathlib.Path]:
    """A context that gives the path of a file to write, which takes the place of `path` at the end of the context.

    After an error the file is gone, and what was at `path` is still there.

    Args:
        path: a `pathlib.Path` or str. signature: see `check_replaceable`; None: `path` is one of fedmpi's names in a
            folder with its mark, and may be any regular file.

    Raises:
        UserError: before and after, see `check_replaceable` and `check_regular`. OSError: if it cannot be renamed.
    """
    path = pathlib.Path(path)

    def check() -> None:
        if signature is None:
            check_regular(path)
        else:
            check_replaceable(path, signature)

    check()
    if is_stream(path):
        yield path
        return
    part = path.with_name(f".{secrets.token_hex(8)}{path.suffix[-20:]}")  # some writers need the ending
    try:
        yield part
        check()
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def save_figure(figure: Any, path: str | os.PathLike[str], program: str, **options: Any) -> None:
    """Save a figure of matplotlib, in place of what `program` saved there; the ending of the path is the format.

    Raises:
        UserError: see `replacing`. OSError: if it cannot be written. ValueError: if there is no such format.
    """
    path = _figure_path(path)
    key = {".png": "Software", ".svg": "Creator", ".pdf": "Creator", ".eps": "Creator"}.get(path.suffix.lower())
    with replacing(path, program.encode()) as part:
        figure.savefig(part, metadata={key: program} if key else None, **options)


def check_figure(path: str | os.PathLike[str], program: str) -> None:
    """Check that `save_figure` may write a figure: see `check_replaceable`."""
    check_replaceable(_figure_path(path), program.encode())


def _figure_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """The path with an ending: matplotlib adds it if it is missing."""
    path = pathlib.Path(path)
    return path if path.suffix or not path.name else path.with_suffix(".png")
