"""Making the one HDF5 file of a data set, from official files or one's own."""

import contextlib
import pathlib

import h5py
import numpy as np

from fedmpi.data.download import fetch
from fedmpi.data.formats import own as formats
from fedmpi.data.official import OFFICIAL
from fedmpi.data.source import NORMALISATION, SPLITS, HDF5Source
from fedmpi.errors import UserError

READERS = {
    "mnist": formats.mnist_like,
    "fashion_mnist": formats.mnist_like,
    "cifar10": formats.cifar10,
    "tiny_imagenet": formats.tiny_imagenet,
    "wikitext2": formats.wikitext2,
}
OFTEN_PICTURES = ("mnist", "fashion_mnist", "cifar10")  # also met as one image file per sample
ROWS_PER_CHUNK, BYTES_PER_CHUNK = 1000, 16 << 20  # whichever is less; a text is one row per byte


def prepare(name, folder, options):
    """Write folder/NAME.h5 and return its path; what is there already stays, unless options.force.

    Args:
        name: a known data set, or a name for one's own.
        folder: a `pathlib.Path`, made if it is not there.
        options: `origin` (a path or None), `mirror` (a URL or None), `force`, and for one's own data
            `test_share`, `seed`, `label`, `size`.

    Raises:
        UserError: if there is nothing to make it from, or it is not what it should be.
    """
    if name == "digits":
        raise UserError("prepare digits: these come with scikit-learn and need no file; choose another name for yours")
    if options.size is not None and options.size < 1:
        raise UserError(f"--size {options.size}: expected at least 1, pixels a side")
    path = folder / f"{name}.h5"
    if path.exists() and not options.force:
        print(f"{path} is there already (--force makes it again)")
        return path
    origin = pathlib.Path(options.origin) if options.origin else None
    if origin is not None and not origin.exists():
        raise UserError(f"--from {origin}: no such file or folder")
    if name in READERS and not (origin and _is_own_form(name, origin)):
        if origin and origin.is_file():
            origin = origin.parent  # the archive itself, or one of several files
        splits, attributes = READERS[name](origin or _download(name, folder / "downloads" / name, options.mirror))
    elif origin is None:
        raise UserError(f"prepare {name}: expected one of {', '.join(READERS)}, or --from with your own data")
    else:
        splits, attributes = formats.own(origin, options)
    write(path, {**splits}, {"dataset": name, **attributes})
    return path


def _is_own_form(name, origin):
    """Whether a known data set is given in a form in which people have their own data."""
    if origin.is_dir():
        return name in OFTEN_PICTURES and any((origin / split).is_dir() for split in ("train", "training"))
    return origin.suffix in (".npz", ".csv", ".h5", ".hdf5")


def _download(name, folder, mirror):
    folder.mkdir(parents=True, exist_ok=True)
    official = OFFICIAL[name]
    base = (mirror or official.url).rstrip("/")
    for file in official.files:
        fetch(f"{base}/{file.name}", folder / file.name, file.md5)
    return folder


def write(path, splits, attributes):
    """Write data sets and attributes of the layout; a file appears only when it is complete.

    Args:
        path: of the file. splits: name ("train/images") -> rows, see `fedmpi.data.formats`.
        attributes: of the file; num_classes, mean and std are added where they can be told.

    Raises:
        UserError: if it would be no data set to train on, or the file cannot be written.
    """
    unfinished = path.with_name(path.name + ".part")
    for split in SPLITS:
        images, labels = splits.get(f"{split}/images"), splits.get(f"{split}/labels")
        if labels is None:
            continue
        if labels.dtype.kind not in "iu" or labels.ndim != 1 or labels.min(initial=0) < 0 or not len(labels):
            holds = f", the least {labels.min()}" if labels.size and labels.dtype.kind in "iu" else ""
            _refuse(path, split, "labels", labels, holds, "integers [n] from 0, at least one")
        is_number = images.dtype in (np.uint8, np.float16, np.float32, np.float64)
        if not is_number or len(images.shape) < 2 or 0 in images.shape[1:]:
            _refuse(path, split, "images", images, "", "numbers [n, ...], n samples")
        splits[f"{split}/labels"] = labels.astype(np.min_scalar_type(int(labels.max())))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(unfinished, "w") as file:
            for name, rows in splits.items():
                _write_rows(file, name, rows)
            if "train/labels" in splits and "num_classes" not in attributes:
                attributes["num_classes"] = 1 + max(int(splits[f"{split}/labels"].max()) for split in SPLITS)
            if "train/images" in splits and attributes.get("dataset") not in NORMALISATION:
                file.attrs["mean"], file.attrs["std"] = _mean_and_std(file["train/images"])
            for name, value in attributes.items():
                file.attrs[name] = value
        if "train/images" in splits:
            HDF5Source(unfinished)  # so that what is wrong is said now, not when training
        unfinished.replace(path)
    except UserError as error:
        raise UserError(str(error).replace(str(unfinished), str(path))) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}") from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def _refuse(path, split, kind, rows, holds, expected):
    raise UserError(f"{path.stem}: {split} {kind} are {rows.dtype}{list(rows.shape)}{holds}: expected {expected}")


def _write_rows(file, name, rows):
    """One data set, chunk by chunk: rows may be images that are read only now."""
    if rows.dtype.kind == "S":
        file.create_dataset(name, data=rows)
        return
    row_bytes = rows.dtype.itemsize * int(np.prod(rows.shape[1:]))
    num = ROWS_PER_CHUNK if len(rows.shape) > 1 else 1 << 20
    chunk = (max(1, min(len(rows), num, BYTES_PER_CHUNK // row_bytes)), *rows.shape[1:])
    data = file.create_dataset(name, shape=rows.shape, dtype=rows.dtype, chunks=chunk, compression="gzip")
    for start in range(0, len(rows), chunk[0]):
        piece = rows[start : start + chunk[0]]
        if piece.dtype.kind == "f" and not np.isfinite(piece).all():
            raise UserError(f"{name}: holds a value that is not finite in sample {start + _first_not_finite(piece)}")
        data[start : start + chunk[0]] = piece


def _first_not_finite(rows):
    return int(np.flatnonzero(~np.isfinite(rows.reshape(len(rows), -1)).all(1))[0])


def _mean_and_std(images):
    """Per channel (or feature), of pixel/255 for bytes; a constant channel gets the deviation 1."""
    axes = tuple(range(images.ndim - 1)) if images.ndim != 3 else (0, 1, 2)
    total, squares, number = 0.0, 0.0, 0
    for start in range(0, len(images), images.chunks[0]):
        piece = images[start : start + images.chunks[0]].astype(np.float64) / (255 if images.dtype == np.uint8 else 1)
        total, squares = total + piece.sum(axes), squares + (piece**2).sum(axes)
        number += piece.size // (piece.shape[-1] if images.ndim != 3 else 1)
    mean = total / number
    std = np.sqrt(np.maximum(squares / number - mean**2, 0))
    return np.atleast_1d(mean), np.atleast_1d(np.where(std > 0, std, 1.0))
