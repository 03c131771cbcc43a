"""Images whose labels are images, too: the class of each pixel, in a second folder."""

import numpy as np

from fedmpi.data.source import ACCOUNT
from fedmpi.ground.errors import UserError
from fedmpi.prepare.formats.common import attempt_all, choose_test_set, divided
from fedmpi.prepare.formats.images import check_images, image_splits, is_image, open_raw

MOST_CLASSES = 50  # more values are brightnesses, or a picture saved as JPEG


class Masks:
    """Mask files that look like one array, [n, height, width] uint8; slices read them.

    Args:
        files: paths. values: pixel values, in the order of their classes. shape: [height, width] of all.
        size: pixels per side that masks are resized to, each pixel by its nearest one; None: they keep their size.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, files, values, shape, size=None):
        self._files, self._values, self._size = files, np.array(values), size
        self.shape = (len(files), *shape)

    def __len__(self):
        return len(self._files)

    def __getitem__(self, rows):
        return np.stack([self._classes(file) for file in self._files[rows]])

    def _classes(self, file):
        image = open_raw(file)
        pixels = np.asarray(image.resize((self._size, self._size), 0) if self._size else image)  # 0: nearest
        if pixels.shape != self.shape[1:]:
            raise UserError(f"{file}: is {list(pixels.shape)}: expected {list(self.shape[1:])}, the shape of its image")
        order = np.argsort(self._values)
        found = order[np.searchsorted(self._values[order], pixels).clip(0, len(order) - 1)]
        if (odd := pixels[self._values[found] != pixels]).size:
            known = ", ".join(map(str, self._values))
            raise UserError(f"{file}: has a pixel {odd[0]}: expected one of {known} (--classes)")
        return found.astype(np.uint8)


def read(root, options):
    """A folder of images, and one of masks that have the same names but for the ending (`ReaderOptions.masks`).

    A mask has one channel; its values, or the colours of its palette by number, are the classes, in rising order or in
    that of `ReaderOptions.classes`. A random share of the images is the test set.

    Returns:
        images as `ImageFiles`; masks [n, height, width] uint8; labels [n], the most frequent class above 0 of a mask,
        or 0; attributes num_classes, class_names.
    """
    files = [file for file in sorted(root.rglob("*")) if is_image(file, root)]
    names = {file.relative_to(options.masks).with_suffix(""): file
             for file in sorted(options.masks.rglob("*")) if is_image(file, options.masks)}  # fmt: skip
    without = [file for file in files if file.relative_to(root).with_suffix("") not in names]
    if not files or without:
        problem = f"{len(without)} images have no mask, like {without[0]}" if files else "contains no image"
        raise UserError(f"{options.masks if files else root}: {problem}: expected one of the same name for each image")
    masks = [names.pop(file.relative_to(root).with_suffix("")) for file in files]
    check_images([(files, root), (masks, options.masks)], options.follow_links)
    counts = attempt_all(masks, lambda file: np.unique(_pixels(file), return_counts=True))
    values = sorted({*np.concatenate([found for found, _ in counts]).astype(int).tolist()})  # black and white: 0, 1
    if options.classes:
        values = [int(name) if name.isdecimal() else name for name in options.classes]
        if not all(isinstance(value, int) for value in values):
            raise UserError(f"--classes {','.join(options.classes)}: expected values of pixels, like 0,255, for masks")
    if len(values) > MOST_CLASSES:
        raise UserError(f"{options.masks}: masks have {len(values)} values: expected at most {MOST_CLASSES} classes")
    number = {value: position for position, value in enumerate(values)}
    ranked = [sorted(zip(-frequent, found), key=lambda pair: (number.get(pair[1], 0) == 0, pair[0]))
              for found, frequent in counts]  # fmt: skip
    labels = np.array([number.get(best[0][1], 0) for best in ranked])
    rows = choose_test_set(labels, options)
    splits, mode = image_splits(root, {split: [files[row] for row in rows[split]] for split in rows}, options)
    for split, chosen in rows.items():
        shape = splits[f"{split}/images"].shape[1:3]
        splits[f"{split}/masks"] = Masks([masks[row] for row in chosen], values, shape, options.size)
    splits |= divided(rows, labels=labels)
    assumed = [f"pixels {', '.join(map(str, values))} of masks are the classes 0 to {len(values) - 1}", mode,
               "the label of an image is the most frequent class of its mask besides 0"]  # fmt: skip
    not_used = {str(file): "has no image" for file in names.values()}
    return splits, {"num_classes": len(values), "class_names": [*map(str, values)],
                    ACCOUNT: {"assumed": assumed, "not_used": not_used}}  # fmt: skip


def _pixels(file):
    pixels = np.asarray(open_raw(file))
    if pixels.ndim != 2 or pixels.dtype.kind not in "bui":
        expected = "expected one whole number per pixel, its class"
        raise UserError(f"{file}: is {pixels.dtype}{list(pixels.shape)}: {expected}")
    return pixels
