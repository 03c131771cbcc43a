"""What several readers share: their options, and the reading of files that may be damaged."""

import dataclasses
import pathlib
import zipfile
from collections.abc import Sequence

import numpy as np

from fedmpi.ground.errors import UserError, attempt
from fedmpi.ground.files.limits import check_file, unpacked
from fedmpi.ground.streams import generator
from fedmpi.ground.text import short
from fedmpi.prepare.formats.frames import Reading

LEAST = 5  # rows that a number or name must be of before other silos get it
MOST_NAMED, LONGEST_PROBLEM = 10, 180  # files that a message names if several cannot be used; characters for each


@dataclasses.dataclass(frozen=True)
class ReaderOptions:
    """Choices for data that are not official; each reader uses those that concern its format.

    Attributes:
        test_share: share in (0, 1) of the samples that become the test set, if the data have none.
        test_from: path of a table that is the test set, or None.
        seed: of the random choice of these samples.
        label: column of the label in a table; None: the last.
        missing: what happens to empty fields of a table, one of `fedmpi.prepare.formats.features.MISSING`; None:
            refuse, or what the file of `columns` says.
        one_hot: columns of words in a table that become features. columns: path of the file that silos share, or None.
        drop, id, keep, features: names of columns: those left out; not learned from, and shown in predictions; not
            learned from; and, if there are any, the only features. group: column of samples that stay together.
        least: rows that a category must have to become a feature, and of which a median is.
        classes: names of all classes, or () for those of the data. reading: how fields of a table are read.
        silo: name of the client whose data these are, or None.
        size: pixels per side that images are resized to; None: images keep their size.
        max_unpacked: GiB that a file may unpack to; None: see `fedmpi.ground.files.limits`.
        follow_links: whether images may lie outside of the folder, where symbolic links lead to.
        mode: pillow's mode that images are converted to, like RGB; None: they must have one. layout: letters of the
            axes of arrays, like nchw; None: as their shape suggests. masks: folder with a mask for each image, or None.
    """

    test_share: float = 0.2
    test_from: pathlib.Path | None = None
    seed: int = 0
    label: str | None = None
    size: int | None = None
    missing: str | None = None
    one_hot: Sequence = ()
    columns: str | None = None
    least: int = 1
    drop: Sequence = ()
    id: Sequence = ()
    group: str | None = None
    keep: Sequence = ()
    features: Sequence = ()
    classes: Sequence = ()
    reading: Reading = Reading()
    silo: str | None = None
    mode: str | None = None
    layout: str | None = None
    masks: pathlib.Path | None = None
    max_unpacked: float | None = None
    follow_links: bool = False


def choose_test_set(labels, options, groups=None):
    """{"train": rows, "test": rows}, each sorted; a random share of each class, or of the groups, is the test set.

    Args:
        labels: [n]. groups: [n] numbers from 0; samples of one group are in the same set. None: each is its own.

    Raises:
        UserError: if the training set or the test set would be empty.
    """
    is_share = 0 < options.test_share < 1  # false for nan
    names = np.unique(labels, return_inverse=True)[1] if groups is None else np.zeros(groups.max(initial=-1) + 1)
    num_test = round(options.test_share * len(names)) if is_share else 0
    if not 0 < num_test < len(names):
        units = "samples" if groups is None else f"groups ({options.group})"
        raise UserError(
            f"--test-share {options.test_share}: makes {num_test} of {len(names)} {units} the test set: "
            f"expected a share that leaves {units} for both sets"
        )
    order = generator(options.seed, "test share").permutation(len(names))
    order = order[np.argsort(names[order], kind="stable")]  # class by class: evenly spaced ones are a share of each
    is_test = np.zeros(len(names), bool)
    is_test[order[(2 * np.arange(num_test) + 1) * len(names) // (2 * num_test)]] = True
    is_test = is_test if groups is None else is_test[groups]
    return {"train": np.flatnonzero(~is_test), "test": np.flatnonzero(is_test)}


def divided(rows, /, **arrays):
    """{"train/NAME": its rows, "test/NAME": its rows} of arrays; `rows` as from `choose_test_set`."""
    return {f"{split}/{name}": values[chosen] for split, chosen in rows.items() for name, values in arrays.items()}


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
        UserError: if it cannot be read, or unpacks to too much.
    """
    with attempt("read", file, Exception):
        if isinstance(file, zipfile.Path):
            packed = file.root.getinfo(file.at).compress_size
            return unpacked(file.open("rb"), file, packed)
        if isinstance(file, pathlib.Path):  # and not a cell of a table
            check_file(file)
        return file.read_bytes()


def attempt_all(files, read):
    """[the result of `read(file)`] of all files.

    Raises:
        UserError: if it raises one; of several, the line names the files and what is wrong with each of them.
    """
    results, problems = [], []
    for file in files:
        try:
            results.append(read(file))
        except UserError as error:
            problems.append(str(error))
    refuse_all(problems, f"{len(results) + len(problems)} files")
    return results


def refuse_all(problems, among):
    """Raise a `UserError` with all problems, each the text of an error, among so many ("9 files"); none: do nothing."""
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        more = f"; and {len(problems) - MOST_NAMED} more" if len(problems) > MOST_NAMED else ""
        named = "; ".join(short(problem, LONGEST_PROBLEM) for problem in problems[:MOST_NAMED])
        raise UserError(f"{len(problems)} of {among} cannot be used: {named}{more}")
