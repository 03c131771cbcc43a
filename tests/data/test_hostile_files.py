"""`prepare` on files from strangers: one line, never a traceback, and no memory for what a header only claims."""

import io
import math
import zipfile

import numpy as np
import pytest

from fedmpi.data.formats.common import ReaderOptions
from fedmpi.data.prepare import prepare
from fedmpi.errors import UserError


def array_file(**headers):
    """An npz file whose arrays have the given headers and a few bytes."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name, header in headers.items():
            text = header.encode().ljust(117) + b"\n"
            file.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + b"12345678")
    return content.getvalue()


HUGE = "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 4), }"
FILES = {
    "huge.npz": array_file(x=HUGE, y=HUGE),
    "odd.npz": array_file(x="{'descr': '|O', 'fortran_order': False, 'shape': (3,), }", y=HUGE),
    "header.npz": array_file(x="__import__('os').abort()", y="[" * 3000),
    "cut.npz": array_file(x=HUGE)[:60],
    "square.csv": "a,label\n1,²\n2,³\n3,²\n4,³\n",
    "digits.csv": f"a,label\n1,{'9' * 400}\n2,3\n3,4\n4,5\n",
    "nul.csv": "a,label\n1,\0\n2,\0\n3,1\n",
    "huge-field.csv": "a,label\n" + "1" * 200_000 + ",2\n3,4\n",
    "names.csv": "/,../../x,label\na,1,1\nb,2,2\nc,3,1\nd,4,2\n",
    "overflow.csv": "a,label\n1e999,1\n2,2\n3,1\n4,2\n",
    "empty.csv": "",
    "header.csv": "a,label\n",
    "train-images-idx3-ubyte": b"\0\0\x08\xff" + b"\xff" * 20,
}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_read_or_refused_in_one_line(tmp_path, name):
    origin = tmp_path / name
    content = FILES[name]
    origin.write_bytes(content if isinstance(content, bytes) else content.encode())
    if "idx" in name:
        origin = tmp_path
    try:
        prepare("mnist" if "idx" in name else "mine", tmp_path / "out", ReaderOptions(), origin)
    except UserError as error:
        assert "\n" not in str(error) and str(tmp_path) in str(error) + str(tmp_path)
    assert not list((tmp_path / "out").glob("*.part"))


@pytest.mark.parametrize("share", [math.nan, math.inf, -1.0, 0.0, 1.0, 1e300])
def test_a_share_that_is_none(tmp_path, share):
    (tmp_path / "it.npz").write_bytes(b"")
    np.savez(tmp_path / "it.npz", x=np.zeros((10, 3)), y=np.arange(10) % 2)
    with pytest.raises(UserError, match="--test-share .*: makes 0 of 10 samples the test set"):
        prepare("mine", tmp_path / "out", ReaderOptions(test_share=share), tmp_path / "it.npz")
