"""Images and arrays: depth, modes, axes and classes are kept, or named in one line."""

import json

import h5py
import numpy as np
import pytest
from helpers import train
from test_columns import prepared as prepare

DRAW = np.random.default_rng(0)
Image = pytest.importorskip("PIL.Image")


def refused(capsys, folder, origin, *words):
    with pytest.raises(SystemExit) as ended:
        prepare(folder, origin, *words)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1, error
    return error


def pictures(folder, arrays, classes="AB", ending="png"):
    """A folder of ten pictures per class."""
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number, array in enumerate(arrays):
            Image.fromarray(array).save(folder / name / f"{number}.{ending}")
    return folder


def everything(source):
    return np.concatenate([source.read(split, np.arange(len(source.labels[split]))) for split in source.labels])


@pytest.mark.parametrize(("dtype", "ending"), [(np.uint16, "png"), (np.uint16, "tif"), (np.float32, "tif")])
def test_deep_images_keep_their_depth(tmp_path, dtype, ending):
    """All pixels were 255."""
    arrays = (1000 + 400 * DRAW.random((10, 6, 5))).astype(dtype)
    source, account = prepare(tmp_path, pictures(tmp_path / "deep", arrays, ending=ending))
    assert source.dtype == np.float32 and source.shape == (6, 5)
    assert np.array_equal(np.sort(everything(source), None), np.sort(np.concatenate([arrays] * 2), None))
    assert account["assumed"][0].endswith("and are float32")


def test_the_colours_of_a_palette_are_read(tmp_path):
    """And not their numbers; black and white is grey."""
    arrays, shapes = DRAW.integers(0, 2, (10, 6, 5, 3)).astype(np.uint8) * 255, []
    for kind in ("colours", "transparent", "two"):
        folder = pictures(tmp_path / kind, arrays)
        for path in folder.rglob("*.png"):
            image = Image.open(path)
            image = image.convert("1") if kind == "two" else image.quantize(8)
            image.save(path, **({"transparency": 0} if kind == "transparent" else {}))
        source, _ = prepare(tmp_path, folder, name=kind)
        shapes.append(source.shape)
        if kind == "colours":
            found = {one.tobytes() for one in everything(source)}
            assert found == {one.tobytes() for one in arrays}
    assert shapes == [(6, 5, 3), (6, 5, 4), (6, 5)]


def test_modes_agree_or_are_named(tmp_path, capsys):
    arrays = DRAW.integers(0, 256, (10, 6, 5, 4)).astype(np.uint8)
    folder = pictures(tmp_path / "it", arrays)
    assert prepare(tmp_path, folder)[0].shape == (6, 5, 4)
    Image.fromarray(arrays[0, ..., 0]).save(folder / "B" / "3.png")
    assert "3.png: has the mode L: expected RGBA, the mode of" in refused(capsys, tmp_path, folder)
    assert prepare(tmp_path, folder, "--mode", "RGB")[0].shape == (6, 5, 3)
    pages = [Image.fromarray(one) for one in arrays[..., 0]]
    pages[0].save(folder / "A" / "9.tif", save_all=True, append_images=pages[1:])
    assert "9.tif: contains 10 images: expected one per file" in refused(capsys, tmp_path, folder, "--mode", "L")


def test_a_silo_may_lack_a_class_and_hidden_folders_are_none(tmp_path, capsys):
    arrays = DRAW.integers(0, 256, (10, 6, 5)).astype(np.uint8)
    folder = pictures(tmp_path / "it", arrays, classes=["A", "C", ".ipynb_checkpoints"])
    (folder / "A" / "notes.txt").write_text("x")
    source, account = prepare(tmp_path, folder, "--classes", "A,B,C")
    assert source.num_classes == 3 and account["classes"] == {"A": 10, "B": 0, "C": 10}
    assert account["not_used"] == {".ipynb_checkpoints": "is hidden", "A/notes.txt": "is no image"}
    assert "contains the folders C: expected those of --classes A,B" in refused(
        capsys, tmp_path, folder, "--classes", "A,B"
    )
    np.savez(tmp_path / "it.npz", x=arrays, y=np.array(["A", "C"] * 5))
    assert prepare(tmp_path, tmp_path / "it.npz", "--classes", "A,B,C")[0].labels["train"].max() == 2
    np.savez(tmp_path / "it.npz", x=arrays, y=np.array([0, 1] * 5))
    source, account = prepare(tmp_path, tmp_path / "it.npz", "--classes", "A,B,C")
    assert source.num_classes == 3 and account["classes"] == {"A": 5, "B": 5, "C": 0}


def test_folders_that_do_not_fit(tmp_path, capsys):
    arrays = DRAW.integers(0, 256, (10, 6, 5)).astype(np.uint8)
    np.savez(tmp_path / "it.npz", x=arrays, y=np.array(["A", "C"] * 5))
    what = "it.npz: has labels C: expected those of --classes A,B"
    assert what in refused(capsys, tmp_path, tmp_path / "it.npz", "--classes", "A,B")
    train_folder = pictures(tmp_path / "it" / "train", arrays)
    test_folder = pictures(tmp_path / "it" / "test", arrays, classes="AC")
    what = f"{tmp_path}/it: to test: expected the same folders as in {train_folder}: A, B"
    assert what in refused(capsys, tmp_path, tmp_path / "it")
    (test_folder / "C").rename(test_folder / "B")
    (tmp_path / "it" / "nothing").mkdir()
    account = prepare(tmp_path, tmp_path / "it")[1]
    assert account["not_used"] == {"nothing": "is an empty folder"} and account["test_rows"] == "those of the folder"
    for file in test_folder.rglob("*.png"):
        Image.open(file).convert("RGB").save(file)
    what = f"{tmp_path}/it: images to train and to test have the modes L and RGB: expected one, or --mode"
    assert what in refused(capsys, tmp_path, tmp_path / "it")
    assert prepare(tmp_path, tmp_path / "it", "--mode", "L")[0].shape == (6, 5)


@pytest.mark.parametrize(
    ("shape", "words", "axes", "expected"),
    [
        ((20, 3, 6, 5), (), (0, 2, 3, 1), (6, 5, 3)),
        ((20, 6, 5, 3), (), (0, 1, 2, 3), (6, 5, 3)),
        ((20, 7, 6, 5), (), None, (7, 6, 5, 1)),
        ((20, 1, 7, 6, 5), (), (0, 2, 3, 4, 1), (7, 6, 5, 1)),
        ((20, 6, 5, 2), ("--layout", "nhwc"), (0, 1, 2, 3), (6, 5, 2)),
        ((20, 4, 6, 3), ("--layout", "nchw"), (0, 2, 3, 1), (6, 3, 4)),
        ((20, 2, 6, 5), ("--layout", "nchw"), (0, 2, 3, 1), (6, 5, 2)),
        ((20, 6, 5, 2), ("--layout", "nhwd"), (0, 3, 1, 2), (2, 6, 5, 1)),
        ((20, 2, 7, 6, 5), (), (0, 2, 3, 4, 1), (7, 6, 5, 2)),
        ((20, 7, 6, 5, 2), (), (0, 1, 2, 3, 4), (7, 6, 5, 2)),
    ],
)
def test_axes_of_arrays(tmp_path, shape, words, axes, expected):
    x = DRAW.integers(0, 256, shape).astype(np.uint8)
    names = {"train_images": x[:10], "train_labels": np.arange(10)[:, None] % 2} | {  # as in MedMNIST
        "test_images": x[10:], "test_labels": np.arange(10)[:, None] % 2, "val_images": x[:2],
    }  # fmt: skip
    np.savez(tmp_path / "it.npz", **names)
    source, account = prepare(tmp_path, tmp_path / "it.npz", *words)
    assert source.shape == expected and account["not_used"] == {"val_images": "another array"}
    x = x if axes is None else x.transpose(axes)
    assert np.array_equal(everything(source), x.reshape(20, *expected))
    assert "the axes of the arrays are n" in account["assumed"][0]


def test_channels_that_may_be_slices_need_a_layout(tmp_path, capsys):
    """Multispectral images were taken for volumes."""
    for shape, layout in (((20, 13, 64, 48), "nchw"), ((20, 64, 48, 13), "nhwc"), ((20, 2, 6, 5), "nchw")):
        np.savez(tmp_path / "it.npz", x=np.zeros(shape), y=np.arange(20) % 2)
        assert f"expected --layout {layout} if they have" in refused(capsys, tmp_path, tmp_path / "it.npz")


def test_a_layout_that_does_not_fit(tmp_path, capsys):
    np.savez(tmp_path / "it.npz", X=np.zeros((20, 6, 5)), Y=np.arange(20) % 2)
    assert prepare(tmp_path, tmp_path / "it.npz")[0].shape == (6, 5)
    assert "--layout nchw: samples are [16, 6, 5]" in refused(capsys, tmp_path, tmp_path / "it.npz", "--layout", "nchw")


def test_silos_of_images_are_scaled_by_the_mean_and_deviation_of_all(tmp_path):
    """Silos whose images differ in brightness could not train together."""
    light = DRAW.integers(100, 256, (10, 6, 5, 3)).astype(np.uint8)
    for silo, arrays in enumerate((light, light[:4] // 3)):
        folder = pictures(tmp_path / f"s{silo}", arrays, classes="ABC"[: 3 - silo])
        prepare(tmp_path, folder, "--classes", "A,B,C", name=f"s{silo}")
    ended = train(2, tmp_path, "--data", tmp_path / "s{client}.h5", "--rounds", 1, "--name", "run")
    assert ended.returncode == 0, ended.stderr
    assert "inputs are scaled by the mean and std of all clients' samples together" in ended.stderr
    pixels = [h5py.File(tmp_path / f"s{silo}.h5")["train/images"][:] / 255 for silo in (0, 1)]
    facts = json.loads((tmp_path / "run" / "model.json").read_text())["input"]
    assert np.allclose(facts["mean"], np.concatenate(pixels).mean((0, 1, 2)), rtol=1e-12)
    assert np.allclose(facts["std"], np.concatenate(pixels).std((0, 1, 2)), rtol=1e-12)
    words = ["--data", tmp_path / "s{client}.h5", "--rounds", 1, "--name", "own", "--task.mean", "[0.5]"]
    assert train(2, tmp_path, *words).returncode == 0
    own = json.loads((tmp_path / "own" / "model.json").read_text())["input"]
    assert own["mean"] == [0.5] and own["std"] == facts["std"]


def test_numbers_of_other_machines(tmp_path):
    """Arrays in the other order of bytes were refused."""
    x = DRAW.standard_normal((20, 6, 5)).astype(">f4")
    np.savez(tmp_path / "it.npz", x=x, y=(np.arange(20) % 2).astype(">i2"))
    source, _ = prepare(tmp_path, tmp_path / "it.npz")
    assert source.dtype == np.float32 and np.array_equal(np.sort(everything(source), None), np.sort(x, None))


def test_no_picture_is_lost_or_turned(tmp_path):
    """Pictures beside the classes' folders, those of val/, and what EXIF says were left out without a word."""
    arrays = DRAW.integers(0, 256, (10, 6, 6, 3)).astype(np.uint8)
    folder = pictures(tmp_path / "it", arrays)
    Image.fromarray(arrays[0]).save(folder / "stray.png")
    assert prepare(tmp_path, folder)[1]["not_used"] == {"stray.png": "1 images, in no folder of a class"}
    for split in ("train", "test", "val"):
        pictures(tmp_path / "three" / split, arrays)
    assert prepare(tmp_path, tmp_path / "three")[1]["not_used"] == {"val": "20 images, in no folder of a class"}
    turned = Image.fromarray(arrays[0])
    exif = turned.getexif()
    exif[0x0112] = 6  # the camera was held upright
    for name in "AB":
        for number in range(10):
            turned.save(folder / name / f"{number}.png", exif=exif)
    assert np.array_equal(everything(prepare(tmp_path, folder)[0])[0], np.rot90(arrays[0], -1))


def test_large_whole_numbers_are_kept(tmp_path):
    """Differences of 1 were lost in float32."""
    x = 10**9 + np.arange(40).reshape(20, 2)
    np.savez(tmp_path / "it.npz", x=x, y=np.arange(20) % 2)
    assert np.array_equal(np.sort(everything(prepare(tmp_path, tmp_path / "it.npz")[0]), None), x.ravel())


def test_classes_that_differ_in_the_low_bits_of_16_are_learned(tmp_path):
    """Pixels of 1000 and of 1200 were both 255: accuracy .5."""
    for name, base in (("A", 1000), ("B", 1200)):
        pictures(tmp_path / "deep", (base + DRAW.integers(0, 150, (30, 6, 5))).astype(np.uint16), classes=name)
    prepare(tmp_path, tmp_path / "deep", name="deep")
    words = ["--data", tmp_path / "deep.h5", "--rounds", 40, "--partition", "iid", "--name", "run"]
    ended = train(2, tmp_path, *words)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"] > 0.95
