"""What several readers share: their options, and the reading of files that may be damaged."""

import dataclasses
import zipfile

import numpy as np

from fedmpi.errors import UserError, attempt
from fedmpi.streams import generator


@dataclasses.dataclass(frozen=True)
class ReaderOptions:
    """Choices for data that are not official; each reader uses those that concern its format.

    Attributes:
        test_share: share in (0, 1) of the samples that become the test set, if the data have none.
        seed: of the random choice of these samples.
        label: column of the label in a CSV table; None: the last.
        missing: what happens to empty fields of a table, one of `fedmpi.data.formats.features.MISSING`.
        one_hot: columns of words in a table that become features. columns: path of the file that silos share, or None.
        silo: name of the client whose data these are, or None.
        size: pixels per side that images are resized to; None: images keep their size.
    """

    test_share: float = 0.2
    seed: int = 0
    label: str | None = None
    size: int | None = None
    missing: str = "refuse"
    one_hot: tuple = ()
    columns: str | None = None
    silo: str | None = None


def choose_test_set(labels, options):
    """{"train": rows, "test": rows}, each sorted; a random share of the samples is the test set.

    Raises:
        UserError: if the training set or the test set would be empty.
    """
    is_share = 0 < options.test_share < 1  # false for nan
    num_test = round(options.test_share * len(labels)) if is_share else 0
    if not 0 < num_test < len(labels):
        raise UserError(
            f"--test-share {options.test_share}: makes {num_test} of {len(labels)} samples the test set: "
            "expected a share that leaves samples for both sets"
        )
    order = generator(options.seed, "test share").permutation(len(labels))
    return {"train": np.sort(order[num_test:]), "test": np.sort(order[:num_test])}


def first_file(folder, *names):
    """The path of the first of `names` that is a file in `folder`.

    Raises:
        UserError: if the folder contains none of them.
    """
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder}: contains no {' or '.join(names)}")


def open_archive(folder, archive, name):
    """The folder `name`: inside the zip file folder/archive, else folder/name, else `folder` itself.

    Raises:
        UserError: if the zip file is damaged.
    """
    if (folder / archive).is_file():
        with attempt("read as zip", folder / archive, Exception):
            return zipfile.Path(folder / archive) / name
    return folder / name if (folder / name).is_dir() else folder


def read_bytes(file):
    """The content of a file, which may lie in a zip file.

    Raises:
        UserError: if it cannot be read.
    """
    with attempt("read", file, Exception):
        return file.read_bytes()
