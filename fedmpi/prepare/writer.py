"""Write the HDF5 files that training reads."""

import io
import json
import zlib

import h5py
import numpy as np

from fedmpi.data.source import ACCOUNT, NORMALISATION, SPLITS, TYPES, HDF5Source, oddities, plain
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.own_files import check_regular, check_replaceable, replacing

ROWS_PER_CHUNK, BYTES_PER_CHUNK = 1000, 16 << 20  # of samples, whichever is less
WRITTEN_BY, PROGRAM = "written_by", "fedmpi.data"  # attribute of all files, written before all else; its value
TEXT_CHUNK = 1 << 20  # bytes of a text
NO_VALUE = ("?", "-", "--", ".")  # what often means that there is no value
SAMPLE, DENSE = 100, 0.6  # floats are compressed if so many rows become smaller than this share


def write_file(path, splits, attributes):
    """Write data sets and attributes to an HDF5 file, which appears only when it is complete.

    num_classes, mean and std are added to the attributes if they are missing and can be computed.

    Args:
        path: `pathlib.Path` of the new file; its folder is made.
        splits: name ("train/images") -> rows, see `fedmpi.prepare.formats`.
        attributes: name -> value, of the file.

    Raises:
        UserError: if training could not use the data, or the file cannot be written.
    """
    splits, attributes = _check_labelled(path, splits), dict(attributes)
    if "train/labels" in splits and "num_classes" not in attributes:
        attributes["num_classes"] = 1 + max(int(splits[f"{split}/labels"].max()) for split in SPLITS)
    if odd := [name for name in attributes.get("class_names", ()) if "\0" in name]:
        raise UserError(f"{path.stem}: a class is called {odd[0]!r}: expected names without a NUL character")
    check_writable(path)
    unfinished, disk = path, None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, PROGRAM.encode()) as unfinished:
            with _File(unfinished, "w+") as disk, h5py.File(disk, "w", libver=("v108", "latest")) as file:
                file.attrs[WRITTEN_BY] = PROGRAM
                for name, rows in splits.items():
                    _write_rows(file, name, rows)
                is_known = attributes.get("dataset") in NORMALISATION or "mean" in attributes
                if "train/images" in splits and not is_known:
                    file.attrs["mean"], file.attrs["std"] = _mean_and_std(file["train/images"])
                if ACCOUNT in attributes:
                    attributes[ACCOUNT] = _complete(attributes[ACCOUNT], splits, attributes)
                for name, value in attributes.items():
                    file.attrs[name] = value
            if disk.error:
                raise disk.error
            if "train/images" in splits:
                HDF5Source(unfinished)  # reports now what training would report later
    except UserError as error:
        raise UserError(str(error).replace(str(unfinished), str(path))) from None
    except OSError as error:
        error = (disk and disk.error) or error
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


def _complete(account, splits, attributes):
    """What `data prepare` decided, as JSON, with the numbers of samples and classes."""
    if isinstance(account, str):
        return account
    labels = [splits[f"{split}/labels"] for split in SPLITS]
    counts = dict(zip(*np.unique(np.concatenate(labels), return_counts=True)))
    names = enumerate(attributes["class_names"]) if "class_names" in attributes else zip(counts, counts)
    classes = {str(name): int(counts.get(number, 0)) for number, name in names}
    rows = {split: len(values) for split, values in zip(SPLITS, labels)}
    notes = oddities("labels", *map(np.unique, labels), attributes["num_classes"])
    similar = [name for name, other in zip(sorted(classes, key=plain), sorted(classes, key=plain)[1:])
               if plain(name) == plain(other)]  # fmt: skip
    if similar:
        notes.append(f"several classes differ from {', '.join(similar)} only by case, blanks or .0: are they the same?")
    notes += [f"{name} is a class: does it mean that there is no value (--na)?" for name in classes if name in NO_VALUE]
    account["notes"] = [*account.get("notes", ()), *notes]
    return json.dumps({"rows": rows, "classes": classes, **account}, ensure_ascii=False)


class _File(io.FileIO):
    """A file whose writing never fails, because HDF5 crashes where it does; `error` is the first failure, or None."""

    error = None

    def write(self, content):
        rest = memoryview(content).cast("B")
        while rest and not self.error:
            rest = rest[self._unless_failed(super().write, rest) or 0 :]
        return len(content)

    def truncate(self, size=None):
        return self._unless_failed(super().truncate, size)

    def _unless_failed(self, action, *words):
        try:
            return None if self.error else action(*words)
        except OSError as error:
            self.error = error


def check_writable(path):
    """Check that a data file is missing, or that `write_file` wrote it.

    Raises:
        UserError: if it is something else.
    """
    check_regular(path)
    check_replaceable(path, PROGRAM.encode())


def _check_labelled(path, splits):
    """The splits with labels in the smallest integer type; a text, which has no labels, is returned as it is."""
    splits = dict(splits)
    for split in SPLITS:
        images, labels = splits.get(f"{split}/images"), splits.get(f"{split}/labels")
        if labels is None:
            continue
        if labels.dtype.kind not in "iu" or labels.ndim != 1 or labels.min(initial=0) < 0 or not len(labels):
            smallest = f", the smallest {labels.min()}" if labels.size and labels.dtype.kind in "iu" else ""
            expected = "expected integers [n] from 0, at least one"
            raise UserError(f"{path.stem}: {split} labels are {labels.dtype}{list(labels.shape)}{smallest}: {expected}")
        if images.dtype not in TYPES or len(images.shape) < 2 or 0 in images.shape[1:]:
            expected = "expected numbers [n, ...], n samples of at least one value"
            raise UserError(f"{path.stem}: {split} images are {images.dtype}{list(images.shape)}: {expected}")
        splits[f"{split}/labels"] = labels.astype(np.min_scalar_type(int(labels.max())))
    return splits


def _is_dense(piece):
    """Whether compression gains little; it takes as long as reading a table."""
    return len(zlib.compress(piece, 1)) > DENSE * piece.nbytes


def _write_rows(file, name, rows):
    """Write one data set chunk by chunk, so that rows which are read only when sliced need no more memory."""
    if rows.dtype.kind == "S" or len(rows.shape) == 1 and rows.dtype.kind != "u":
        file.create_dataset(name, data=rows)
        return
    row_bytes = rows.dtype.itemsize * int(np.prod(rows.shape[1:]))
    most_rows = ROWS_PER_CHUNK if len(rows.shape) > 1 else TEXT_CHUNK
    chunk = (max(1, min(len(rows), most_rows, BYTES_PER_CHUNK // row_bytes)), *rows.shape[1:])
    is_dense = rows.dtype.kind == "f" and _is_dense(np.ascontiguousarray(rows[:SAMPLE]))
    how = {} if is_dense else {"compression": "gzip", "compression_opts": 1}
    data = file.create_dataset(name, shape=rows.shape, dtype=rows.dtype, chunks=chunk, **how)
    for start in range(0, len(rows), chunk[0]):
        piece = rows[start : start + chunk[0]]
        if piece.dtype.kind == "f" and not np.isfinite(piece).all():
            sample = start + int(np.flatnonzero(~np.isfinite(piece.reshape(len(piece), -1)).all(1))[0])
            raise UserError(f"{name}: contains a value that is not finite in sample {sample}: expected finite numbers")
        data[start : start + chunk[0]] = piece


def _mean_and_std(images):
    """Mean and standard deviation [channels] of an HDF5 data set, for bytes of value/255, in two passes.

    Grey images have one channel, samples that are vectors one per feature. A constant channel gets
    the standard deviation 1.
    """
    is_grey = images.ndim == 3
    axes = (0, 1, 2) if is_grey else tuple(range(images.ndim - 1))
    num_values = images.size if is_grey else images.size // images.shape[-1]

    def mean_of(function):
        return sum(function(piece).sum(axes) for piece in pieces()) / num_values

    def pieces():
        for start in range(0, len(images), images.chunks[0]):
            yield images[start : start + images.chunks[0]] / np.float64(255 if images.dtype == np.uint8 else 1)

    with np.errstate(over="ignore"):
        mean = mean_of(lambda piece: piece)
        std = np.sqrt(mean_of(lambda piece: (piece - mean) ** 2))
    if not np.isfinite(std).all():
        raise UserError(f"{images.name[1:]}: values are too large for a standard deviation: expected smaller ones")
    is_constant = std <= 1e-12 * np.abs(mean)  # its rounded mean leaves deviations that are not 0
    return np.atleast_1d(mean), np.atleast_1d(np.where(is_constant, 1.0, std))
