"""Opening HDF5 files, which may come from strangers: damaged ones, and those that refer to other files."""

import contextlib
import errno
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import h5py

from fedmpi.ground.errors import UserError, attempt
from fedmpi.ground.files.limits import LEAST, check_file, check_unpacked

# What reading a damaged file raises.
HDF5_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, MemoryError, SystemError)
DEEPEST = 100  # groups in groups
MOST_PACKED = 500  # times that data are larger than what is stored of them; one deflate packs zeros to 1/1000


@contextlib.contextmanager
def readable(path: str | os.PathLike[str]) -> Iterator[h5py.File]:
    """An open HDF5 file, as a context manager; errors of reading within it become one line.

    Raises:
        UserError: if the file is not HDF5, or is truncated or damaged.
    """
    with attempt("read as HDF5", path, *HDF5_ERRORS), _open(path) as file:
        _check_own(path, file, pathlib.Path(path).parent.resolve(), {pathlib.Path(path).resolve()})
        yield file


def _open(path: str | os.PathLike[str]) -> h5py.File:
    """An open HDF5 file, without a lock on a file system that has none."""
    check_file(path)
    try:
        return h5py.File(path)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        return h5py.File(path, locking=False)


def files_of(path: str | os.PathLike[str]) -> list[pathlib.Path]:
    """[path, and the paths of the files beside it of which its virtual data sets are views].

    Raises:
        UserError: if the file cannot be read.
    """
    found: set[pathlib.Path] = set()
    path = pathlib.Path(path)
    with readable(path) as file:
        _check_own(path, file, path.parent.resolve(), found)
    return [path, *sorted(found - {path.resolve()})]


def _check_own(path: str | os.PathLike[str], file: h5py.File, folder: pathlib.Path, files: set[pathlib.Path]) -> None:
    """Check that what an HDF5 file contains lies in that file, or in files that are there beside it.

    HDF5 can refer to any file of the machine by its name: a data set from a stranger could read a private one. It can
    also have a group in many places, of which each is looked at once: so many paths lead to it that they never end.

    Args:
        file: open. folder: in which all files must be. files: set of those that are checked, to which views add theirs.
    """
    seen, waiting = {h5py.h5o.get_info(file["/"].id).addr}, [(file, 0)]
    while waiting:
        group, depth = waiting.pop()
        for name in group:
            link = group.get(name, getlink=True)
            if isinstance(link, h5py.ExternalLink):
                problem = f"is a link into another file ({link.filename})"
                raise UserError(f"{_place(path, group, name)} {problem}: expected the data themselves")
            if not isinstance(link, h5py.HardLink):
                continue  # a soft link names an object of this file, which is checked under its own name
            item = group[name]
            if isinstance(item, h5py.Group):
                address = h5py.h5o.get_info(item.id).addr
                if depth == DEEPEST:
                    raise UserError(f"{path}: has groups in groups: expected at most {DEEPEST} levels")
                if address not in seen:
                    seen.add(address)
                    waiting.append((item, depth + 1))
            elif isinstance(item, h5py.Dataset):
                _check_data(_place(path, group, name), item, folder, files)


def _place(path: str | os.PathLike[str], group: h5py.Group, name: str) -> str:
    return f"{path}: {group.name.rstrip('/')}/{name}"


def _check_data(where: str, item: h5py.Dataset, folder: pathlib.Path, files: set[pathlib.Path]) -> None:
    """Check that the values of a data set lie in files that are there, and that they are so many as they claim."""
    if item.external:
        raise UserError(f"{where} lies in another file ({item.external[0][0]}): expected the data themselves")
    if is_view := item.is_virtual:
        _check_virtual(where, item, folder, files)
    chunk = math.prod(item.chunks or ()) * item.dtype.itemsize  # is unpacked whole
    if max(item.nbytes, chunk) > LEAST:
        stored = _stored_by_sources(item) if is_view else item.id.get_storage_size()
        check_unpacked(where, max(item.nbytes, chunk), stored, MOST_PACKED)


def _stored_by_sources(item: h5py.Dataset) -> int:
    """The bytes in all files of the data sets of which one is a view."""
    names, stored = {(source.file_name, source.dset_name) for source in item.virtual_sources()}, 0
    here = pathlib.Path(item.file.filename).resolve().parent
    for file_name, name in names:
        with contextlib.ExitStack() as stack:
            file = item.file if file_name == "." else stack.enter_context(_open(here / file_name))
            stored += file[name].id.get_storage_size() if name in file else 0
    return stored


def _check_virtual(where: str, item: h5py.Dataset, folder: pathlib.Path, files: set[pathlib.Path]) -> None:
    here = pathlib.Path(item.file.filename).resolve().parent
    for source in item.virtual_sources():
        if source.file_name == ".":
            continue
        file = (here / source.file_name).resolve()
        if not file.is_relative_to(folder):
            raise UserError(f"{where} is a view of {source.file_name}: expected a file in the same folder")
        if not file.is_file():
            raise UserError(f"{where} is a view of {source.file_name}, which is missing: its samples would be 0")
        if file not in files:  # it may refer to others in turn
            files.add(file)
            with _open(file) as other:
                _check_own(file, other, folder, files)


def data_sets(file: h5py.File) -> list[tuple[str, h5py.Dataset]]:
    """[(path inside the file, data set)] of all data sets in an open HDF5 file."""
    found = []

    def collect(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found.append((name, item))

    file.visititems(collect)
    return found
