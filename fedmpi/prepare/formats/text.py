"""Texts for language modelling."""

import numpy as np

from fedmpi.ground.errors import UserError, attempt
from fedmpi.prepare.formats.common import open_archive, read_bytes


def read(folder, options):
    """A text from a folder with train.txt and test.txt, or wiki.train.tokens and wiki.test.tokens; valid is optional.

    Words and lines are kept as they are.

    Returns:
        train/text, test/text and, if there is one, valid/text: [n] uint8, UTF-8 bytes; no attributes.
    """
    splits = {}
    for split in ("train", "valid", "test"):
        names = _file_names(split)
        file = next((folder / name for name in names if (folder / name).is_file()), None)
        if file is None and split == "valid":
            continue
        if file is None:
            raise UserError(f"{folder}: contains neither {' nor '.join(names)}")
        with attempt("read as UTF-8", file, UnicodeError):
            read_bytes(file).decode("utf-8")
        splits[f"{split}/text"] = np.frombuffer(read_bytes(file), np.uint8)
        if not len(splits[f"{split}/text"]):
            raise UserError(f"{file}: is empty: expected words")
    return splits, {}


def read_wikitext2(folder, options):
    """WikiText-2 from a folder with wikitext-2-v1.zip, its unpacked folder, or the text files; see `read`."""
    return read(open_archive(folder, "wikitext-2-v1.zip", "wikitext-2"), options)


def is_text_folder(folder):
    """Whether a folder contains a training text."""
    return any((folder / name).is_file() for name in _file_names("train"))


def _file_names(split):
    return f"wiki.{split}.tokens", f"{split}.txt"
