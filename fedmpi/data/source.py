"""Where samples come from: HDF5 files, and the handwritten digits that scikit-learn ships."""

import dataclasses
import pathlib

import h5py
import numpy as np

from fedmpi.errors import UserError

# name -> (mean, std) of pixel/255, as in the public FAFED code.
NORMALISATION = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3529,)),
    "cifar10": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "digits": ((0.3059,), (0.3763,)),
}
NUM_CLASSES = {"mnist": 10, "fashion_mnist": 10, "cifar10": 10, "digits": 10}


@dataclasses.dataclass
class Source:
    """A labelled data set of which any rows can be read.

    Attributes:
        name: for messages.
        labels: split -> [n] int64, all labels of "train" and "test".
        shape: of one sample. num_classes: labels are 0..num_classes-1.
        mean, std: per channel, of pixel/255 for uint8 samples, of the values themselves otherwise.
    """

    name: str
    labels: dict
    shape: tuple
    num_classes: int
    mean: tuple
    std: tuple

    def read(self, split, indices):
        """[len(indices), *shape] samples of "train" or "test" in the order of sorted `indices`."""
        raise NotImplementedError


def open_source(name, data_dir):
    """Open a data set by name ("digits", "fashion_mnist") or by the path of an HDF5 file.

    Args:
        name: "digits", the stem of a file NAME.h5 in `data_dir`, or a path ending in .h5 or .hdf5.
        data_dir: folder of the files, or None.

    Raises:
        UserError: if there is no such file, or it is not what it should be.
    """
    if name == "digits":
        return DigitsSource()
    is_path = name.endswith((".h5", ".hdf5"))
    if not is_path and data_dir is None:
        raise UserError(
            f"task.data = {name}: unknown; expected digits, a path ending in .h5, or the name of a file "
            "in the folder given by --data-dir or FEDMPI_DATA"
        )
    path = pathlib.Path(name if is_path else pathlib.Path(data_dir) / f"{name}.h5")
    if not path.is_file():
        folder = path.parent
        there = ", ".join(sorted(p.stem for p in folder.glob("*.h5"))) if folder.is_dir() else "no such folder"
        raise UserError(f"task.data = {name}: no file {path} (in {folder}: {there or 'no .h5 file'}; or use digits)")
    return HDF5Source(path)


class HDF5Source(Source):
    """An HDF5 file with train/images, train/labels, test/images and test/labels.

    images: [n, ...] uint8 or float; labels: [n] integers from 0. Optional attributes of the file:
    num_classes, and mean and std per channel for the normalisation.

    Raises:
        UserError: if the file is not HDF5, lacks a data set, or labels and images do not agree.
    """

    def __init__(self, path):
        self.path = pathlib.Path(path)
        try:
            with h5py.File(self.path) as file:
                self._check(file)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read as HDF5: {error}") from None

    def _check(self, file):
        for key in ("train/images", "train/labels", "test/images", "test/labels"):
            if not isinstance(file.get(key), h5py.Dataset):
                held = sorted(f"{g}/{k}" for g in file for k in (file[g] if isinstance(file[g], h5py.Group) else ()))
                raise UserError(f"{self.path}: lacks the data set {key}; it holds {', '.join(held) or 'nothing'}")
        self.name = self.path.stem
        self.shape = tuple(file["train/images"].shape[1:])
        self.labels = {}
        known = NUM_CLASSES.get(self.name, file.attrs.get("num_classes"))
        for split in ("train", "test"):
            images, labels = file[f"{split}/images"], file[f"{split}/labels"]
            if images.ndim < 2 or images.dtype not in (np.uint8, np.float16, np.float32, np.float64):
                given = f"{split}/images is {images.dtype}{list(images.shape)}"
                raise UserError(f"{self.path}: {given}: expected uint8 or float [n, ...]")
            if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) != len(images) or len(labels) == 0:
                given = f"{split}/labels is {labels.dtype}{list(labels.shape)}"
                raise UserError(f"{self.path}: {given}: expected integers [{len(images)}], one per image, at least one")
            if tuple(images.shape[1:]) != self.shape:
                raise UserError(f"{self.path}: test/images differ in shape from train/images {list(self.shape)}")
            self.labels[split] = labels[:].astype(np.int64)
        self.num_classes = int(known) if known is not None else int(self.labels["train"].max()) + 1
        for split, labels in self.labels.items():
            outside = labels[(labels < 0) | (labels >= self.num_classes)]
            if len(outside):
                raise UserError(f"{self.path}: {split}/labels holds {outside[0]}: expected 0..{self.num_classes - 1}")
        mean, std = NORMALISATION.get(self.name, ((0.0,), (1.0,)))
        self.mean = tuple(np.atleast_1d(file.attrs.get("mean", mean)).tolist())
        self.std = tuple(np.atleast_1d(file.attrs.get("std", std)).tolist())

    def read(self, split, indices):
        """Rows `indices` (sorted), reading the file piece by piece: memory for them and one piece."""
        with h5py.File(self.path) as file:
            images = file[f"{split}/images"]
            rows = np.empty((len(indices), *self.shape), dtype=images.dtype)
            piece = images.chunks[0] if images.chunks else 1024
            begin = 0
            while begin < len(indices):
                start = indices[begin] // piece * piece
                end = int(np.searchsorted(indices, start + piece))
                wanted = indices[begin:end]
                try:
                    rows[begin:end] = images[wanted[0] : wanted[-1] + 1][wanted - wanted[0]]
                except OSError as error:
                    raise UserError(f"{self.path}: {split}/images cannot be read: {error}") from None
                begin = end
        return rows


class DigitsSource(Source):
    """1797 handwritten digits of 8x8 pixels (UCI), embedded in scikit-learn; every fifth is a test sample."""

    def __init__(self):
        from sklearn.datasets import load_digits  # takes a second to import: only where it is used

        digits = load_digits()
        is_test = np.arange(len(digits.target)) % 5 == 4
        pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)
        self._images = {"train": pixels[~is_test], "test": pixels[is_test]}
        super().__init__(
            name="digits",
            labels={"train": digits.target[~is_test], "test": digits.target[is_test]},
            shape=(8, 8),
            num_classes=10,
            mean=NORMALISATION["digits"][0],
            std=NORMALISATION["digits"][1],
        )

    def read(self, split, indices):
        return self._images[split][indices]
