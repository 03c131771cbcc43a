"""Which files are fedmpi's own: nothing else is removed, renamed or overwritten, and these only by this module.

A folder that fedmpi makes bears a mark, a file whose content says what the folder is. Files are removed by their names,
which the caller lists, from a folder with such a mark; a file that a user names (``--out``) is replaced if its first
bytes say that fedmpi wrote it. Symbolic links are never followed to what is removed, renamed or replaced.
"""

import contextlib
import json
import os
import pathlib
import secrets
import stat

from fedmpi.errors import UserError

MARK = ".fedmpi"
LONGEST_MARK = 4096  # bytes; so many first bytes of a file that a user names are read, too
KINDS = {
    "run": "a run folder",
    "checkpoint": "a checkpoint",
    "sweep": "a sweep's folder",
    "report": "a report's folder",
}


def make_folder(path, kind, identity=None, prepare=None):
    """Make a folder with a mark, in one step: no other process ever sees it without its mark.

    An empty folder of that name is taken.

    Args:
        path: a `pathlib.Path`; the folder above it exists. kind: a key of `KINDS`.
        identity: for the mark; default: a new one, of 32 hexadecimal digits.
        prepare: called with the folder before it has its name.

    Returns:
        the identity.

    Raises:
        FileExistsError: if something else of that name exists. OSError: if it cannot be made.
    """
    unnamed = path.with_name(f".{secrets.token_hex(8)}.new")
    unnamed.mkdir()
    try:
        identity = write_mark(unnamed, kind, identity)
        if prepare is not None:
            prepare(unnamed)
        if path.is_symlink():
            raise NotADirectoryError
        unnamed.rename(path)  # fails if `path` is a file, or a folder with something in it
    except BaseException as error:
        for inner in unnamed.iterdir():
            inner.unlink()
        unnamed.rmdir()
        if isinstance(error, OSError) and os.path.lexists(path):
            raise FileExistsError(17, "exists already", str(path)) from None
        raise
    return identity


def write_mark(folder, kind, identity=None, **facts):
    """Write the mark of a folder that this process has made, or that it has found to be fedmpi's; returns the identity.

    Raises:
        OSError: if it cannot be written.
    """
    content = {"fedmpi": kind, "identity": identity or secrets.token_hex(16), **facts}
    part = folder / f"{MARK}.{secrets.token_hex(4)}"
    with open(part, "x", encoding="utf-8") as file:
        file.write(json.dumps(content) + "\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(folder / MARK)
    return content["identity"]


def read_mark(folder, kind=None):
    """The content of a folder's mark, a dict; {} if it has none, is another kind of folder, or is a symbolic link."""
    path = folder / MARK
    try:
        if folder.is_symlink() or not stat.S_ISREG(os.lstat(path).st_mode):
            return {}
        with open(path, "rb") as file:
            content = json.loads(file.read(LONGEST_MARK))
    except (OSError, ValueError, RecursionError):
        return {}
    is_mark = isinstance(content, dict) and isinstance(content.get("identity"), str) and content.get("fedmpi") in KINDS
    return content if is_mark and kind in (None, content["fedmpi"]) else {}


def check_folder(path, kind):
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
            what = "is a symbolic link"
        elif not path.is_dir():
            what = "is a file"
        elif any(path.iterdir()):
            what = "is not empty, and fedmpi did not make it"
        else:
            return False
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    raise UserError(f"{path}: {what}: expected {KINDS[kind]}, an empty folder, or a name that is free; nothing changed")


def set_aside(path):
    """Rename a folder with a mark, or a file in one, to a name that is free: NAME.old-1, NAME.old-2, ...

    Returns:
        the new path.

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


def remove(folder, names, with_folder=False):
    """Remove files from a folder with a mark; those that are missing, links, or no files are left.

    Args:
        names: of the files. with_folder: whether the folder is removed, too, if nothing else is in it.

    Raises:
        OSError: if one cannot be removed.
    """
    if folder.parent.is_symlink() or not read_mark(folder):
        return
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISREG(os.lstat(folder / name).st_mode):
                os.unlink(folder / name)
    if with_folder and os.listdir(folder) == [MARK]:
        os.unlink(folder / MARK)
        os.rmdir(folder)


def check_regular(path):
    """Check that a file of a run folder is a file itself: a link could show any file, and a FIFO or device never ends.

    Returns:
        whether it exists.

    Raises:
        UserError: if it is something else, or cannot be looked at.
    """
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not stat.S_ISREG(mode):
        raise UserError(f"{path}: is a link, a folder, a FIFO or a device: expected the file itself")
    return True


def check_replaceable(path, signature):
    """Check that a file which a user names is missing or empty, or that fedmpi wrote it.

    Args:
        path: a `pathlib.Path`. signature: bytes that are among the first of such files when fedmpi writes them.

    Raises:
        UserError: if it is something else; devices and pipes are accepted.
    """
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
            return
        if stat.S_ISREG(mode):
            with open(path, "rb") as file:
                begin = file.read(LONGEST_MARK)
            if not begin or signature in begin:
                return
        what = "is a folder" if stat.S_ISDIR(mode) else "exists, and fedmpi did not write it"
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    raise UserError(f"{path}: {what}: choose another name, or move it; nothing changed")


@contextlib.contextmanager
def replacing(path, signature):
    """A context that gives the path of a file to write, which takes the place of `path` at the end of the context.

    After an error the file is gone, and what was at `path` is still there.

    Raises:
        UserError: before and after, see `check_replaceable`. OSError: if it cannot be renamed.
    """
    path = pathlib.Path(path)
    check_replaceable(path, signature)
    if path.exists() and not path.is_file():
        yield path  # a device or pipe
        return
    part = path.with_name(f".{secrets.token_hex(4)}-{path.name}")  # it has the ending of `path`: some writers need it
    try:
        yield part
        check_replaceable(path, signature)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
