"""`prepare` on files from strangers: one line, never a traceback, and no memory for what a header only claims."""

import gzip
import io
import json
import math
import os
import struct
import time
import zipfile
import zlib

import h5py
import numpy as np
import pandas
import pytest

from fedmpi.cli.predict.reading import read_samples
from fedmpi.data.source import HDF5Source
from fedmpi.data.text import Text
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.hdf5 import readable
from fedmpi.prepare.__main__ import main
from fedmpi.prepare.commands.show import show_file
from fedmpi.prepare.formats.common import ReaderOptions
from fedmpi.prepare.prepare import prepare


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


def deflated_twice(path):
    """An HDF5 file of some kilobytes that declares terabytes, stored through two filters that pack zeros."""
    with h5py.File(path, "w") as file:
        for split in ("train", "test"):
            file.create_dataset(f"{split}/images", (10**9, 784), "f4", chunks=(1000, 784), compression="gzip")
            file.create_dataset(f"{split}/labels", (10**9,), "i8", chunks=(10**5,), compression="gzip")


def shared_groups(path, levels=34, ring=False):
    """An HDF5 file with a chain of groups of which each is in two places of the last one: 2^34 paths."""
    small(path)
    with h5py.File(path, "r+") as file:
        group = file.create_group("z")
        for _ in range(levels):
            group["b"] = inner = group.create_group("a")
            group = inner
        if ring:
            group["back"] = file["/"]


def small(path):
    with h5py.File(path, "w") as file:
        for split in ("train", "test"):
            file[f"{split}/images"] = np.ones((20, 3), "f4")
            file[f"{split}/labels"] = np.arange(20) % 2


def views(path):
    """A virtual data set that shows one small one a million times."""
    small(path)
    with h5py.File(path, "r+") as file:
        file["one"] = np.ones((1, 1 << 20), "f4")
        layout = h5py.VirtualLayout((1 << 20, 1 << 20), "f4")
        for row in range(50):
            layout[row] = h5py.VirtualSource(".", "one", (1, 1 << 20))[0]
        file.create_virtual_dataset("more", layout)


def chunk(path):
    """A small data set in one chunk that is unpacked to 3 GiB."""
    small(path)
    with h5py.File(path, "r+") as file:
        file.create_dataset("more", (4, 4), "u1", chunks=(3 << 10, 1 << 20), maxshape=(None, None), compression="gzip")


def open_data(path):
    """What training, showing and predicting do first with a data file."""
    found = []
    for read in (
        lambda: HDF5Source(path),
        lambda: Text(path),
        lambda: show_file(path),
        lambda: read_samples(path, "test", None, {}),
    ):
        try:
            read()
            found.append("")
        except UserError as error:
            assert "\n" not in str(error)
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("write", "line"),
    [
        (shared_groups, ""),
        (lambda path: shared_groups(path, 5, ring=True), ""),
        (lambda path: shared_groups(path, 150), "has groups in groups: expected at most 100 levels"),
        (deflated_twice, "unpacks to 2.9 TiB from 0 B: expected at most 1.0 GiB"),
        (views, "more: unpacks to 4.0 TiB from 4.0 MiB: expected at most 2.0 GiB"),
        (chunk, "more: unpacks to 3.0 GiB from"),
    ],
)
def test_hdf5_files_that_never_end_are_read_or_one_line(tmp_path, capsys, write, line):
    """Groups in two places were walked through on every path: 2^34 of them."""
    path = tmp_path / "d.h5"
    write(path)
    begin = time.monotonic()
    as_source, as_text, as_shown, as_samples = open_data(path)
    assert time.monotonic() - begin < 20
    assert all(line in found for found in (as_source, as_shown, as_samples)) and as_text
    assert bool(line) == bool(as_source)


def test_what_is_no_regular_file_is_one_line(tmp_path, monkeypatch):
    """A FIFO was waited for, and /dev/zero read, forever."""
    os.mkfifo(tmp_path / "fifo")
    paths = {"a.csv": "/dev/zero", "a.npz": tmp_path / "fifo", "a.csv.gz": "/dev/zero", "a.parquet": tmp_path / "fifo"}
    paths |= {"a.h5": "/dev/zero", "a.xlsx": "/dev/tty", "a.json": tmp_path / "fifo"}
    for name, target in paths.items():
        (tmp_path / name).symlink_to(target)
        with pytest.raises(UserError, match="expected a regular file"):
            prepare("mine", tmp_path / "out", ReaderOptions(), tmp_path / name)
    good = tmp_path / "good.csv"
    good.write_text("a,y\n" + "1,p\n2,n\n" * 20)
    for options in (ReaderOptions(test_from=tmp_path / "a.csv"), ReaderOptions(columns=str(tmp_path / "fifo"))):
        with pytest.raises(UserError, match="regular file|a FIFO or a device"):
            prepare("mine", tmp_path / "out", options, good)
    with pytest.raises(UserError, match="expected a regular file"), readable(tmp_path / "a.h5"):
        pass
    pictures(tmp_path / "im")
    os.mkfifo(tmp_path / "im" / "a" / "9.png")
    with pytest.raises(UserError, match="9.png: is a FIFO, a socket or a device: expected a regular file"):
        prepare("mine", tmp_path / "out", ReaderOptions(), tmp_path / "im")


def pictures(folder, number=5):
    image = pytest.importorskip("PIL.Image")
    for name in "ab":
        (folder / name).mkdir(parents=True)
        for index in range(number):
            pixels = np.full((8, 8), (40 * index + 9 * (name == "b")) % 256, np.uint8)
            image.fromarray(pixels).save(folder / name / f"{index}.png")


GIB_OF_ROWS = 180  # times 6 MB


def write_gz(path):
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(GIB_OF_ROWS):
            file.write(b"a,y\n1,2\n" if file.tell() == 0 else b"1,2\n3,4\n" * 800_000)


def write_npz(path):
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("x.npy", "w") as file,
    ):
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (1200, 1 << 20)})
        for _ in range(1200):
            file.write(bytes(1 << 20))


def write_xlsx(path):
    pandas.DataFrame({"a": [1, 2, 3], "y": [1, 2, 1]}).to_excel(path.with_suffix(".whole.xlsx"), index=False)
    with zipfile.ZipFile(path.with_suffix(".whole.xlsx")) as whole, zipfile.ZipFile(path, "w") as changed:
        for name in whole.namelist():
            changed.writestr(
                name, whole.read(name).replace(b'r="A2"', b'r="XFD1048576"').replace(b'row r="2"', b'row r="1048576"')
            )


def write_parquet(path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    words = pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.zeros(2_000_000, "i1")), pyarrow.array(["x" * 1000]))
    parquet.write_table(pyarrow.table({"a": words}), path, compression="zstd")


def write_nii(path):
    nibabel = pytest.importorskip("nibabel")
    for name in "ab":
        (path / name).mkdir(parents=True)
        for number in range(3):
            nibabel.save(nibabel.Nifti1Image(np.ones((4, 4, 4), "f4"), np.eye(4)), path / name / f"{number}.nii.gz")
    header = nibabel.Nifti1Header()
    header.set_data_shape((2000, 2000, 2000))
    header["vox_offset"], header["magic"] = 352, b"n+1"
    (path / "a" / "9.nii.gz").write_bytes(gzip.compress(header.binaryblock + bytes(1000)))


def write_png(path):
    pictures(path)
    (path / "a" / "9.png").write_bytes(png_of_zeros(40_000))


def png_of_zeros(side):
    """A grey PNG of side x side pixels, of which only the first are there."""

    def part(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    parts = part(b"IHDR", header) + part(b"IDAT", zlib.compress(bytes(99_999))) + part(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def write_hole(path):
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def write_dcm(path):
    """Files of DICOM, of which one is packed as a whole."""
    pydicom = pytest.importorskip("pydicom")
    for name in "ab":
        (path / name).mkdir(parents=True)
        for number in range(3):
            (path / name / f"{number}.dcm").write_bytes(dicom(pydicom, 8))
    packer = zlib.compressobj(1, wbits=-15)
    packed = b"".join(packer.compress(bytes(1 << 28)) for _ in range(5)) + packer.flush()
    plain = dicom(pydicom, 8, pydicom.uid.DeflatedExplicitVRLittleEndian)
    length = int.from_bytes(plain[140:144], "little")
    (path / "a" / "9.dcm").write_bytes(plain[: 144 + length] + packed)


def dicom(pydicom, side, syntax=None):
    meta = pydicom.dataset.FileMetaDataset()
    meta.TransferSyntaxUID = syntax or pydicom.uid.ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = "1.2", "1.2.3"
    content = pydicom.dataset.FileDataset("it", {}, file_meta=meta, preamble=bytes(128))
    content.Rows = content.Columns = side
    content.BitsAllocated = content.BitsStored = 8
    content.HighBit, content.SamplesPerPixel, content.PixelRepresentation = 7, 1, 0
    content.PhotometricInterpretation, content.PixelData = "MONOCHROME2", bytes(side * side)
    written = io.BytesIO()
    content.save_as(written, enforce_file_format=True)
    return written.getvalue()


@pytest.mark.rarely
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("t.csv.gz", write_gz), ("t.npz", write_npz), ("t.xlsx", write_xlsx), ("t.parquet", write_parquet),
        ("nii", write_nii), ("png", write_png), ("t.csv", write_hole), ("t.json", write_hole), ("dcm", write_dcm),
    ],
)  # fmt: skip
def test_files_that_unpack_to_too_much_are_one_line(tmp_path, name, write):
    """They were read until the memory was full."""
    write(tmp_path / name)
    with pytest.raises(
        UserError, match=r"unpacks to .* from .*: expected at most 1\.. GiB; .*--max-unpacked GIB"
    ) as caught:
        prepare("mine", tmp_path / "out", ReaderOptions(), tmp_path / name)
    assert "\n" not in str(caught.value)


def test_the_limit_is_a_setting(tmp_path, monkeypatch):
    small(tmp_path / "d.h5")
    with h5py.File(tmp_path / "d.h5", "r+") as file:
        file.create_dataset("more", (2 << 30,), "u1", chunks=(1 << 20,), compression="gzip")
    content = gzip.compress(b"a,y\n" + b"1,2\n3,4\n" * 200_000)
    (tmp_path / "t.csv.gz").write_bytes(content)
    with pytest.raises(UserError, match="more: unpacks to 2.0 GiB"):
        HDF5Source(tmp_path / "d.h5")
    with pytest.raises(UserError, match="unpacks to 1.0 MiB from .*: expected at most 1.0 MiB; .* --max-unpacked GIB"):
        prepare("mine", tmp_path / "out", ReaderOptions(max_unpacked=0.001), tmp_path / "t.csv.gz")
    monkeypatch.setenv("FEDMPI_MAX_UNPACKED", "3")
    HDF5Source(tmp_path / "d.h5")
    prepare("mine", tmp_path / "out", ReaderOptions(), tmp_path / "t.csv.gz")
    for odd in ("many", "0", "nan"):
        monkeypatch.setenv("FEDMPI_MAX_UNPACKED", odd)
        with pytest.raises(UserError, match=f"FEDMPI_MAX_UNPACKED={odd}: expected a number of GiB > 0"):
            HDF5Source(tmp_path / "d.h5")
    with pytest.raises(UserError, match="--max-unpacked -1.0: expected a number of GiB > 0"):
        prepare("mine", tmp_path / "out", ReaderOptions(max_unpacked=-1.0), tmp_path / "t.csv.gz")


def test_no_image_starts_another_program(tmp_path, monkeypatch):
    """Pillow had Ghostscript read a page of PostScript, whatever the name of its file."""
    pictures(tmp_path / "im")
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    page = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    (tmp_path / "im" / "a" / "0.png").write_text(page)
    with pytest.raises(UserError, match="0.png: cannot be read as an image: its format is none of PNG, JPEG"):
        prepare("mine", tmp_path / "out", ReaderOptions(), tmp_path / "im")
    with pytest.raises(UserError, match="its format is none of PNG"):
        read_samples(tmp_path / "im", "test", None, {})
    assert not (tmp_path / "started").exists()


def test_links_out_of_a_folder_of_images(tmp_path):
    """What lay elsewhere was read without a word."""
    image = pytest.importorskip("PIL.Image")
    pictures(tmp_path / "im")
    (tmp_path / "elsewhere").mkdir()
    image.fromarray(np.full((8, 8), 77, np.uint8)).save(tmp_path / "elsewhere" / "private.png")
    (tmp_path / "im" / "a" / "same.png").symlink_to("0.png")  # stays inside
    prepare("inside", tmp_path, ReaderOptions(), tmp_path / "im")
    (tmp_path / "im" / "a" / "9.png").symlink_to(tmp_path / "elsewhere" / "private.png")
    (tmp_path / "im" / "c").symlink_to(tmp_path / "elsewhere")
    found = "9.png: is elsewhere .--follow-links reads it., where a link leads to: "
    for read in (
        lambda options: prepare("mine", tmp_path, options, tmp_path / "im"),
        lambda options: read_samples(tmp_path / "im", "test", None, {}, options.follow_links),
    ):
        with pytest.raises(UserError, match=found):
            read(ReaderOptions())
        read(ReaderOptions(follow_links=True))
    assert HDF5Source(tmp_path / "mine.h5").num_classes == 3
    (tmp_path / "im" / "labels.csv").write_text(
        f"file,label\na/0.png,p\na/1.png,n\n{tmp_path}/elsewhere/private.png,p\n"
    )
    with pytest.raises(UserError, match="line 4 has .*private.png, which is no image: expected an image in"):
        prepare("mine", tmp_path, ReaderOptions(), tmp_path / "im", force=True)


@pytest.mark.parametrize("door", ["prepare", "--follow-links", "--masks", "predict"])
def test_pipes_devices_and_links_among_images_are_named_with_the_damaged_ones(tmp_path, door):
    """Links were named without the others, and of these only those to test, if the first of these was one."""
    images = tmp_path / "im"
    for folder in (images, tmp_path / "masks"):
        pictures(folder)
    os.mkfifo(images / "a" / "p.png")
    (images / "a" / "q.png").symlink_to("/dev/zero")
    (images / "b" / "r.png").symlink_to("r.png")
    (images / "b" / "s.png").mkdir()
    (images / "b" / "t.png").symlink_to(tmp_path / "masks" / "a" / "0.png")
    (images / "b" / "2.png").write_bytes(b"not found")
    names = ["a/p.png", "a/q.png", "b/2.png", "b/r.png", "b/s.png"]
    names += ["b/t.png"] * (door != "--follow-links")
    options = ReaderOptions(follow_links=door == "--follow-links")
    if door == "--masks":
        options = ReaderOptions(masks=tmp_path / "masks")
        for name in names:
            (tmp_path / "masks" / name).write_bytes((tmp_path / "masks" / "a" / "0.png").read_bytes())
    with pytest.raises(UserError, match=rf"{len(names)} of \d+ files cannot be used: ") as caught:
        if door == "predict":
            read_samples(images, "test", None, {})
        else:
            prepare("mine", tmp_path / "out", options, images)
    assert [name for name in names if name not in str(caught.value)] == []
    assert not (tmp_path / "out" / "mine.h5").exists()


def test_damaged_images_to_train_are_named_with_those_to_test(tmp_path):
    for split in ("train", "test"):
        pictures(tmp_path / "im" / split)
    for name in ("train/b/1.png", "test/a/0.png"):
        (tmp_path / "im" / name).write_bytes(b"not found")
    with pytest.raises(UserError, match="2 of 20 files cannot be used: .*im/test/a/0.png.*; .*im/train/b/1.png"):
        prepare("mine", tmp_path / "out", ReaderOptions(), tmp_path / "im")


@pytest.mark.parametrize("kind", ["FIFO", "link"])
def test_a_table_of_labels_is_a_file_in_its_folder(tmp_path, kind):
    """A FIFO was left out, and the folders were the classes; a link out of the folder was read."""
    pictures(tmp_path / "im")
    (tmp_path / "private.csv").write_text("file,label\na/0.png,p\na/1.png,n\n" * 5)
    beside = tmp_path / "im" / "labels.csv"
    os.mkfifo(beside) if kind == "FIFO" else beside.symlink_to(tmp_path / "private.csv")
    found = {"FIFO": "is a FIFO", "link": "is elsewhere .* where a link leads to: .*private.csv"}[kind]
    with pytest.raises(UserError, match=f"labels.csv: {found}"):
        prepare("mine", tmp_path / "out", ReaderOptions(), tmp_path / "im")


def test_all_bad_files_are_named(tmp_path):
    """Only the first was named, and the next one after the next run."""
    pictures(tmp_path / "im", 20)
    whole = (tmp_path / "im" / "a" / "3.png").read_bytes()
    for name, content in {"a/3": whole[:40], "b/7": b"", "b/9": b"not found"}.items():
        (tmp_path / "im" / f"{name}.png").write_bytes(content)
    with pytest.raises(UserError) as caught:
        prepare("mine", tmp_path / "out", ReaderOptions(), tmp_path / "im")
    text = str(caught.value)
    assert "3 of 40 files cannot be used" in text and all(name in text for name in ("a/3.png", "b/7.png", "b/9.png"))
    for number in range(18):
        (tmp_path / "im" / "a" / f"{number}.png").write_bytes(b"not found")
    with pytest.raises(UserError, match="20 of 40 files cannot be used: .*; and 10 more$"):
        prepare("mine", tmp_path / "out", ReaderOptions(), tmp_path / "im")
    users = {"users": ["u"], "user_data": {"u": {"x": [[1, 2], [3, 4]], "y": [0, 1]}}}
    for split in ("train", "test"):
        (tmp_path / "leaf" / split).mkdir(parents=True)
        for number in range(4):
            (tmp_path / "leaf" / split / f"{number}.json").write_text(json.dumps(users) if number % 2 else "{")
    with pytest.raises(UserError, match="2 of 4 files cannot be used: .*0.json: .*2.json: "):
        prepare("mine", tmp_path / "out", ReaderOptions(), tmp_path / "leaf")


def test_what_a_terminal_obeys_is_not_printed(tmp_path, capsys):
    """Names of columns, classes, files and silos may contain what renames the window, or forges a line."""
    odd = "\x1b]0;PWNED\x07\x9b31m\u202e"
    rows = "".join(f"{n},{n % 3},{'xy'[n % 2]}{odd}\n" for n in range(60))
    (tmp_path / "t.csv").write_text(f"{odd}a,w{odd},label{odd}\n{rows}")
    for words in (
        ["prepare", "t", "--from", str(tmp_path / "t.csv"), "--silo", odd],
        ["prepare", "j", "--from", str(tmp_path / "t.csv"), "--json"],
        ["show", "t"], ["show", "t", "--json"], ["list"],
    ):  # fmt: skip
        main([*words, "--data-dir", str(tmp_path)])
        printed = "".join(capsys.readouterr())
        assert all(letter.isprintable() or letter == "\n" for letter in printed)
        assert "PWNED" in printed or words[0] == "list"
        if "--json" in words:
            assert json.loads(printed)["label"] == f"label{odd}"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("nul.csv", b"a,b,y\n" + b"1,2\0,p\n" * 30),
        ("deep.json", b"[" * 100_000 + b"]" * 100_000),
        ("wide.csv", ",".join(map(str, range(120_000))).encode() + b"\n1\n"),
        ("header.csv", b"x" * 3_000_000),
        ("quote.csv", b'a,y\n"' + b"x" * 3_000_000),
        ("digits.csv", b"a,y\n" + (b"9" * 5000 + b",1\n3,4\n") * 30),
        ("members.zip", None),
    ],
)
def test_odd_texts_are_read_or_one_line(tmp_path, name, content):
    if content is None:
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("../../t.csv", "a,y\n" + "1,p\n2,n\n" * 20)
    else:
        (tmp_path / name).write_bytes(content)
    try:
        prepare("mine", tmp_path / "out", ReaderOptions(), tmp_path / name)
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 3000
    assert not (tmp_path.parent / "t.csv").exists()
