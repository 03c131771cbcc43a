"""Which reader reads which files."""

import pytest

from fedmpi.prepare.formats import OFFICIAL_READERS, find_reader, idx, images, npz, table, text
from fedmpi.prepare.official import OFFICIAL


def test_every_official_data_set_has_a_reader():
    assert list(OFFICIAL_READERS) == list(OFFICIAL)


@pytest.mark.parametrize(
    ("name", "path", "reader", "read_path"),
    [
        ("mnist", "train-images-idx3-ubyte.gz", idx.read, ""),
        ("mnist", "", idx.read, ""),
        ("mnist", "x.npz", npz.read, "x.npz"),
        ("mnist", "by_class", images.read, "by_class"),
        ("wikitext2", "by_class", text.read_wikitext2, "by_class"),
        ("mine", "by_class", images.read, "by_class"),
        ("mine", "tale", text.read, "tale"),
        ("mine", "x.csv", table.read, "x.csv"),
    ],
)
def test_the_reader_follows_from_name_and_path(tmp_path, name, path, reader, read_path):
    for folder in ("by_class/train/cat", "tale"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("tale/train.txt", "train-images-idx3-ubyte.gz", "x.npz", "x.csv"):
        (tmp_path / file).touch()
    assert find_reader(name, tmp_path / path) == (reader, tmp_path / read_path)
