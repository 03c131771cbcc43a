"""Readers of data sets in the formats in which people have them, one file per format.

A reader is called as `read(path, options)` with a `fedmpi.prepare.formats.common.ReaderOptions` and returns
(splits, attributes). `splits` maps names of the HDF5 layout ("train/images", "test/labels", "train/text") to
arrays, or to objects with a length, a shape, a dtype and rows by slices, which are read only when written.
`attributes` are those of the HDF5 file. A reader raises `UserError` if the files are damaged or incomplete.
"""

from fedmpi.ground.errors import UserError
from fedmpi.prepare.formats import cifar10, federated, frames, idx, image_table, images, npz, table, text, tiny_imagenet

OFFICIAL_READERS = {
    "mnist": idx.read,
    "fashion_mnist": idx.read,
    "cifar10": cifar10.read,
    "tiny_imagenet": tiny_imagenet.read,
    "wikitext2": text.read_wikitext2,
}
ALSO_AS_IMAGES = ("mnist", "fashion_mnist", "cifar10")  # official data sets that people also have as image files
ENDINGS = ", ".join([*frames.TEXTS, *frames.TYPED])
HDF5_ENDINGS = (".h5", ".hdf5")


def find_reader(name, path):
    """(reader, the path to call it with) for the files of a data set.

    The name decides for the official data sets, which are read from a folder. The ending or content of the
    path decides for all others, and for official ones that come as .npz, .csv or a folder of images.

    Args:
        name: of the data set. path: `pathlib.Path` of a file or folder that exists; of an official data set
            also of one of its files.

    Raises:
        UserError: if no reader reads such a file.
    """
    if name in OFFICIAL_READERS and not _is_general(name, path):
        return OFFICIAL_READERS[name], path.parent if path.is_file() else path
    if frames.table_ending(path):
        return image_table.read if image_table.image_column(path) else table.read, path
    if federated.find_files(path):
        return federated.read, path
    if path.is_dir():
        return text.read if text.is_text_folder(path) else images.read, path
    if path.suffix == ".npz":
        return npz.read, path
    if path.suffix in HDF5_ENDINGS:
        raise UserError(f"--from {path}: is already an HDF5 file: train with --data {path}")
    raise UserError(f"--from {path}: expected a folder of images or texts, or a file ending in .npz, {ENDINGS}")


def _is_general(name, path):
    """Whether an official data set comes in a general format and not as its official files."""
    if path.is_dir():
        return name in ALSO_AS_IMAGES and images.train_folder(path) is not None
    return path.suffix in (".npz", *HDF5_ENDINGS) or frames.table_ending(path) is not None
