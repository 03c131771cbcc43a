"""A state (name -> tensor or number) as one HDF5 file, written in one pass from front to back.

The HDF5 library makes only the file's structure, in memory: it crashes if the disk fills up while it writes. The
tensors' places in the file are known then, so that the file can be written, and its checksum computed, at the
speed of the disk and without a copy.
"""

import concurrent.futures
import errno
import io
import os
import zlib

import h5py
import numpy as np
import torch

from fedmpi.errors import UserError
from fedmpi.own_files import check_regular
from fedmpi.text import short

PIECE = 8 << 20  # bytes that are written at once, while their checksum is computed
SMALL = 1 << 16  # bytes; larger tensors are read when they are used, and begin on a page of memory
PAGE = 4096


class Damaged(Exception):
    """A file of a checkpoint that is not as it was written; the text says which and why."""


def write_state(path, state):
    """Write a state and flush it to the disk (fsync); an existing file is overwritten.

    Args:
        path: a `pathlib.Path`.
        state: name -> tensor, number, or list of numbers; names are paths like "clients/0/rows/c_i".

    Returns:
        (size in bytes, CRC-32) of the file.

    Raises:
        OSError: if the disk is full (before anything is written, if the file system can reserve room) or fails.
    """
    structure, tensors = _lay_out(state)
    if os.path.lexists(path) and os.lstat(path).st_nlink > 1:
        os.unlink(path)  # what has a second name, in a backup say, keeps its content there
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
    try:
        _reserve(file, structure.size)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            checksum = 0
            for piece in structure.pieces(tensors):
                computed = pool.submit(zlib.crc32, piece, checksum)
                _write(file, piece)
                checksum = computed.result()
        os.fsync(file)
    finally:
        os.close(file)
    return structure.size, checksum


def read_state(path, nbytes, checksum):
    """Read what `write_state` wrote.

    Args:
        path: a `pathlib.Path`. nbytes, checksum: what `write_state` returned.

    Returns:
        name -> tensor or number; lists come back as tensors. Large tensors are read from the file when they are used.

    Raises:
        Damaged: if the file is missing or differs from what was written.
    """
    check_file(path, nbytes, checksum)
    state = {}

    def take(name, item):
        if isinstance(item, h5py.Dataset):
            if item.external or item.is_virtual:
                raise Damaged(f"{path}: {name} lies in another file")
            state[name] = torch.from_numpy(_array(path, item))

    try:
        with h5py.File(path) as file:
            state |= {name: value.item() for name, value in file.attrs.items()}
            file.visititems(take)
    except Damaged:
        raise
    except Exception as error:  # noqa: BLE001  another program can have written anything, and its checksum
        raise Damaged(f"{path}: cannot be read: {short(error)}") from None
    return state


def check_file(path, nbytes, checksum):
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


def _lay_out(state):
    """(the `_Structure` of the file, [(offset, tensor)] of what lies in it)."""
    structure, tensors = _Structure(), []
    # Properties of a dataset that gets its place in the file when it is created, and no values from the library.
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    with h5py.File(structure, "w", alignment_threshold=SMALL, alignment_interval=PAGE) as file:
        for name, value in state.items():
            if isinstance(value, int | float):
                file.attrs[name] = value
            elif isinstance(value, list):
                file.create_dataset(name, data=np.array(value, dtype=None if value else np.int64), track_times=False)
            elif value.dim() == 0 or value.numel() == 0:
                file.create_dataset(name, data=value.detach().cpu().numpy(), track_times=False)
            else:
                dtype = torch.empty(0, dtype=value.dtype).numpy().dtype
                dataset = file.create_dataset(name, tuple(value.shape), dtype, dcpl=properties, track_times=False)
                tensors.append((dataset.id.get_offset(), value))
    return structure, sorted(tensors, key=lambda one: one[0])


def _array(path, dataset):
    """The values of a dataset: in memory if they are few, otherwise mapped from the file."""
    if dataset.nbytes < SMALL:
        return np.array(dataset[()])
    return np.memmap(path, dataset.dtype, "c", dataset.id.get_offset(), dataset.shape)


def _reserve(file, nbytes):
    """Reserve room on the disk, so that a full one is known before anything is written."""
    if not hasattr(os, "posix_fallocate"):  # a system that cannot
        return
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot
            raise


def _write(file, piece):
    view = memoryview(piece)
    while view:
        view = view[os.write(file, view) :]


class _Structure(io.RawIOBase):
    """A file in memory that the HDF5 library writes its structure to: only what was written takes memory."""

    def __init__(self):
        super().__init__()
        self.size, self._at, self._written = 0, 0, []

    def seek(self, offset, whence=os.SEEK_SET):
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        return self._at

    def tell(self):
        return self._at

    def readable(self):
        return True

    def writable(self):
        return True

    def seekable(self):
        return True

    def truncate(self, size=None):
        self.size = self._at if size is None else size
        return self.size

    def write(self, data):
        data = bytes(data)
        self._written.append((self._at, data))
        self._at += len(data)
        self.size = max(self.size, self._at)
        return len(data)

    def readinto(self, buffer):
        data = self._between(self._at, min(self._at + len(buffer), self.size))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def pieces(self, tensors):
        """The file from front to back, as bytes of at most PIECE.

        Args:
            tensors: [(offset, tensor)] in the order of their offsets.
        """
        position = 0
        for offset, tensor in tensors:
            yield self._between(position, offset)
            data = tensor.detach().cpu().contiguous().reshape(-1).numpy().view(np.uint8)
            for begin in range(0, data.size, PIECE):
                yield data[begin : begin + PIECE]
            position = offset + data.size
        yield self._between(position, self.size)

    def _between(self, start, stop):
        """The bytes [start, stop) as written so far, zeros elsewhere."""
        data = bytearray(max(0, stop - start))
        for offset, written in self._written:
            begin, end = max(offset, start), min(offset + len(written), stop)
            if begin < end:
                data[begin - start : end - start] = written[begin - offset : end - offset]
        return bytes(data)
