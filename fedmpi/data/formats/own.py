"""Data sets in the forms in which people have them, read for `fedmpi.data.prepare`.

Each reader returns (splits, attributes): splits is {"train/images": rows, ...} with arrays, or
anything that has a length, shape and dtype and gives rows by slices.
"""

import csv
import gzip
import io
import pathlib
import struct
import tarfile
import zipfile
import zlib

import numpy as np

from fedmpi.data.formats.pickled import cifar10_records
from fedmpi.errors import UserError
from fedmpi.streams import generator

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
DAMAGED = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    zlib.error,
    zipfile.BadZipFile,
    tarfile.TarError,
)  # what reading raises


def read_idx(path):
    """The array of an IDX file of bytes, gzipped or not (the format of MNIST's files)."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if content[:3] != b"\0\0\x08":
            raise UserError(f"{path}: expected an IDX file of bytes, and it begins with {content[:4].hex(' ')}")
        shape = struct.unpack(f">{content[3]}I", content[4 : 4 + 4 * content[3]])
        return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape)
    except (*DAMAGED, struct.error, IndexError) as error:
        raise UserError(f"{path}: cannot be read as IDX: {error}") from None


def mnist_like(folder):
    """MNIST or Fashion-MNIST from their four IDX files."""
    splits = {}
    # where torchvision keeps them, in a folder that it was given
    inner = [folder / path for path in ("raw", "MNIST/raw", "FashionMNIST/raw")]
    root = next((path for path in inner if path.is_dir() and not any(folder.glob("*-ubyte*"))), folder)
    for split, prefix in (("train", "train"), ("test", "t10k")):
        for kind, ending in (("images", "idx3-ubyte"), ("labels", "idx1-ubyte")):
            names = [f"{prefix}-{kind}{mark}{ending}{packed}" for mark in "-." for packed in (".gz", "")]
            splits[f"{split}/{kind}"] = read_idx(_one_of(root, *names))
    return splits, {"num_classes": 10}


def cifar10(folder):
    """CIFAR-10 from the tar file of its binary or its Python version, the folder in it, or the six files."""
    for kind, inside, ending in (("binary", "cifar-10-batches-bin", ".bin"), ("python", "cifar-10-batches-py", "")):
        batches = {"train": [f"data_batch_{i}{ending}" for i in range(1, 6)], "test": [f"test_batch{ending}"]}
        tar, bases = folder / f"cifar-10-{kind}.tar.gz", [folder / inside, folder]
        base = next((base for base in bases if (base / batches["train"][0]).is_file()), None)
        if tar.is_file() or base is not None:
            break
    else:
        raise UserError(
            f"{folder}: holds no data_batch_1.bin; expected cifar-10-binary.tar.gz, cifar-10-python.tar.gz, "
            "or what is inside of one"
        )
    names = [*batches["train"], *batches["test"]]
    files = _from_tar(tar, names) if tar.is_file() else {n: _one_of(base, n).read_bytes() for n in names}
    if kind == "python":
        files = {name: cifar10_records(content, f"{folder}: {name}") for name, content in files.items()}
    splits = {}
    for split, parts in batches.items():
        content = np.frombuffer(b"".join(files[name] for name in parts), np.uint8)
        if len(content) == 0 or len(content) % 3073:
            raise UserError(f"{folder}: {parts[0]}: expected records of 3073 bytes, a label and 32x32x3 pixels")
        records = content.reshape(-1, 3073)
        splits[f"{split}/labels"] = records[:, 0]
        splits[f"{split}/images"] = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return splits, {"num_classes": 10}


def _from_tar(path, names):
    """Name -> bytes of members of a tar file, found by their last name."""
    try:
        with tarfile.open(path) as tar:
            members = {member.name.rsplit("/", 1)[-1]: member for member in tar.getmembers() if member.isfile()}
            missing = [name for name in names if name not in members]
            if missing:
                raise UserError(f"{path}: holds no {missing[0]}")
            return {name: tar.extractfile(members[name]).read() for name in names}
    except DAMAGED as error:
        raise UserError(f"{path}: cannot be read as tar: {error}") from None


def tiny_imagenet(folder):
    """Tiny-ImageNet from its zip file or the folder in it; the validation images are the test set."""
    root = _inside(folder, "tiny-imagenet-200.zip", "tiny-imagenet-200")
    classes = _text(root / "wnids.txt").split()
    number = {name: index for index, name in enumerate(sorted(classes))}
    annotations = root / "val" / "val_annotations.txt"
    lines = [line.split("\t") for line in _text(annotations).splitlines()]
    for line in lines:
        if len(line) < 2 or line[1] not in number:
            raise UserError(f"{annotations}: expected lines of a file and a class of wnids.txt, not {line[:2]}")
    test = [(root / "val" / "images" / line[0], number[line[1]]) for line in lines]
    train = [(file, number[name]) for name in sorted(classes) for file in _files(root / "train" / name / "images")]
    splits = {}
    for split, files in (("train", train), ("test", test)):
        splits[f"{split}/images"] = Images([file for file, _ in files], colour=True, size=64)
        splits[f"{split}/labels"] = np.array([label for _, label in files], np.uint8)
    return splits, {"num_classes": len(classes), "class_names": sorted(classes)}


def wikitext2(folder):
    """WikiText-2 from its zip file, the folder in it, or three text files."""
    return text(_inside(folder, "wikitext-2-v1.zip", "wikitext-2"))


def text(root):
    """A text for language modelling: {train,test}.txt or wiki.*.tokens, words and lines as they are; valid if there."""
    splits = {}
    for split in ("train", "valid", "test"):
        found = [root / name for name in (f"wiki.{split}.tokens", f"{split}.txt") if (root / name).is_file()]
        if not found and split == "valid":
            continue
        if not found:
            raise UserError(f"{root}: holds neither wiki.{split}.tokens nor {split}.txt")
        splits[f"{split}/text"] = np.frombuffer(_content(found[0]), np.uint8)
        if not len(splits[f"{split}/text"]):
            raise UserError(f"{found[0]}: is empty: expected words")
    return splits, {}


class Images:
    """Image files as rows: [n, size, size] grey or [n, size, size, 3] bytes, read when asked for.

    Args:
        files: paths (also inside a zip file). colour: whether rows have three channels; None: as in
            the first file. size: side length that images are brought to; None: as they are, all alike.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, files, colour=None, size=None):
        self._files, self._size = files, size
        is_grey = colour is False or (colour is None and self._open(files[0], None).mode in ("1", "L"))
        self._mode = "L" if is_grey else "RGB"
        self.shape = (len(files), *self._row(files[0]).shape)

    def __len__(self):
        return len(self._files)

    def __getitem__(self, rows):
        images = np.empty((len(self._files[rows]), *self.shape[1:]), np.uint8)
        for image, file in zip(images, self._files[rows]):
            row = self._row(file)
            if row.shape != image.shape:
                given = f"{row.shape[1]}x{row.shape[0]}"
                raise UserError(f"{file}: is {given} pixels, {self._files[0]} is another size: use --size")
            image[:] = row
        return images

    def _row(self, file):
        image = self._open(file, self._mode)
        if self._size and image.size != (self._size, self._size):
            image = image.resize((self._size, self._size))
        return np.asarray(image)

    @staticmethod
    def _open(file, mode):
        try:
            from PIL import Image
        except ImportError:
            raise UserError("images need pillow: pip install 'fedmpi[images]'") from None
        try:
            image = Image.open(io.BytesIO(file.read_bytes()))
            return image.convert(mode) if mode else image
        except (*DAMAGED, SyntaxError, Image.DecompressionBombError) as error:
            raise UserError(f"{file}: cannot be read as an image: {error}") from None


def image_folder(root, options):
    """root/train/CLASS/* and root/test/CLASS/* (training, testing, val), or root/CLASS/* and a share for testing."""
    first = next((root / name for name in ("train", "training") if (root / name).is_dir()), None)
    if first is None:
        files, labels, names = _by_class(root)
        chosen = _split(labels, options)
        files = {split: [files[row] for row in rows] for split, rows in chosen.items()}
        labels = {split: labels[rows] for split, rows in chosen.items()}
    else:
        test = next((root / name for name in ("test", "testing") if (root / name).is_dir()), root / "val")
        if not test.is_dir():
            raise UserError(f"{root}: holds {first.name}/ and no test/: expected both, with a folder per class in each")
        found = {"train": _by_class(first), "test": _by_class(test)}
        files, labels, names = ({split: found[split][i] for split in found} for i in range(3))
        if names["train"] != names["test"]:
            raise UserError(f"{test}: expected the folders of {first}: {', '.join(names['train'][:10])}")
        names = names["train"]
    train = Images(files["train"], size=options.size)
    test = Images(files["test"], colour=len(train.shape) == 4, size=options.size)
    splits = {"train/images": train, "test/images": test}
    splits |= {f"{split}/labels": labels[split] for split in ("train", "test")}
    return splits, {"num_classes": len(names), "class_names": names}


def _by_class(root):
    """(image files, their labels, names of the classes) of root/CLASS/*."""
    names = sorted(folder.name for folder in root.iterdir() if folder.is_dir()) if root.is_dir() else []
    files = {name: sorted(f for f in (root / name).rglob("*") if f.suffix.lower() in IMAGE_ENDINGS) for name in names}
    names = [name for name in names if files[name]]
    if not names:
        raise UserError(f"{root}: expected one folder of images per class")
    labels = np.concatenate([np.full(len(files[name]), label) for label, name in enumerate(names)])
    return sum((files[name] for name in names), []), labels, names


def npz(path, options):
    """Arrays saved by numpy: x_train, y_train, x_test, y_test, or x and y of which a share is for testing."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except DAMAGED as error:
        raise UserError(f"{path}: cannot be read as npz: {' '.join(str(error).split())}") from None
    if {"x_train", "y_train", "x_test", "y_test"} <= set(arrays):
        rows = {split: arrays[f"x_{split}"] for split in ("train", "test")}
        labels = {split: arrays[f"y_{split}"].squeeze() for split in rows}
    elif {"x", "y"} <= set(arrays):
        all_labels = arrays["y"].squeeze()
        if all_labels.ndim != 1 or arrays["x"].ndim == 0 or len(all_labels) != len(arrays["x"]):
            raise UserError(f"{path}: y is {list(arrays['y'].shape)}: expected one label per row of x")
        chosen = _split(all_labels, options)
        rows = {split: arrays["x"][at] for split, at in chosen.items()}
        labels = {split: all_labels[at] for split, at in chosen.items()}
    else:
        raise UserError(f"{path}: holds {', '.join(arrays) or 'nothing'}: expected x and y, or x_train, ..., y_test")
    labels, attributes = _numbered(labels)
    splits = {f"{split}/images": of_split for split, of_split in _plain(rows).items()}
    return splits | {f"{split}/labels": of_split for split, of_split in labels.items()}, attributes


def _plain(rows):
    """{split: rows} with integers and truth values as bytes, or as float32 where they are no bytes."""
    if any(of_split.dtype.kind not in "biu" for of_split in rows.values()):
        return rows
    fit = all(of_split.min(initial=0) >= 0 and of_split.max(initial=0) <= 255 for of_split in rows.values())
    return {split: of_split.astype(np.uint8 if fit else np.float32) for split, of_split in rows.items()}


def _numbered(labels):
    """{split: labels} with words and truth values as numbers, and the attributes that say which."""
    if any(of_split.dtype.kind not in "USb" for of_split in labels.values()):
        return labels, {}
    names, numbers = np.unique(np.concatenate(list(labels.values())), return_inverse=True)
    numbers = np.split(numbers, np.cumsum([len(of_split) for of_split in labels.values()])[:-1])
    return dict(zip(labels, numbers)), {"num_classes": len(names), "class_names": names.astype(str).tolist()}


def table(path, options):
    """A CSV file with a header: numbers are features, words are columns to split by, one column the label."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            names, *rows = list(csv.reader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read as CSV with a header: {error}") from None
    label = options.label or (names[-1] if names else "")
    if label not in names or len(rows) < 2:
        raise UserError(f"{path}: expected rows and a column {label}; its header is {', '.join(names)}")
    again = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if again is not None:
        raise UserError(f"{path}: the header names {again} twice: expected another name for each column")
    while rows and not rows[-1]:  # blank lines at the end
        rows.pop()
    for line, row in enumerate(rows, start=2):
        if len(row) != len(names):
            raise UserError(f"{path}: line {line} has {len(row)} fields: expected {len(names)}, as in the header")
    columns = {name: np.array(values) for name, values in zip(names, zip(*rows))}
    classes, labels = np.unique(columns.pop(label), return_inverse=True)
    if all(name.lstrip("-").isdigit() for name in classes):  # 0, 2, 10 in the order of numbers
        order = np.argsort(classes.astype(int))
        classes, labels = classes[order], np.argsort(order)[labels]
    features, words = {}, {}
    for name, values in columns.items():
        try:
            features[name] = values.astype(np.float32)
        except ValueError:
            _see_that_it_is_words(path, name, values)
            words[name] = np.char.encode(values, "utf-8")
    if not features:
        raise UserError(f"{path}: expected at least one column of numbers besides {label}")
    matrix = np.stack(list(features.values()), axis=1)
    splits = {}
    for split, chosen in _split(labels, options).items():
        splits |= {f"{split}/images": matrix[chosen], f"{split}/labels": labels[chosen]}
        splits |= {f"{split}/{name}": values[chosen] for name, values in words.items()}
    return splits, {"num_classes": len(classes), "class_names": classes.tolist(), "feature_names": list(features)}


def _see_that_it_is_words(path, name, values):
    """A column that is not all numbers is one of words: no number is only missing, and no name is taken."""
    blank = np.char.strip(values) == ""
    try:
        values[~blank].astype(np.float32)
    except ValueError:
        if name in ("images", "labels"):
            raise UserError(f"{path}: a column of words is called {name}: expected another name for it") from None
        return
    line = 2 + int(np.flatnonzero(blank)[0])
    raise UserError(f"{path}: line {line} has nothing in the column {name}: expected a number in every line")


def own(path, options):
    """One's own data, by what the path is: .npz, .csv, a folder of texts or a folder of images."""
    if path.suffix == ".npz":
        return npz(path, options)
    if path.suffix == ".csv":
        return table(path, options)
    if path.is_dir():
        is_text = any((path / name).is_file() for name in ("train.txt", "wiki.train.tokens"))
        return text(path) if is_text else image_folder(path, options)
    if path.suffix in (".h5", ".hdf5"):
        raise UserError(f"--from {path}: is HDF5 already: train with --data {path}")
    raise UserError(f"--from {path}: expected a folder of images or texts, or a file ending in .npz or .csv")


def _split(labels, options):
    """{"train": rows, "test": rows} in the order of the file; a random share is for testing."""
    num_test = round(options.test_share * len(labels))
    if not 0 < num_test < len(labels):
        raise UserError(f"--test-share {options.test_share}: leaves {num_test} of {len(labels)} samples for testing")
    order = generator(options.seed, "test share").permutation(len(labels))
    return {"train": np.sort(order[num_test:]), "test": np.sort(order[:num_test])}


def _one_of(folder, *names):
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder}: holds no {' or '.join(names)}")


def _inside(folder, archive, name):
    """The folder `name`: in a zip file, beside it, or `folder` itself."""
    if (folder / archive).is_file():
        try:
            return zipfile.Path(folder / archive) / name
        except (zipfile.BadZipFile, OSError) as error:
            raise UserError(f"{folder / archive}: cannot be read as zip: {error}") from None
    return folder / name if (folder / name).is_dir() else pathlib.Path(folder)


def _content(file):
    try:
        return file.read_bytes()
    except DAMAGED as error:
        raise UserError(f"{file}: cannot be read: {error}") from None


def _text(file):
    try:
        return _content(file).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: cannot be read: {error}") from None


def _files(folder):
    """The files of a folder, also inside a zip file, by name."""
    try:
        return sorted(folder.iterdir(), key=lambda file: file.name)
    except (*DAMAGED, NotADirectoryError) as error:
        raise UserError(f"{folder}: cannot be read: {error}") from None
