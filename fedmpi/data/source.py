"""Where samples come from: HDF5 files, and the handwritten digits that scikit-learn ships."""

import dataclasses
import importlib.util
import pathlib
import re

import h5py
import numpy as np

from fedmpi.comm.agreement import agree
from fedmpi.ground.errors import UserError, attempt
from fedmpi.ground.files.hdf5 import data_sets, readable
from fedmpi.ground.text import Log, short

log = Log(__name__)

# name -> (mean, std) of pixel/255 per channel, as in the public FAFED code; Tiny-ImageNet: the usual values; digits:
# measured on the training set.
NORMALISATION = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3529,)),
    "cifar10": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "tiny_imagenet": ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
    "digits": ((0.3059,), (0.3763,)),
}
NUM_CLASSES = {"mnist": 10, "fashion_mnist": 10, "cifar10": 10, "tiny_imagenet": 200, "digits": 10}
SPLITS = ("train", "test")
TYPES = (np.uint8, np.float16, np.float32, np.float64)  # of samples
SILO_NAME = "silo"  # attribute of a client's file: its name, like the hospital's
GROUP, ID = "group_column", "id_columns"  # attributes: columns of samples that stay together, and of their names
ACCOUNT = "account"  # attribute: JSON of what `data prepare` decided
COLUMNS = "columns"  # attribute of a table's file: `fedmpi.prepare.formats.features.Columns` as JSON
MAX_CLASSES = 1_000_000  # more are a mistake in the labels: no network has so many outputs
CLIENT = re.compile(r"\{client(:0?\d{0,2}d?)?\}")  # in the pattern of silo files
ROWS_AT_ONCE = 1000  # rows read together from a file without chunks


@dataclasses.dataclass
class Source:
    """A labelled data set of which any samples can be read.

    Attributes:
        name: of the data set; a task chooses its default model by it.
        labels: split -> [n] int64, all labels of "train" and "test".
        shape: of one sample; dtype: of its values.
        num_classes: labels are 0..num_classes-1. classes_declared: whether the data set declares that number;
            otherwise it is derived from the largest label.
        mean, std: per channel, of pixel/255 for uint8 samples, of the values themselves otherwise.
        rows_at_once: number of consecutive samples that can only be read together (a chunk of the file).
        attributes: name -> value of the file's attributes, {} without a file. path: of the file, or None.
    """

    name: str
    labels: dict
    shape: tuple
    num_classes: int
    mean: tuple
    std: tuple
    dtype: np.dtype = np.dtype(np.uint8)
    classes_declared: bool = True
    rows_at_once: int = 1
    attributes = {}  # not annotated, like `path`: so the dataclass makes no argument of it
    path = None

    def read(self, split, indices):
        """[len(indices), *shape] samples of "train" or "test" in the order of sorted `indices`."""
        raise NotImplementedError

    def oddities(self):
        """Oddities of the labels that are allowed but may be mistakes: a list of lines."""
        return oddities(self.name, *(_distinct(self.labels[split]) for split in SPLITS), self.num_classes)

    def columns(self, split="train"):
        """name -> [n, ...] values of the further columns of a split, besides samples and labels."""
        return {}

    def groups(self, split="train"):
        """[n] numbers of the groups of samples that stay on one side of every split, or None."""
        name = self.attributes.get(GROUP)
        return None if name is None else np.unique(self.column(str(name), split), return_inverse=True)[1]

    def file_rows(self, indices):
        """[n] row numbers in the file's training set of the training samples `indices` [n]."""
        return indices

    def column(self, name, split="train"):
        """[n] values of the samples of a split: "labels", a further column of the file, or "brightness".

        The brightness of a sample is the mean of its values; computing it reads the whole split.

        Raises:
            UserError: if there is no such column.
        """
        if name == "labels":
            return self.labels[split]
        if name != "brightness":
            raise UserError(f"{self.name}: has no column {split}/{name}: expected labels or brightness")
        num_samples, step = len(self.labels[split]), max(self.rows_at_once, 100)
        blocks = np.split(np.arange(num_samples), range(step, num_samples, step))
        pieces = (self.read(split, block) for block in blocks)
        return np.concatenate([piece.reshape(len(piece), -1).mean(1, dtype=np.float64) for piece in pieces])


def _distinct(values):
    """The distinct values, sorted. `np.unique` would import numpy.ma at every start."""
    ordered = np.sort(values, axis=None)
    return ordered[np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)])]


def oddities(name, trained, tested, num_classes):
    """See `Source.oddities`; `trained` and `tested`: labels of the training and test samples."""
    unseen = np.setdiff1d(tested, trained)
    missing, count = _missing(np.union1d(trained, tested), num_classes)
    found = [f"no sample has label {_some(missing, count)}, of {num_classes} classes"] if len(missing) else []
    found += [f"the test set has label {_some(unseen)}, which no training sample has"] if len(unseen) else []
    return [f"{name}: {line}" for line in found]


def as_strings(values):
    """A list of str from an attribute of an HDF5 file: one value or an array, of text, bytes or anything else."""
    values = np.ravel(values).tolist()
    return [value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in values]


def plain(word):
    """A word without what often differs by mistake: case, blanks, and the .0 of a whole number."""
    return "".join(word.lower().split()).removesuffix(".0")


def check_labels(link, name, sources, num_classes):
    """Check that the labels of all silos together are 0, 1, ... without gaps, or that the files declare the classes.

    Collective on the link. Rank 0 prints the `oddities` of all silos. `sources`: of this rank's clients.

    Raises:
        AgreedUserError: on every rank, about the first file that has labels above a gap.
    """
    own_labels = [[np.unique(source.labels[split]) for split in SPLITS] for source in sources]
    everyone = (link.allgatherv(np.concatenate(labels), "labels") for labels in zip(*own_labels))
    trained, tested = (np.unique(labels).astype(int) for labels in everyone)
    missing, count = _missing(np.union1d(trained, tested), num_classes)

    def check():
        for source, labels in zip(sources, map(np.concatenate, own_labels)):
            if len(missing) and not source.classes_declared and labels.max() > missing[0]:
                raise UserError(
                    f"{source.path}: contains the labels {_some(np.unique(labels))}, but no client has the label "
                    f"{_some(missing, count)}: expected labels from 0 on without gaps that mean the same in all files, "
                    "or the number of classes as attribute num_classes of each file (of a Dataset: a list, classes)"
                )

    agree(link, check)
    for line in oddities(name, trained, tested, num_classes) if link.rank == 0 else ():
        log.warning(line)


def pool_normalisation(link, name, sources):
    """(mean, std) of the training samples of all silos together. Collective on the link.

    `sources`: the `Source` of each of this rank's clients, with as many channels on all ranks; `name`: of the data.
    """
    own_facts = [[len(source.labels["train"]), *source.mean, *source.std] for source in sources]
    facts, (first, *_) = link.allgatherv(np.ravel(own_facts), "scales").reshape(-1, len(own_facts[0])), sources
    if (facts[:, 1:] == facts[0, 1:]).all():
        return first.mean, first.std
    shares, means, stds = facts[:, 0] / facts[:, 0].sum(), *np.split(facts[:, 1:], [len(first.mean)], axis=1)
    mean = shares @ means
    if link.rank == 0:
        log.warning(f"{name}: inputs are scaled by the mean and std of all clients' samples together")
    return tuple(mean.tolist()), tuple(np.sqrt(shares @ (stds**2 + (means - mean) ** 2)).tolist())


def _missing(present, num_classes):
    """The first of the labels that are not present, and how many there are: a label may be 10^12."""
    return np.setdiff1d(np.arange(min(num_classes, len(present) + 5)), present), num_classes - len(present)


def _some(numbers, count=None, most=5):
    """The first of `count` numbers as text, and how many more there are."""
    count = len(numbers) if count is None else count
    more = f" and {count - most} more" if count > most else ""
    return ", ".join(map(str, numbers[:most])) + more


def open_source(name, data_dir):
    """Open a data set by name ("digits", "fashion_mnist") or by the path of an HDF5 file.

    Args:
        name: "digits", the name of a file NAME.h5 in `data_dir`, or a path ending in .h5 or .hdf5.
        data_dir: folder of the data files, or None.

    Raises:
        UserError: if there is no such file, or it is damaged or has another layout.
    """
    return DigitsSource() if name == "digits" else HDF5Source(find_file(name, data_dir))


def find_file(name, data_dir, given="task.data = "):
    """The path of a data set's file; see `open_source`. A message begins with `given` and the name.

    Raises:
        UserError: if there is no such file; the message lists the files of the folder.
    """
    is_path = name.endswith((".h5", ".hdf5"))
    if not is_path and data_dir is None:
        raise UserError(
            f"{given}{name}: unknown data set: expected digits, a path ending in .h5, or the name of a file "
            "in the folder that --data-dir or FEDMPI_DATA gives"
        )
    path = pathlib.Path(name if is_path else pathlib.Path(data_dir) / f"{name}.h5")
    if not path.is_file():
        folder = path.parent
        if folder.is_dir():
            names = ", ".join(sorted(file.stem for file in folder.glob("*.h5"))) or "none"
            there = f"data sets in {folder}: {names}"
        else:
            there = f"{folder}: no such folder"
        raise UserError(f"{given}{name}: no file {path} ({there}; the data set digits needs no file)")
    return path


def names_silos(name):
    """Whether the name of a data set is a pattern for one file per client: 'silo_{client}.h5'."""
    return "{client" in name


def silo_name(pattern, client, given):
    """The name of one client's file, from 'silo_{client}.h5' or 'silo_{client:03d}.h5'.

    Raises:
        UserError: if the pattern is not valid; the message begins with `given`, which names its setting.
    """
    if {*"{}"} & {*CLIENT.sub("", pattern)}:
        raise UserError(f"{given}: expected a pattern with {{client}} and nothing else in braces")
    return CLIENT.sub(lambda found: found[0].format(client=client), pattern)


def silo_path(name, client):
    """The path of one client's file; see `silo_name`.

    Raises:
        UserError: if the pattern is not valid, or there is no such file.
    """
    path = silo_name(name, client, f"task.data = {name}")
    if not pathlib.Path(path).is_file():
        raise UserError(f"task.data = {name}: client {client} has no file {path}")
    return path


class HDF5Source(Source):
    """An HDF5 file with train/images, train/labels, test/images and test/labels.

    With `tested` = False, the file of one client, it may lack test data: they are then empty.

    images: [n, ...] uint8 or float; labels: [n] integers from 0. Optional attributes of the file:
    dataset (a name), num_classes, and mean and std per channel for the normalisation. Optional
    columns train/<name> [n] to split by.

    Raises:
        UserError: if the file is not HDF5, lacks a data set, or its labels and images do not match.
    """

    def __init__(self, path, tested=True):
        self.path = pathlib.Path(path)
        with readable(self.path) as file:
            splits = SPLITS if tested or "test" in file else SPLITS[:1]
            for split in splits:
                self._check_split(file, split, least=int(tested or split == "train"))
            train, test = (file[f"{split}/images"] for split in (splits[0], splits[-1]))
            self.shape, self.dtype = tuple(train.shape[1:]), train.dtype
            if test.shape[1:] != self.shape or test.dtype != self.dtype:
                expected = f"the shape and type of train/images, {self.dtype}{list(self.shape)}"
                raise self._wrong("test/images", test, expected)
            self.rows_at_once = train.chunks[0] if train.chunks else ROWS_AT_ONCE
            self.labels = dict.fromkeys(SPLITS, np.empty(0, np.int64))
            self.labels |= {split: file[f"{split}/labels"][:].astype(np.int64) for split in splits}
            self._read_attributes(file)
        if self.num_classes > MAX_CLASSES:
            raise UserError(f"{self.path}: has {self.num_classes:,} classes: expected labels from 0 on without gaps")
        for split, labels in self.labels.items():
            outside = labels[(labels < 0) | (labels >= self.num_classes)]
            if len(outside):
                hint = f"expected 0..{self.num_classes - 1}"
                raise UserError(f"{self.path}: {split}/labels contains {outside[0]}: {hint}")

    def _check_split(self, file, split, least):
        for key in (f"{split}/images", f"{split}/labels"):
            if not isinstance(file.get(key), h5py.Dataset):
                names = ", ".join(name for name, _ in data_sets(file)) or "nothing"
                raise UserError(f"{self.path}: lacks the data set {key}; it contains {names}")
        images, labels = file[f"{split}/images"], file[f"{split}/labels"]
        if images.ndim < 2 or images.dtype not in TYPES or 0 in images.shape[1:]:
            raise self._wrong(f"{split}/images", images, "uint8 or float [n, ...]")
        if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) != len(images) or len(labels) < least:
            raise self._wrong(f"{split}/labels", labels, f"integers [{len(images)}], one per image, at least one")

    def _wrong(self, key, data, expected):
        return UserError(f"{self.path}: {key} is {data.dtype}{list(data.shape)}: expected {expected}")

    def _read_attributes(self, file):
        self.attributes = dict(file.attrs)
        self.name = str(file.attrs.get("dataset", self.path.stem))
        from_labels = max(int(labels.max(initial=0)) for labels in self.labels.values()) + 1
        names = np.size(file.attrs.get("class_names", ()))
        declared = NUM_CLASSES.get(self.name, file.attrs.get("num_classes", names if names >= from_labels else None))
        self.classes_declared = declared is not None
        self.num_classes = self._whole(declared) if self.classes_declared else max(from_labels, 1)
        mean, std = NORMALISATION.get(self.name, ((0.0,), (1.0,)))
        self.mean = self._numbers("mean", file.attrs.get("mean", mean))
        self.std = self._numbers("std", file.attrs.get("std", std))

    def _numbers(self, name, values):
        """The attribute `mean` or `std` as a tuple of float."""
        try:
            return tuple(np.ravel(np.asarray(values, dtype=np.float64)).tolist())
        except (TypeError, ValueError):
            raise UserError(f"{self.path}: attribute {name} = {short(values, 100)}: expected numbers") from None

    def _whole(self, declared):
        """The attribute num_classes as an int."""
        number = np.asarray(declared)
        if number.size == 1 and number.dtype.kind in "iuf" and number.item() >= 1 and number.item() % 1 == 0:
            return int(number.item())
        raise UserError(f"{self.path}: attribute num_classes = {short(declared, 100)}: expected a whole number >= 1")

    def column(self, name, split="train"):
        if name == "labels":
            return self.labels[split]
        with readable(self.path) as file:
            column = file.get(f"{split}/{name}")
            if column is None and name == "brightness":
                return super().column(name, split)
            if not isinstance(column, h5py.Dataset) or column.shape != (len(self.labels[split]),):
                columns = ", ".join(sorted(set(file[split]) - {"images"}))
                raise UserError(
                    f"{self.path}: has no column {split}/{name} with one value per sample; {split} contains {columns} "
                    "(data prepare --keep NAME stores a column of words)"
                )
            return column[:]

    def columns(self, split="train"):
        with readable(self.path) as file:
            return {
                name: _fixed_width(column[:])
                for name, column in file[split].items()
                if name not in ("labels", "images")
                and isinstance(column, h5py.Dataset)
                and column.shape[:1] == file[f"{split}/labels"].shape
            }

    def read(self, split, indices):
        """See `Source.read`; reads the file chunk by chunk, and needs memory for the result and one chunk."""
        if not len(indices):
            return np.empty((0, *self.shape), self.dtype)
        with readable(self.path) as file:
            images = file[f"{split}/images"]
            rows = np.empty((len(indices), *self.shape), dtype=images.dtype)
            begin = 0
            while begin < len(indices):
                start = indices[begin] // self.rows_at_once * self.rows_at_once
                end = int(np.searchsorted(indices, start + self.rows_at_once))
                wanted = indices[begin:end]
                piece = images[wanted[0] : wanted[-1] + 1]
                rows[begin:end] = piece if len(piece) == len(wanted) else piece[wanted - wanted[0]]
                begin = end
        if rows.dtype.kind == "f" and not np.isfinite(rows).all():
            bad = indices[~np.isfinite(rows.reshape(len(rows), -1)).all(1)][0]
            found = f"{split}/images contains a value that is not finite in sample {bad}"
            raise UserError(f"{self.path}: {found}: expected finite numbers", f"sample {bad}")
        return rows


def _fixed_width(column):
    """A column in a type that `write_file` writes: texts of variable length become bytes of one length."""
    return column.astype("S") if column.dtype.kind == "O" else column


def digits_file():
    """The path of the file in scikit-learn that contains the handwritten digits.

    Raises:
        UserError: if scikit-learn is missing.
    """
    found = importlib.util.find_spec("sklearn")  # does not import it
    if found is None:
        raise UserError("task.data = digits: scikit-learn, which contains them, is missing")
    return pathlib.Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"


def _read_digits():
    """([1797, 8, 8] float64 values in 0..16, [1797] int64 labels) of scikit-learn's handwritten digits.

    Importing scikit-learn takes each rank a second of CPU time, reading the file that it contains 0.03.
    """
    path = digits_file()
    with attempt("read", path):
        table = np.loadtxt(path, delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)


class DigitsSource(Source):
    """1797 handwritten digits of 8x8 pixels (UCI), embedded in scikit-learn; every fifth is a test sample."""

    def __init__(self):
        images, target = _read_digits()
        is_test = np.arange(len(target)) % 5 == 4
        pixels = np.round(images * (255 / 16)).astype(np.uint8)
        self._images = {"train": pixels[~is_test], "test": pixels[is_test]}
        mean, std = NORMALISATION["digits"]
        labels = {"train": target[~is_test], "test": target[is_test]}
        super().__init__("digits", labels, shape=(8, 8), num_classes=10, mean=mean, std=std)

    def read(self, split, indices):
        return self._images[split][indices]
