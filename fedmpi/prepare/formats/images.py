"""Image files, in one folder per class."""

import functools
import io
import math
import os
from collections import Counter

import numpy as np

from fedmpi.data.source import ACCOUNT, GROUP, SPLITS
from fedmpi.ground.errors import UserError, attempt
from fedmpi.ground.files.limits import check_file, check_unpacked
from fedmpi.prepare.formats import medical
from fedmpi.prepare.formats.common import attempt_all, choose_test_set, divided, read_bytes, refuse_all
from fedmpi.prepare.formats.frames import Reading, read_table
from fedmpi.prepare.formats.npz import number_words

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
# What their content may be, whatever their ending: pillow would start another program for a page of PostScript.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")

DEPTH = 2  # of CLASS/image.png
LABELS = ("labels.csv", "metadata.csv")  # beside the images; the second is Hugging Face's


class ImageFiles:
    """Image files that look like one array, [n, height, width] grey or [n, height, width, channels]; slices read them.

    Bytes are uint8; deeper pixels (16 bits, floats) are float32, as they are.

    Args:
        files: paths, which may lie in a zip file.
        mode: of pillow ("L", "RGB"), to which all images are converted; None: all must have that of the first.
        size: pixels per side that images are resized to; None: all must have the size of the first.
        others: further files, which a message names, too, if they cannot be used.

    Attributes:
        mode: of all images. converted, resized: those of the files read so far that had another mode or size.
    """

    def __init__(self, files, mode=None, size=None, others=()):
        self._files, self._size, self._mode = files, size, mode
        self.converted, self.resized = set(), set()
        try:
            first = self._begin(files[0])
        except UserError:
            attempt_all([*files, *others], lambda file: self._begin(file) is None)
            raise
        self._all = [*files, *others]
        self.shape, self.dtype = (len(files), *first.shape), first.dtype

    def __len__(self):
        return len(self._files)

    def __getitem__(self, rows):
        images = np.empty((len(self._files[rows]), *self.shape[1:]), self.dtype)
        for image, file in zip(images, self._files[rows]):
            try:
                image[:] = self._equal(file)
            except UserError:
                attempt_all(self._all, lambda other: self._equal(other) is None)
                raise
        return images

    def _begin(self, file):
        """The pixels of a file that is the first one, whose mode all others must have."""
        self._is_medical = medical.is_medical(file)
        self.mode = self._mode or (medical.read(file)[1] if self._is_medical else _open_image(file).mode)
        return self._pixels(file)

    def _equal(self, file):
        """The pixels of a file, of the same shape as the first."""
        pixels = self._pixels(file)
        if pixels.shape != self.shape[1:]:
            hint = "" if self._is_medical else "; --size N resizes all images"
            expected = f"expected {_format_size(self.shape[1:])}, the size of {self._files[0]}{hint}"
            raise UserError(f"{file}: is {_format_size(pixels.shape)} pixels: {expected}")
        return pixels

    def _pixels(self, file):
        if self._is_medical or medical.is_medical(file):
            return self._medical(file)
        image = _open_image(file)
        if self._mode is None and image.mode != self.mode:
            raise UserError(
                f"{file}: has the mode {image.mode}: expected {self.mode}, the mode of {self._files[0]}; --mode "
                f"{'RGB' if 'RGB' in (image.mode, self.mode) else self.mode} converts all images"
            )
        if self._mode and image.mode[0] in "IF" and self._mode[0] not in "IF":  # pillow would make most pixels white
            raise UserError(f"{file}: has the mode {image.mode}, deeper than {self._mode}: expected shallower images")
        with attempt("read as an image", file, Exception):
            if self._mode and image.mode != self._mode:
                image = image.convert(self._mode)
                self.converted.add(file)
            if self._size and image.size != (self._size, self._size):
                image = image.resize((self._size, self._size))
                self.resized.add(file)
            pixels = np.asarray(image)
        return pixels if pixels.dtype == np.uint8 else pixels.astype(np.float32)

    def _medical(self, file):
        pixels, mode = medical.read(file) if medical.is_medical(file) else (None, "that of a picture")
        if mode != self.mode or self._size:
            expected = "no --size" if self._size else f"{self.mode}, the mode of {self._files[0]}, and no --mode"
            raise UserError(f"{file}: has the mode {mode}: expected {expected}")
        return pixels


def _open_image(file):
    """A pillow image of a file; black and white is grey, and a palette is replaced by its colours."""
    image = open_raw(file)
    plain = {"1": "L", "P": "RGBA" if "transparency" in image.info else "RGB"}
    with attempt("read as an image", file, Exception):
        return image.convert(plain[image.mode]) if image.mode in plain else image


def open_raw(file):
    """A pillow image of a file, turned as its EXIF data say, as viewers do.

    Raises:
        UserError: if it cannot be read, or contains several images.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise UserError("images need pillow: pip install 'fedmpi[images]'") from None
    with attempt("read as an image", file, Exception):
        content = read_bytes(file)
        most, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # pillow's own limit knows no setting of ours
        try:
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            check_unpacked(file, math.prod(image.size) * len(image.getbands()), len(content))
            if getattr(image, "n_frames", 1) > 1:
                raise UserError(f"{file}: contains {image.n_frames} images: expected one per file")
            return ImageOps.exif_transpose(image)
        except UnidentifiedImageError:
            known = ", ".join(FORMATS)
            raise UserError(f"{file}: cannot be read as an image: its format is none of {known}") from None
        finally:
            Image.MAX_IMAGE_PIXELS = most


def _format_size(shape):
    return f"{shape[1]}x{shape[0]}" if len(shape) < 4 else "x".join(map(str, shape[:3]))


def read(root, options):
    """A folder of images: root/train/CLASS/* and root/test/CLASS/*, or root/CLASS/* without a test set.

    The folders may also be called training, testing and val. Without a test set, a random share of the
    images becomes it (`ReaderOptions.test_share`).

    Returns:
        images as `ImageFiles`, read when written; labels [n]; attributes num_classes, class_names (the folders' names,
        sorted, or --classes).
    """
    train, beside, stored, others = train_folder(root), labels_file(root), {}, []
    if beside:
        files, labels, class_names, stored, others = _read_labels(root, beside, options)
    else:
        parts, numbers, names = zip(*(_list_by_class(folder, options.classes) for folder in _folders(root, train)))
        check_images([(sum(parts, []), root)], options.follow_links)
        files, labels, class_names = sum(parts, []), np.concatenate(numbers), names[0]
        if names[-1] != class_names:
            raise UserError(f"{root}: to test: expected the same folders as in {train}: {', '.join(class_names[:10])}")
    if train is None or beside:
        groups = np.unique(stored[options.group], return_inverse=True)[1] if stored else None
        rows = choose_test_set(labels, options, groups)
    else:
        rows = dict(zip(SPLITS, np.split(np.arange(len(files)), [len(parts[0])])))
    images, assumed = image_splits(root, {split: [files[row] for row in rows[split]] for split in rows}, options)
    splits = images | divided(rows, labels=labels, **stored)
    account = {
        "assumed": [assumed],
        "not_used": {str(path.relative_to(root)): why for path, why in _others(root) if path != beside},
    }
    used = {*files}
    left_out = [path for path in root.rglob("*") if is_image(path, root) and path not in used]
    left_out = Counter(path.relative_to(root).parts[0] for path in left_out)
    why = f"not in {beside.name}" if beside else "in no folder of a class"
    account["not_used"] |= {name: f"another column of {beside.name}" for name in others}
    account["not_used"] |= {name: f"{count} images, {why}" for name, count in sorted(left_out.items())}
    if train is not None and not beside:
        account["test_rows"] = "those of the folder"
    elif not beside and (deep := [file for file in used if len(file.relative_to(root).parts) > DEPTH]):
        remark = "are to train and to test: if it is a patient's, use labels.csv with --group"
        account["notes"] = [f"images of one folder, like {min(deep).parent.relative_to(root)}, {remark}"]
    roles = {GROUP: options.group} if stored else {}
    return splits, {"num_classes": len(class_names), "class_names": class_names, ACCOUNT: account, **roles}


def _others(root):
    """(path, why) of each hidden folder, and of each file that is no image."""
    for path in sorted(root.rglob("*")):
        if _is_hidden(path.relative_to(root)):
            if not _is_hidden(path.relative_to(root).parent):
                yield path, "is hidden"
        elif path.is_file() and not is_image(path, root):
            yield path, "is no image"
        elif path.is_dir() and not any(path.iterdir()):
            yield path, "is an empty folder"


def _is_hidden(path):
    return any(part.startswith((".", "__")) for part in path.parts)


def is_image(file, root):
    """Whether a file in a folder is an image and not hidden."""
    is_known = file.suffix.lower() in ENDINGS or medical.is_medical(file)
    return is_known and not _is_hidden(file.relative_to(root))


def check_images(folders, follow_links):
    """Check, before one is read, that all images are regular files, and that no link leads out of their folder.

    A FIFO or a device might never end, and who gave the folder may not know what is read where a link leads to. If one
    is such, the line also names the others that cannot be used.

    Args:
        folders: list of (paths of images, the folder that they are in). follow_links: whether they may be anywhere.

    Raises:
        UserError: if one is elsewhere, or no file.
    """
    every, problems = sum((list(files) for files, _ in folders), []), {}
    for files, root in folders:
        is_inside = functools.cache(functools.partial(_is_below, os.path.realpath(root)))
        for file in files:
            is_link = file.is_symlink()
            try:
                if not follow_links and not (is_inside(file.parent) and (not is_link or is_inside(file))):
                    raise UserError(
                        f"{file}: is elsewhere (--follow-links reads it), where a link leads to: "
                        f"{os.path.realpath(file)}: expected files in {root}"
                    )
                check_file(file)
            except UserError as error:
                problems[file] = str(error)
    if problems:
        found = [problems.get(file) or _problem(file) for file in every]
        refuse_all([*filter(None, found)], f"{len(every)} files")


def _is_below(top, path):
    path = os.path.realpath(path)
    return path == top or path.startswith(top.rstrip(os.sep) + os.sep)


def _problem(file):
    """Why the content of a file is no image, or ""."""
    try:
        _ = medical.read(file) if medical.is_medical(file) else open_raw(file)
    except UserError as error:
        return str(error)
    return ""


def train_folder(root):
    """The folder of training images in `root`, or None."""
    return next((root / name for name in ("train", "training") if (root / name).is_dir()), None)


def image_splits(path, files, options):
    """({"train/images": `ImageFiles`, "test/images": ...}, a line on their mode) of {split: files}.

    Raises:
        UserError: if the two have different modes.
    """
    images = {}
    for split, of_split in files.items():
        others = sum((list(of_other) for other, of_other in files.items() if other != split), [])
        images[f"{split}/images"] = ImageFiles(of_split, options.mode, options.size, others)
    if len(modes := {image_files.mode: image_files.dtype for image_files in images.values()}) > 1:
        expected = "expected one, or --mode"
        raise UserError(f"{path}: images to train and to test have the modes {' and '.join(modes)}: {expected}")
    return images, "images have the mode {}, and are {}".format(*modes.popitem())


def _folders(root, train):
    """The folders that contain one of each class: that of training images and that of test images, or `root`."""
    if train is None:
        return [root]
    test = next((root / name for name in ("test", "testing", "val") if (root / name).is_dir()), None)
    if test is None:
        raise UserError(f"{root}: contains {train.name}/ but no test/: expected both, with a folder per class in each")
    return [train, test]


def labels_file(root):
    """The table of images and their classes in `root`, or None."""
    return next((root / name for name in LABELS if os.path.lexists(root / name)), None)


def _read_labels(root, beside, options):
    """(files, [n] labels, class names, {group: [n] bytes}, names of other columns) of a table `beside` the images.

    Its columns are the files (file_name, or the first), the class, and maybe that of `ReaderOptions.group`.
    """
    check_images([([beside], root)], options.follow_links)
    table = read_table(beside, options.reading or Reading(), lambda names: (names, names))
    names = sorted(table.columns, key=lambda name: name != "file_name")  # otherwise as they are
    label = options.label or names[-1]
    if label not in names[1:]:
        raise UserError(f"{beside}: expected a column of files and a column {label}; it has {', '.join(names)}")
    if options.group and options.group not in names[1:]:
        raise UserError(f"--group {options.group}: {beside} has no such column; it has {', '.join(names[1:])}")
    words, answers = table.columns[names[0]].fillna(""), table.columns[label].fillna("")
    files = [root / word for word in words]
    problems = []
    for row, (word, file, answer) in enumerate(zip(words, files, answers)):
        is_there = not os.path.isabs(word) and is_image(file, root) and file.is_file()
        if not answer or not is_there:
            found = "an empty field" if not answer else f"{file}, which is no image"
            problems.append(f"{beside}: {table.place(row)} has {found}: expected an image in {root} and its class")
    refuse_all(problems, f"{len(files)} rows")
    check_images([(files, root)], options.follow_links)
    numbers, attributes = number_words(beside, {"all": answers.to_numpy(str)}, options.classes)
    if words.duplicated().any():
        raise UserError(f"{beside}: contains {words[words.duplicated()].iloc[0]} twice: expected each image once")
    values = table.columns[options.group].fillna("").to_numpy(str) if options.group else ()
    stored = {options.group: np.char.encode(values, "utf-8")} if options.group else {}
    others = [name for name in names[1:] if name not in (label, options.group)]
    return files, numbers["all"], attributes["class_names"], stored, others


def _list_by_class(root, classes):
    """(image files, [n] labels, class names) of root/CLASS/*; folders without images are no class, unless named so."""
    folders = sorted(f for f in root.iterdir() if f.is_dir() and not _is_hidden(f.relative_to(root)))
    files = {folder.name: sorted(file for file in folder.rglob("*") if is_image(file, root)) for folder in folders}
    found = [name for name in files if files[name]]
    if not found:
        raise UserError(f"{root}: expected one folder of images per class")
    if classes and {*found} - {*classes}:
        odd = ", ".join(sorted({*found} - {*classes}))
        raise UserError(f"{root}: contains the folders {odd}: expected those of --classes {','.join(classes)}")
    class_names = list(classes or found)
    labels = np.concatenate([np.full(len(files[name]), class_names.index(name)) for name in found])
    return sum((files[name] for name in found), []), labels, class_names
