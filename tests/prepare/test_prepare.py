"""python -m fedmpi data: official files found or downloaded, the user's own data, splits as figures and files."""

import gzip
import hashlib
import http.server
import io
import os
import pickle
import struct
import sys
import tarfile
import threading
import zipfile

import h5py
import numpy as np
import pytest
import torch
from helpers import ROOT, disk_of, execute, train

from fedmpi.comm.solo import SoloLink
from fedmpi.data.partitions import Stride
from fedmpi.data.source import HDF5Source, open_source
from fedmpi.prepare import official
from fedmpi.prepare.__main__ import main
from fedmpi.prepare.official import Official
from fedmpi.tasks.auc import DeepAUC
from fedmpi.tasks.base import RankContext
from fedmpi.tasks.language import Language

DRAW = np.random.default_rng(0)
IMAGES = DRAW.integers(0, 256, (50, 28, 28), dtype=np.uint8)
LABELS = np.arange(50, dtype=np.uint8) % 10


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def idx_files(folder, zipped=True):
    """The four files of an MNIST-like data set."""
    folder.mkdir(exist_ok=True)
    for prefix, images, labels in (("train", IMAGES, LABELS), ("t10k", IMAGES[:20], LABELS[:20])):
        for ending, array in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
            content = idx(array)
            path = folder / (f"{prefix}-{ending}.gz" if zipped else f"{prefix}-{ending}")
            path.write_bytes(gzip.compress(content) if zipped else content)
    return folder


def run(capsys, *words):
    """(exit code, standard output, standard error) of the command."""
    code = 0
    try:
        main([str(word) for word in words])
    except SystemExit as ended:
        code = ended.code
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    return code, output.out, output.err


def fails(capsys, *words):
    """The one line of an error."""
    code, _, errors = run(capsys, *words)
    assert code == 2 and errors.count("\n") == 1 and errors.startswith("fedmpi: error: "), errors
    return errors


def check_mnist_like(path):
    with h5py.File(path) as file:
        assert np.array_equal(file["train/images"], IMAGES) and np.array_equal(file["train/labels"], LABELS)
        assert np.array_equal(file["test/images"], IMAGES[:20]) and np.array_equal(file["test/labels"], LABELS[:20])
        assert file["train/labels"].dtype == np.uint8 and file["train/images"].compression == "gzip"
    assert HDF5Source(path).num_classes == 10


# --- official files -------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False])
def test_idx_files(tmp_path, capsys, zipped):
    origin = idx_files(tmp_path / "idx", zipped)
    code, output, _ = run(capsys, "prepare", "mnist", "--from", origin, "--data-dir", tmp_path)
    assert code == 0 and "sha256" in output and "per class: 5 5 5 5 5 5 5 5 5 5" in output
    check_mnist_like(tmp_path / "mnist.h5")
    before = (tmp_path / "mnist.h5").stat().st_mtime_ns
    code, output, _ = run(capsys, "prepare", "mnist", "--from", origin, "--data-dir", tmp_path)
    assert code == 0 and "exists already" in output and (tmp_path / "mnist.h5").stat().st_mtime_ns == before


def cifar_records(num):
    pixels = DRAW.integers(0, 256, (num, 3, 32, 32), dtype=np.uint8)
    labels = DRAW.integers(0, 10, num).astype(np.uint8)
    return np.concatenate([labels[:, None], pixels.reshape(num, -1)], axis=1).tobytes(), pixels, labels


def as_python_2_pickled(pixels, labels):
    """The opcodes of the official Python version: protocol 2 with byte strings, as Python 2 wrote them."""
    data = pixels.reshape(len(pixels), -1)
    short = lambda text: b"U" + bytes([len(text)]) + text  # noqa: E731
    integer = lambda number: b"J" + struct.pack("<i", number)  # noqa: E731
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + integer(0) + b"\x85" + short(b"b") + b"tR"
    dtype = b"cnumpy\ndtype\n" + short(b"u1") + integer(0) + integer(1) + b"\x87R"
    dtype += b"(" + integer(3) + short(b"|") + b"NNN" + integer(-1) + integer(-1) + integer(0) + b"tb"
    content = b"T" + struct.pack("<i", data.nbytes) + data.tobytes()
    array = empty + b"(" + integer(1) + integer(len(data)) + integer(3072) + b"\x86" + dtype + b"\x89" + content + b"tb"
    numbers = b"](" + b"".join(integer(int(label)) for label in labels) + b"e"
    return b"\x80\x02}(" + short(b"data") + array + short(b"labels") + numbers + b"u."


def as_pickled_now(pixels, labels):
    return pickle.dumps({b"data": pixels.reshape(len(pixels), -1), b"labels": labels.tolist()}, protocol=2)


FORMS = {
    "binary": ("cifar-10-batches-bin", ".bin", lambda content, pixels, labels: content),
    "python": ("cifar-10-batches-py", "", lambda content, pixels, labels: as_python_2_pickled(pixels, labels)),
    "python, pickled now": ("cifar-10-batches-py", "", lambda content, pixels, labels: as_pickled_now(pixels, labels)),
}


def make_tar(path, files):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", ["tar", "folder", "here"])
def test_cifar10(tmp_path, capsys, form, where):
    inside, ending, write = FORMS[form]
    names = [f"data_batch_{number}{ending}" for number in range(1, 6)] + [f"test_batch{ending}"]
    batches = {name: cifar_records(4) for name in names}
    if where == "tar":
        version = "binary" if ending else "python"
        make_tar(tmp_path / f"cifar-10-{version}.tar.gz", {f"{inside}/{n}": write(*b) for n, b in batches.items()})
    else:
        folder = tmp_path / inside if where == "folder" else tmp_path
        folder.mkdir(exist_ok=True)
        for name, batch in batches.items():
            (folder / name).write_bytes(write(*batch))
    assert run(capsys, "prepare", "cifar10", "--from", tmp_path, "--data-dir", tmp_path)[0] == 0
    with h5py.File(tmp_path / "cifar10.h5") as file:
        expected = np.concatenate([batches[name][1] for name in names[:5]]).transpose(0, 2, 3, 1)
        assert np.array_equal(file["train/images"], expected)
        assert np.array_equal(file["test/labels"], batches[names[5]][2])


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(Malicious()), "refers to posix.mkdir, which a batch of CIFAR-10 does not need: refused"),
        (pickle.dumps({b"data": 0, b"labels": []}), "data is int64[]: expected uint8 [0, 3072]"),
        (b"nonsense", "cannot be read as a batch of CIFAR-10"),
    ],
)
def test_a_pickle_that_is_more_than_arrays_is_refused_and_runs_nothing(tmp_path, capsys, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    make_tar(tmp_path / "cifar-10-python.tar.gz", {f"cifar-10-batches-py/{name}": content for name in names})
    error = fails(capsys, "prepare", "cifar10", "--from", tmp_path, "--data-dir", tmp_path)
    assert message in error
    assert not (tmp_path / "ran").exists()


def image_bytes(pixels, ending="PNG"):
    image = pytest.importorskip("PIL.Image").fromarray(pixels)
    buffer = io.BytesIO()
    image.save(buffer, ending)
    return buffer.getvalue()


def test_tiny_imagenet(tmp_path, capsys):
    pixels = DRAW.integers(0, 256, (6, 64, 64, 3), dtype=np.uint8)
    with zipfile.ZipFile(tmp_path / "tiny-imagenet-200.zip", "w") as file:
        file.writestr("tiny-imagenet-200/wnids.txt", "n02\nn01\n")
        for number in range(4):
            name = f"n0{1 + number % 2}"
            file.writestr(f"tiny-imagenet-200/train/{name}/images/{name}_{number}.JPEG", image_bytes(pixels[number]))
        lines = ["val_0.JPEG\tn02\t0\t0\t1\t1", "val_1.JPEG\tn01\t0\t0\t1\t1"]
        file.writestr("tiny-imagenet-200/val/val_annotations.txt", "\n".join(lines))
        for number in range(2):
            file.writestr(f"tiny-imagenet-200/val/images/val_{number}.JPEG", image_bytes(pixels[4 + number]))
    assert run(capsys, "prepare", "tiny_imagenet", "--from", tmp_path, "--data-dir", tmp_path)[0] == 0
    with h5py.File(tmp_path / "tiny_imagenet.h5") as file:
        assert np.array_equal(file["train/images"], pixels[[0, 2, 1, 3]])
        assert file["train/labels"][:].tolist() == [0, 0, 1, 1] and file["test/labels"][:].tolist() == [1, 0]


@pytest.mark.parametrize("names", ["wiki.{}.tokens", "{}.txt"])
def test_wikitext2(tmp_path, capsys, names):
    for split in ("train", "valid", "test"):
        (tmp_path / names.format(split)).write_text(f" \n = the {split} = \n", encoding="utf-8")
    assert run(capsys, "prepare", "wikitext2", "--from", tmp_path, "--data-dir", tmp_path)[0] == 0
    with h5py.File(tmp_path / "wikitext2.h5") as file:
        assert file["valid/text"][:].tobytes() == b" \n = the valid = \n"


# --- downloads, from a server of the test's own ---------------------------------------------------


class Server(http.server.ThreadingHTTPServer):
    """Serves a dict of files, with Range, and on request breaks off once."""

    def __init__(self):
        self.files, self.breaks_at, self.ranges = {}, None, []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        content = self.server.files.get(self.path.lstrip("/"))
        if self.path.startswith("/moved/"):
            self.send_response(302)
            self.send_header("Location", self.server.url + self.path.removeprefix("/moved/"))
            self.end_headers()
            return
        if content is None:
            self.send_error(404)
            return
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        begin = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if begin >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        end = self.server.breaks_at or len(content)
        self.server.breaks_at = None
        self.wfile.write(content[begin:end])

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server with an MNIST-like data set, which is the official one while the test lasts."""
    server = Server()
    files = {}
    for path in sorted(idx_files(tmp_path / "served").iterdir()):
        server.files[path.name] = path.read_bytes()
        files[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(official.OFFICIAL, "mnist", Official("small", server.url, files))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_download(tmp_path, capsys, server):
    code, output, _ = run(capsys, "prepare", "mnist", "--data-dir", tmp_path)
    assert code == 0 and f"{server.url}train-images-idx3-ubyte.gz (" in output
    check_mnist_like(tmp_path / "mnist.h5")
    run(capsys, "prepare", "mnist", "--data-dir", tmp_path, "--force")
    assert len(server.ranges) == 4  # what is there is not fetched again


def test_a_broken_download_goes_on(tmp_path, capsys, server):
    server.breaks_at = 100
    error = fails(capsys, "prepare", "mnist", "--data-dir", tmp_path)
    assert "the connection ended after 100 of " in error and "run the command again to resume" in error
    assert not (tmp_path / "mnist.h5").exists()
    code, output, _ = run(capsys, "prepare", "mnist", "--data-dir", tmp_path)
    assert code == 0 and "bytes, resumed after 100" in output
    assert server.ranges[1] == "bytes=100-"
    check_mnist_like(tmp_path / "mnist.h5")


def test_a_complete_part_is_recognised(tmp_path, capsys, server):
    name = "t10k-images-idx3-ubyte.gz"
    (tmp_path / "downloads" / "mnist").mkdir(parents=True)
    (tmp_path / "downloads" / "mnist" / f"{name}.part").write_bytes(server.files[name])
    assert run(capsys, "prepare", "mnist", "--data-dir", tmp_path)[0] == 0
    check_mnist_like(tmp_path / "mnist.h5")


def test_a_wrong_checksum(tmp_path, capsys, server):
    server.files["t10k-images-idx3-ubyte.gz"] = b"something else"
    error = fails(capsys, "prepare", "mnist", "--data-dir", tmp_path)
    assert "t10k-images-idx3-ubyte.gz: the download has SHA-256" in error and "it was deleted, try again" in error
    assert not list((tmp_path / "downloads" / "mnist").glob("t10k-images*"))


def test_a_redirect_without_https_is_refused(tmp_path, capsys, server):
    error = fails(capsys, "prepare", "mnist", "--data-dir", tmp_path, "--mirror", f"{server.url}moved")
    assert f"it is redirected to {server.url}" in error and "expected an address with https" in error
    assert not list((tmp_path / "downloads" / "mnist").iterdir())


@pytest.mark.parametrize("name", official.OFFICIAL)
def test_official_files_come_by_https_and_have_a_sha256(name):
    assert official.OFFICIAL[name].url.startswith("https://")
    for sha256 in official.OFFICIAL[name].files.values():
        assert len(bytes.fromhex(sha256)) == 32


def test_a_mirror_without_the_file_and_no_network(tmp_path, capsys, server):
    url = server.url
    error = fails(capsys, "prepare", "mnist", "--data-dir", tmp_path, "--mirror", f"{url}elsewhere")
    assert "elsewhere/t10k-images-idx3-ubyte.gz: cannot be downloaded: Not Found" in error
    nowhere = "http://127.0.0.1:1/"
    error = fails(capsys, "prepare", "mnist", "--data-dir", tmp_path, "--mirror", nowhere)
    assert "cannot be downloaded: " in error and "without a network, copy t10k-images-idx3-ubyte.gz into" in error
    for mirror in ("nonsense", "http://mirror.example/"):
        error = fails(capsys, "prepare", "mnist", "--data-dir", tmp_path, "--mirror", mirror)
        assert "expected an address with https" in error


# --- the user's own data --------------------------------------------------------------------------


def test_npz(tmp_path, capsys):
    np.savez(tmp_path / "mine.npz", x=IMAGES, y=LABELS[:, None])
    run(capsys, "prepare", "mine", "--from", tmp_path / "mine.npz", "--data-dir", tmp_path, "--test-share", 0.3)
    source = HDF5Source(tmp_path / "mine.h5")
    assert {split: len(labels) for split, labels in source.labels.items()} == {"train": 35, "test": 15}
    assert source.mean == pytest.approx((IMAGES[:].mean() / 255,), abs=0.02)
    held = np.concatenate([source.read(split, np.arange(len(source.labels[split]))) for split in ("train", "test")])
    assert {image.tobytes() for image in held} == {image.tobytes() for image in IMAGES}
    np.savez(tmp_path / "split.npz", x_train=IMAGES, y_train=LABELS, x_test=IMAGES[:7], y_test=LABELS[:7])
    run(capsys, "prepare", "split", "--from", tmp_path / "split.npz", "--data-dir", tmp_path)
    assert len(HDF5Source(tmp_path / "split.h5").labels["test"]) == 7


def test_csv_trains(tmp_path, capsys):
    lines = ["age,clinic,weight,ill"]
    for number in range(60):
        lines.append(
            f"{20 + number},{'north' if number % 3 else 'south'},{50 + number / 2},{'yes' if number > 30 else 'no'}"
        )
    (tmp_path / "mine.csv").write_text("\n".join(lines))
    run(capsys, "prepare", "mine", "--from", tmp_path / "mine.csv", "--data-dir", tmp_path, "--keep", "clinic")
    source = HDF5Source(tmp_path / "mine.h5")
    assert source.shape == (2,) and source.num_classes == 2 and len(source.mean) == 2
    assert set(source.column("clinic")) == {b"north", b"south"}
    settings = ["--data", "mine", "--data-dir", tmp_path, "--partition", "column", "--partition.by", "clinic"]
    ended = train(2, tmp_path, *settings, "--rounds", 20, "--algorithm", "fedavg", "--algorithm.step_size", 0.1)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout.split("accuracy ")[-1].split()[0]) > 0.8


@pytest.mark.parametrize("is_split", [True, False])
def test_image_folders(tmp_path, capsys, is_split):
    for split in ("train", "test") if is_split else ("",):
        for name in ("cat", "dog"):
            folder = tmp_path / "pictures" / split / name
            folder.mkdir(parents=True)
            for number in range(6):
                grey = np.full((9, 9), 40 * number, np.uint8)
                (folder / f"{number}.png").write_bytes(image_bytes(grey))
    code, output, errors = run(capsys, "prepare", "pets", "--from", tmp_path / "pictures", "--data-dir", tmp_path)
    assert code == 0, errors
    source = HDF5Source(tmp_path / "pets.h5")
    assert source.shape == (9, 9) and source.num_classes == 2
    assert sum(map(len, source.labels.values())) == (24 if is_split else 12)
    (tmp_path / "pictures" / ("train/cat" if is_split else "cat") / "7.png").write_bytes(
        image_bytes(np.zeros((5, 4), np.uint8))
    )
    words = ["prepare", "pets", "--from", tmp_path / "pictures", "--data-dir", tmp_path, "--force"]
    assert "7.png: is 4x5 pixels" in fails(capsys, *words)
    assert run(capsys, *words, "--size", 6)[0] == 0 and HDF5Source(tmp_path / "pets.h5").shape == (6, 6)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.npz", b"not a zip file", "x.npz: cannot be read as npz"),
        ("x.npz", {"x": np.array([{}], dtype=object), "y": np.zeros(1)}, "x.npz: cannot be read as npz"),
        ("x.npz", {"a": IMAGES}, "contains a: expected x and y, or x_train"),
        ("x.npz", {"x": IMAGES, "y": LABELS[:-1]}, "y is [49]: expected one label per row of x"),
        ("x.npz", {"x": IMAGES, "y": LABELS / 2}, "labels are float64[40]: expected integers"),
        ("x.npz", {"x": IMAGES, "y": LABELS.astype(int) - 1}, "labels are int64[40], the smallest -1: expected"),
        ("x.npz", {"x": np.ones(50), "y": LABELS}, "images are float64[40]: expected numbers [n, ...]"),
        ("x.npz", {"x": np.array([["a"]] * 50), "y": LABELS}, "images are <U1[40, 1]: expected numbers [n, ...]"),
        ("x.npz", {"x": np.full((50, 2), np.nan), "y": LABELS}, "contains a value that is not finite in sample 0"),
        (
            "x.npz",
            {"x_train": IMAGES, "y_train": LABELS, "x_test": IMAGES[:, 1:], "y_test": LABELS},
            "mine.h5: test/images is uint8[50, 27, 28]: expected the shape and type of train/images",
        ),
        (
            "x.npz",
            {"x_train": IMAGES, "y_train": LABELS[1:], "x_test": IMAGES, "y_test": LABELS},
            "mine.h5: train/labels is uint8[49]: expected integers [50], one per image",
        ),
        ("x.h5", b"anything", "is already an HDF5 file: train with --data "),
        ("x.csv", b"a,b\n1,2\n3\n", "line 3 has 1 fields: expected 2"),
        ("x.csv", b"a,b\nx,2\ny,3\n" * 9, "expected at least one column of numbers besides b"),
        ("x.csv", b"\xff\xfe\x00", "cannot be read as CSV"),
        ("x.csv", b"", "is empty: expected CSV with a header"),
        ("x.txt", b"text", "expected a folder of images or texts, or a file ending in .npz, .csv, .tsv, .parquet"),
        ("none.npz", None, "no such file or folder"),
    ],
    ids=str,
)
def test_bad_files_of_the_users_own(tmp_path, capsys, name, content, message):
    if isinstance(content, dict):
        np.savez(tmp_path / name, **content)
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    error = fails(capsys, "prepare", "mine", "--from", tmp_path / name, "--data-dir", tmp_path)
    assert message in error
    assert not list(tmp_path.glob("mine.h5*"))


@pytest.mark.parametrize("known", ["mnist", "fashion_mnist", "cifar10"])
def test_known_data_sets_in_the_forms_of_the_users_own(tmp_path, capsys, known):
    arrays = {"x_train": IMAGES.astype(np.int64), "y_train": LABELS, "x_test": IMAGES[:20], "y_test": LABELS[:20]}
    np.savez(tmp_path / "keras.npz", **arrays)
    assert run(capsys, "prepare", known, "--from", tmp_path / "keras.npz", "--data-dir", tmp_path)[0] == 0
    check_mnist_like(tmp_path / f"{known}.h5")
    for split, images in (("training", IMAGES), ("testing", IMAGES[:20])):
        for label in range(10):
            (tmp_path / "png" / split / str(label)).mkdir(parents=True)
        for number, image in enumerate(images):
            (tmp_path / "png" / split / str(number % 10) / f"{number}.png").write_bytes(image_bytes(image))
    words = ["prepare", known, "--from", tmp_path / "png", "--data-dir", tmp_path, "--force"]
    assert run(capsys, *words)[0] == 0
    source = HDF5Source(tmp_path / f"{known}.h5")
    assert source.name == known and np.array_equal(source.labels["test"], np.repeat(np.arange(10), 2))
    assert np.array_equal(source.read("test", np.arange(2)), IMAGES[[0, 10]])


def test_an_archive_may_be_named_itself(tmp_path, capsys):
    file = idx_files(tmp_path / "idx") / "train-images-idx3-ubyte.gz"
    assert run(capsys, "prepare", "mnist", "--from", file, "--data-dir", tmp_path)[0] == 0
    check_mnist_like(tmp_path / "mnist.h5")


def test_words_as_labels(tmp_path, capsys):
    np.savez(tmp_path / "x.npz", x=IMAGES, y=np.where(LABELS == 3, "cat", "dog"))
    assert run(capsys, "prepare", "pets", "--from", tmp_path / "x.npz", "--data-dir", tmp_path)[0] == 0
    with h5py.File(tmp_path / "pets.h5") as file:
        assert list(file.attrs["class_names"]) == ["cat", "dog"] and set(file["train/labels"][:]) == {0, 1}


def damaged_tiny(folder, annotations, with_images=True):
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "wnids.txt").write_text("n1\n")
    (folder / "val" / "val_annotations.txt").write_text(annotations)
    if with_images:
        (folder / "train" / "n1" / "images").mkdir(parents=True)
    return folder


def test_damaged_folders_and_archives_are_one_line(tmp_path, capsys):
    tiny = damaged_tiny(tmp_path / "a", "x.JPEG\tn9\t0\n")
    assert "expected an image and a class" in fails(capsys, "prepare", "tiny_imagenet", "--from", tiny)
    tiny = damaged_tiny(tmp_path / "b", "x.JPEG\tn1\t0\n", with_images=False)
    assert "images: cannot be read: " in fails(capsys, "prepare", "tiny_imagenet", "--from", tiny)
    with zipfile.ZipFile(tmp_path / "wikitext-2-v1.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("wikitext-2/wiki.train.tokens", "the cat sat\n" * 9000)
    content = bytearray((tmp_path / "wikitext-2-v1.zip").read_bytes())
    content[70:90] = b"\xff" * 20
    (tmp_path / "wikitext-2-v1.zip").write_bytes(content)
    assert "wiki.train.tokens: cannot be read: " in fails(capsys, "prepare", "wikitext2", "--from", tmp_path)
    (tmp_path / "idx").mkdir()
    (tmp_path / "idx" / "train-images-idx3-ubyte").write_bytes(b"\0\0\x0d\1" + bytes(8))
    what = "train-images-idx3-ubyte: begins with 00 00 0d 01: expected an IDX file of bytes, 00 00 08"
    assert what in fails(capsys, "prepare", "mnist", "--from", tmp_path / "idx")
    make_tar(tmp_path / "cifar-10-binary.tar.gz", {"x/data_batch_1.bin": b"", "x/data_batch_3.bin": b""})
    what = "cifar-10-binary.tar.gz: contains no data_batch_2.bin"
    assert what in fails(capsys, "prepare", "cifar10", "--from", tmp_path)
    (tmp_path / "pictures" / "cat").mkdir(parents=True)
    for number in range(5):
        whole = image_bytes(DRAW.integers(0, 256, (40, 40), dtype=np.uint8))
        (tmp_path / "pictures" / "cat" / f"{number}.png").write_bytes(whole if number else whole[:700])
    assert "0.png: cannot be read as an image" in fails(capsys, "prepare", "pets", "--from", tmp_path / "pictures")
    (tmp_path / "pictures" / "cat" / "0.png").write_text("no image")
    what = "0.png: cannot be read as an image: its format is none of PNG, JPEG, BMP, GIF, PPM, TIFF, WEBP\n"
    assert what in fails(capsys, "prepare", "pets", "--from", tmp_path / "pictures")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prepare", "imagenet"], "prepare imagenet: expected one of mnist"),
        (["prepare", "mnist", "--from", "{folder}"], "contains no train-images-idx3-ubyte.gz or train-images"),
        (["prepare", "wikitext2", "--from", "{folder}"], "contains neither wiki.train.tokens nor train.txt"),
        (["prepare", "cifar10", "--from", "{folder}"], "contains no data_batch_1.bin"),
        (["prepare", "mine", "--from", "{folder}"], "expected one folder of images per class"),
        (["show", "{folder}/none.h5"], "no file "),
        (["show"], "the following arguments are required: file"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["list", "--nonsense"], "unknown option --nonsense"),
        (["partition", "digits", "--clients", "5000"], "clients = 5000: expected at most one per training sample"),
        (["partition", "digits", "--partition", "dirichle"], "did you mean 'dirichlet'?"),
        (["partition", "digits", "--write", "silo.h5"], "expected {client} in the name"),
        (["partition", "digits", "--plot", "{folder}/none/x.png"], "cannot be written"),
        (["partition"], "the following arguments are required: data"),
        (["partition", "s_{client}.h5"], "s_{client}.h5: is already one file per client: expected one file for all"),
        (
            ["partition", "digits", "--partition.redeal", "true"],
            "partition.redeal = true: there is a split for every round, ",
        ),
        (["partition", "mine"], "task.data = mine: unknown data set: expected digits, a path ending in .h5, or the "),
        (["partition", "{folder}/no/x.h5"], "x.h5 ({folder}/no: no such folder; the data set digits needs no file)"),
    ],
    ids=str,
)
def test_bad_commands_are_one_line(tmp_path, capsys, words, message):
    words = [word.replace("{folder}", str(tmp_path)) for word in words]
    if words[0] == "prepare":
        words += ["--data-dir", str(tmp_path)]
    assert message.replace("{folder}", str(tmp_path)) in fails(capsys, *words)


# --- looking at data and splits -------------------------------------------------------------------


def test_list_and_show(tmp_path, capsys):
    run(capsys, "prepare", "mnist", "--from", idx_files(tmp_path / "idx"), "--data-dir", tmp_path)
    _, output, _ = run(capsys, "list", "--data-dir", tmp_path)
    assert f"{tmp_path / 'mnist.h5'} (" in output and "wikitext2" in output and output.count("no file ") == 4
    with h5py.File(tmp_path / "ours.h5", "w") as file:
        file["train/images"] = IMAGES
    (tmp_path / "broken.h5").write_bytes(b"x")
    _, output, _ = run(capsys, "list", "--data-dir", tmp_path)
    assert "ours           train/images [50, 28, 28]\n" in output and "broken         cannot be read as HDF5" in output
    _, output, _ = run(capsys, "show", "mnist", "--data-dir", tmp_path)
    assert "train/images     uint8 [50, 28, 28], chunks [50, 28, 28], gzip" in output
    assert hashlib.sha256((tmp_path / "mnist.h5").read_bytes()).hexdigest() in output


def test_partition_draws_and_counts(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "split.png"
    settings = ["--partition", "classes", "--partition.per_client", 2, "--clients", 5, "--plot", picture]
    code, output, _ = run(capsys, "partition", "digits", *settings)
    assert code == 0
    lines = output.splitlines()
    assert lines[0].split() == ["client", "samples", *map(str, range(10))]
    twos, threes = np.bincount(open_source("digits", None).labels["train"])[2:4]
    assert lines[2].split() == ["1", str(twos + threes), ".", ".", str(twos), str(threes), *"......"]
    assert "1438 of 1438 in total" in output
    pixels = np.asarray(pytest.importorskip("PIL.Image").open(picture).convert("RGB"))
    blue = pixels[..., 2] > pixels[..., 0] + 50.0
    assert blue[: len(blue) // 4].mean() > 0.01 and blue[len(blue) // 2 :].mean() > 0.01  # bars, bubbles


def test_partition_of_many_clients_and_its_settings(capsys):
    lines = run(capsys, "partition", "digits", "--clients", 53)[1].splitlines()
    assert [line.split()[0] for line in lines[1:51]] == [*map(str, range(50))]
    assert lines[51] == "... and 3 more" and lines[52].startswith("samples per client: 27 to 28, ") and len(lines) == 53
    code, output, _ = run(capsys, "partition", "digits", "--print_config")
    assert code == 0 and "partition:" in output and "samples per client" not in output


def test_test_rows_without_the_column_of_the_split_are_dealt_in_turn(tmp_path, capsys):
    with h5py.File(tmp_path / "mine.h5", "w") as file:
        for split, number in (("train", 30), ("test", 9)):
            file[f"{split}/images"], file[f"{split}/labels"] = IMAGES[:number], LABELS[:number]
        file["train/site"] = [f"site-{number % 3}" for number in range(30)]
    words = ["--partition", "column", "--partition.by", "site", "--clients", 3, "--write", tmp_path / "s{client}.h5"]
    code, output, errors = run(capsys, "partition", tmp_path / "mine.h5", *words)
    assert code == 0 and "the test set has no column site: its rows are given to the clients in turn\n" in output, (
        errors
    )
    for client in range(3):
        source = HDF5Source(tmp_path / f"s{client}.h5")
        assert source.labels["test"].tolist() == LABELS[client:9:3].tolist()
        assert [*set(source.column("site"))] == [b"site-%d" % client]


def test_silo_files_written_and_trained(tmp_path, capsys):
    pattern = tmp_path / "silo_{client}.h5"
    code, output, _ = run(capsys, "partition", "digits", "--partition", "dirichlet", "--clients", 3, "--write", pattern)
    assert code == 0 and "written: 3 files" in output
    sources = [HDF5Source(str(pattern).format(client=client)) for client in range(3)]
    assert sum(len(source.labels["train"]) for source in sources) == 1438
    assert sum(len(source.labels["test"]) for source in sources) == 359
    assert sources[0].name == "digits"
    ended = train(3, tmp_path, "--data", pattern, "--rounds", 20)
    assert ended.returncode == 0, ended.stderr


def test_silo_files_keep_columns_and_attributes(tmp_path, capsys):
    with h5py.File(tmp_path / "mine.h5", "w") as file:
        for split, number in (("train", 30), ("test", 9)):
            file[f"{split}/images"] = IMAGES[:number]
            file[f"{split}/labels"] = LABELS[:number]
        file["train/site"] = [f"site-{number % 7}" for number in range(30)]  # words of any length
        file["train/age"] = np.arange(30) / 4
        file["train/note"] = "for all samples together"
        file.attrs.update({"class_names": [f"digit {label}" for label in range(10)], "num_classes": 10, "mean": 0.25})
    pattern = tmp_path / "silo_{client:02d}.h5"
    words = ["partition", tmp_path / "mine.h5", "--partition", "iid", "--clients", 3, "--write", pattern]
    code, _, errors = run(capsys, *words)
    assert code == 0, errors
    whole = HDF5Source(tmp_path / "mine.h5")
    silos = [HDF5Source(tmp_path / f"silo_0{client}.h5") for client in range(3)]
    ages = np.concatenate([silo.column("age") for silo in silos])
    rows = (4 * ages).astype(int)
    assert sorted(rows) == list(range(30))
    assert np.array_equal(np.concatenate([silo.column("site") for silo in silos]), whole.column("site")[rows])
    assert np.array_equal(np.concatenate([silo.labels["train"] for silo in silos]), whole.labels["train"][rows])
    for silo in silos:
        assert silo.attributes["class_names"].tolist() == whole.attributes["class_names"].tolist()
        assert (silo.name, silo.mean, set(silo.columns())) == ("mine", (0.25,), {"age", "site"})


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("s_{client}_{x}.h5", "expected a pattern with {client} and nothing else in braces"),
        ("s_{client:zz}.h5", "expected a pattern with {client} and nothing else in braces"),
        ("s_{client[0]}.h5", "expected a pattern with {client} and nothing else in braces"),
        ("s_{client.h5", "expected a pattern with {client} and nothing else in braces"),
        ("s_{client!r:.1}.h5", "expected a pattern with {client} and nothing else in braces"),
    ],
)
def test_a_pattern_that_is_none(tmp_path, capsys, pattern, message):
    with h5py.File(tmp_path / "tale.h5", "w") as file:
        file["train/text"] = file["test/text"] = np.frombuffer(b"a b " * 50, np.uint8)
    for data in ("digits", tmp_path / "tale.h5"):
        assert message in fails(capsys, "partition", data, "--clients", 12, "--write", tmp_path / pattern)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_split_of_a_task_is_of_what_it_trains_on(tmp_path, capsys):
    pattern = tmp_path / "silo_{client}.h5"
    words = ["partition", "digits", "--task", "auc", "--seed", 3, "--clients", 3]
    code, output, errors = run(capsys, *words, "--write", pattern)
    assert code == 0, errors
    assert "850 of 850 in total" in output and "train on them with --task auc --task.removed_share 0" in output
    place = RankContext(3, range(3), 0, 1, 3, None, torch.device("cpu"), torch.float64)
    whole = DeepAUC().load(place, Stride())
    silos = DeepAUC(data=str(pattern), removed_share=0).load(place, Stride())
    for task in (whole, silos):
        task.synchronise(SoloLink())
    for client, line in enumerate(output.splitlines()[1:4]):
        everything = torch.arange(whole.num_samples(client))
        (inputs, labels, p), (own_inputs, own_labels, own_p) = (
            task.batch(client, everything) for task in (whole, silos)
        )
        assert torch.equal(inputs, own_inputs) and torch.equal(labels, own_labels) and p == own_p
        assert line.split() == [str(client), str(len(labels)), *map(str, torch.bincount(labels).tolist())]
    assert "has no partition of samples" in fails(capsys, "partition", "digits", "--task", "language")
    assert "unknown setting task.data: task attack" in fails(capsys, "partition", "digits", "--task", "attack")


def test_text_silos_written(tmp_path, capsys):
    content = "".join(f"a line of {number} words\n" for number in range(300)).encode()
    with h5py.File(tmp_path / "tale.h5", "w") as file:
        file["train/text"] = file["test/text"] = np.frombuffer(content, np.uint8)
    words = ["partition", tmp_path / "tale.h5", "--clients", 3]
    pattern = tmp_path / "new" / "silo_{client}.h5"
    code, output, _ = run(capsys, *words, "--write", pattern)
    assert code == 0 and "written: 3 files" in output
    silos = [h5py.File(str(pattern).format(client=client)) for client in range(3)]
    for split in ("train", "test"):
        assert b"".join(silo[f"{split}/text"][:].tobytes() for silo in silos) == content
    assert "expected {client} in the name" in fails(capsys, *words, "--write", tmp_path / "x.h5")


def test_parts_of_a_text_are_those_of_training_and_are_drawn(tmp_path, capsys):
    """Words, not bytes, are dealt evenly: long words come first here, short ones last."""
    pytest.importorskip("matplotlib")
    content = b"extraordinary " * 50 + b"a b\n" * 101
    with h5py.File(tmp_path / "tale.h5", "w") as file:
        file["train/text"] = file["test/text"] = np.frombuffer(content, np.uint8)
    picture, pattern = tmp_path / "words.png", tmp_path / "silo_{client}.h5"
    words = ["partition", tmp_path / "tale.h5", "--clients", 3, "--plot", picture, "--write", pattern]
    code, output, errors = run(capsys, *words)
    assert code == 0, errors
    assert "words per client: 117 to 118, 353 in total" in output
    place = RankContext(3, range(3), 0, 1, 0, None, torch.device("cpu"), torch.float64)
    loaded = [Language(data=str(path)).load(place, None) for path in (tmp_path / "tale.h5", pattern)]
    for task in loaded:
        task.synchronise(SoloLink())
    for client, line in enumerate(output.splitlines()[1:4]):
        whole, silo = (task._train[client].tolist() for task in loaded)
        assert whole == silo and line.split()[:2] == [str(client), str(len(whole))]
    pixels = np.asarray(pytest.importorskip("PIL.Image").open(picture).convert("RGB"))
    assert (pixels[..., 2] > pixels[..., 0] + 50.0).mean() > 0.1  # bars
    assert "353 words are too few for 200 parts" in fails(capsys, *words[:2], "--clients", 200)


def test_help_of_partition(capsys):
    for words in (["--help"], ["partition", "--help"], ["partition", "digits", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert not ended.value.code and "partition" in capsys.readouterr().out


def test_the_module_starts():
    ended = execute([sys.executable, "-m", "fedmpi", "data", "list"], cwd=ROOT)
    assert ended.returncode == 0 and "fashion_mnist" in ended.stdout and not ended.stderr


def test_a_pipe_that_closes_is_no_error():
    ended = execute(["sh", "-c", f"{sys.executable} -m fedmpi data list | true"], cwd=ROOT)
    assert not ended.stderr


TABLE = "a,b,sick\n" + "".join(f"{row},{row + 0.5},{row % 2}\n" for row in range(20))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TABLE.replace("7,7.5", "7,"), "line 9 has an empty field in column b: expected a number in every line"),
        (TABLE.replace("a,b,", "a,a,"), "the header contains a twice"),
    ],
)
def test_tables_that_would_lose_something(tmp_path, capsys, text, message):
    (tmp_path / "t.csv").write_text(text)
    code, _, errors = run(capsys, "prepare", "t", "--from", tmp_path / "t.csv", "--data-dir", tmp_path)
    assert code == 2 and message in errors


def test_tables_as_office_programs_write_them(tmp_path, capsys):
    text = TABLE.replace("a,b,sick", "sick,b,town").replace(".5,0", ".5,Köln").replace(".5,1", ".5,Malmö") + "\n\n"
    (tmp_path / "t.csv").write_text(text, encoding="utf-8-sig")
    code, _, errors = run(
        capsys,
        "prepare",
        "t",
        "--from",
        tmp_path / "t.csv",
        "--label",
        "sick",
        "--keep",
        "town",
        "--data-dir",
        tmp_path,
    )
    assert code == 0, errors
    assert set(HDF5Source(tmp_path / "t.h5").column("town")) == {"Köln".encode(), "Malmö".encode()}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((20, 0)), "y": np.arange(20) % 2}, "train images are float64[16, 0]"),
        ({"x": np.zeros((20, 2)), "y": np.arange(20) + 2**40}, "classes: expected labels from 0 on without gaps"),
    ],
)
def test_arrays_that_are_no_data_set(tmp_path, capsys, arrays, message):
    np.savez(tmp_path / "t.npz", **arrays)
    code, _, errors = run(capsys, "prepare", "t", "--from", tmp_path / "t.npz", "--data-dir", tmp_path)
    assert code == 2 and message in errors
    assert [path.name for path in tmp_path.iterdir()] == ["t.npz"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prepare", "t", "--size", -3], "--size -3: expected at least 1"),
        (["prepare", "digits"], "prepare digits: digits come with scikit-learn"),
    ],
)
def test_requests_that_make_no_sense(tmp_path, capsys, words, message):
    code, _, errors = run(capsys, *words, "--from", tmp_path, "--data-dir", tmp_path)
    assert code == 2 and message in errors


def test_an_empty_text_is_refused(tmp_path, capsys):
    for split, words in (("train", ""), ("test", "a b\n")):
        (tmp_path / f"{split}.txt").write_text(words)
    code, _, errors = run(capsys, "prepare", "t", "--from", tmp_path, "--data-dir", tmp_path)
    assert code == 2 and "train.txt: is empty: expected words" in errors


def test_a_folder_without_a_test_set_says_so(tmp_path, capsys):
    (tmp_path / "train" / "cat").mkdir(parents=True)
    code, _, errors = run(capsys, "prepare", "t", "--from", tmp_path, "--data-dir", tmp_path)
    assert code == 2 and "contains train/ but no test/" in errors


@pytest.mark.parametrize("mark", "-.")
def test_official_files_where_torchvision_keeps_them(tmp_path, capsys, mark):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for file in idx_files(raw, zipped=False).iterdir():
        file.rename(raw / file.name.replace("-idx", f"{mark}idx"))
    code, _, errors = run(capsys, "prepare", "fashion_mnist", "--from", tmp_path, "--data-dir", tmp_path)
    assert code == 0, errors
    np.testing.assert_array_equal(HDF5Source(tmp_path / "fashion_mnist.h5").labels["train"], LABELS)


@pytest.mark.rarely
@pytest.mark.parametrize("size", ["4k", "16k", "24k"])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, size):
    """HDF5 crashed when it closed a file that could not be written."""
    lines = "".join(f"{number},{number * 7 % 13},{number % 2}\n" for number in range(3000))
    (tmp_path / "it.csv").write_text(f"a,b,label\n{lines}")
    with disk_of(tmp_path / "small", size) as folder:
        words = ["prepare", "it", "--from", tmp_path / "it.csv", "--data-dir", folder]
        ended = execute([sys.executable, "-m", "fedmpi", "data", *words], cwd=ROOT)
        assert ended.returncode == 2, ended.stderr
        assert ended.stderr == f"fedmpi: error: {folder}/it.h5: cannot be written: No space left on device\n"
        assert not [*folder.iterdir()]


def test_a_pipe_in_the_data_folder_is_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "it.h5")
    assert run(capsys, "list", "--data-dir", tmp_path)[0] == 0


@pytest.mark.parametrize("option", ["--from", "--data-dir", "--columns", "--one-hot"])
def test_two_hyphens_are_no_value(tmp_path, capsys, option):
    """argparse made an empty list of them."""
    assert f"{option}=--: expected another value" in fails(capsys, "prepare", "it", f"{option}=--")
