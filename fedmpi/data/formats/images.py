"""Image files, in one folder per class."""

import io

import numpy as np

from fedmpi.data.formats.common import choose_test_set
from fedmpi.errors import UserError, attempt

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")


class ImageFiles:
    """Image files that look like one uint8 array, [n, size, size] grey or [n, size, size, 3] colour.

    Slices read the files; nothing else is kept in memory.

    Args:
        files: paths, which may lie in a zip file.
        is_colour: whether rows have three channels; None: as in the first file.
        size: pixels per side that images are resized to; None: all must have the size of the first.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, files, is_colour=None, size=None):
        self._files, self._size = files, size
        is_grey = is_colour is False or (is_colour is None and _open_image(files[0]).mode in ("1", "L"))
        self._mode = "L" if is_grey else "RGB"
        self.shape = (len(files), *self._pixels(files[0]).shape)

    def __len__(self):
        return len(self._files)

    def __getitem__(self, rows):
        images = np.empty((len(self._files[rows]), *self.shape[1:]), np.uint8)
        for image, file in zip(images, self._files[rows]):
            pixels = self._pixels(file)
            if pixels.shape != image.shape:
                raise UserError(
                    f"{file}: is {_format_size(pixels.shape)} pixels: expected {_format_size(image.shape)}, the size "
                    f"of {self._files[0]}; --size N resizes all images"
                )
            image[:] = pixels
        return images

    def _pixels(self, file):
        image = _open_image(file, self._mode)
        if self._size and image.size != (self._size, self._size):
            image = image.resize((self._size, self._size))
        return np.asarray(image)


def _open_image(file, mode=None):
    """A pillow image of a file, converted to a mode like "L" or "RGB" if one is given."""
    try:
        from PIL import Image
    except ImportError:
        raise UserError("images need pillow: pip install 'fedmpi[images]'") from None
    with attempt("read as an image", file, Exception):
        image = Image.open(io.BytesIO(file.read_bytes()))
        return image.convert(mode) if mode else image


def _format_size(shape):
    return f"{shape[1]}x{shape[0]}"


def read(root, options):
    """A folder of images: root/train/CLASS/* and root/test/CLASS/*, or root/CLASS/* without a test set.

    The folders may also be called training, testing and val. Without a test set, a random share of the
    images becomes it (`ReaderOptions.test_share`).

    Returns:
        images [n, height, width] or [n, height, width, 3] uint8, read when written; labels [n];
        attributes num_classes, class_names (the folders' names, sorted).
    """
    train = train_folder(root)
    files, labels, class_names = _read_one_folder(root, options) if train is None else _read_two_folders(root, train)
    train_images = ImageFiles(files["train"], size=options.size)
    test_images = ImageFiles(files["test"], is_colour=len(train_images.shape) == 4, size=options.size)
    splits = {"train/images": train_images, "test/images": test_images}
    splits |= {f"{split}/labels": labels[split] for split in ("train", "test")}
    return splits, {"num_classes": len(class_names), "class_names": class_names}


def train_folder(root):
    """The folder of training images in `root`, or None."""
    return next((root / name for name in ("train", "training") if (root / name).is_dir()), None)


def _read_one_folder(root, options):
    """({split: files}, {split: labels}, class names) of root/CLASS/*."""
    files, labels, class_names = _list_by_class(root)
    rows = choose_test_set(labels, options)
    return (
        {split: [files[row] for row in rows[split]] for split in rows},
        {split: labels[rows[split]] for split in rows},
        class_names,
    )


def _read_two_folders(root, train):
    """What `_read_one_folder` returns, for a folder of training images and one of test images."""
    test = next((root / name for name in ("test", "testing") if (root / name).is_dir()), root / "val")
    if not test.is_dir():
        raise UserError(f"{root}: contains {train.name}/ but no test/: expected both, with a folder per class in each")
    found = {"train": _list_by_class(train), "test": _list_by_class(test)}
    files, labels, class_names = ({split: found[split][i] for split in found} for i in range(3))
    if class_names["train"] != class_names["test"]:
        raise UserError(f"{test}: expected the same folders as in {train}: {', '.join(class_names['train'][:10])}")
    return files, labels, class_names["train"]


def _list_by_class(root):
    """(image files, [n] labels, class names) of root/CLASS/*; folders without images are no class."""
    names = sorted(folder.name for folder in root.iterdir() if folder.is_dir()) if root.is_dir() else []
    files = {name: sorted(f for f in (root / name).rglob("*") if f.suffix.lower() in ENDINGS) for name in names}
    class_names = [name for name in names if files[name]]
    if not class_names:
        raise UserError(f"{root}: expected one folder of images per class")
    labels = np.concatenate([np.full(len(files[name]), label) for label, name in enumerate(class_names)])
    return sum((files[name] for name in class_names), []), labels, class_names
