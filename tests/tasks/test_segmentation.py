"""Masks as labels, and volumes: from files to a trained model."""

import json
import math
import textwrap

import h5py
import numpy as np
import pytest
import torch
from helpers import ROOT, train

from fedmpi.cli.predict.__main__ import main as predict
from fedmpi.prepare.__main__ import main as data
from fedmpi.tasks.segmentation import Segmentation

Image = pytest.importorskip("PIL.Image")
DRAW = np.random.default_rng(0)
MODELS = """
    from torch import nn


    def pixels(shape, num_classes):
        return nn.Conv2d(shape[0], num_classes, 1)


    class Volume(nn.Sequential):
        def __init__(self, shape, num_classes):
            assert list(shape) == [1, 7, 6, 5]
            layers = nn.Conv3d(1, 4, 3), nn.ReLU(), nn.AdaptiveMaxPool3d(1), nn.Flatten()
            super().__init__(*layers, nn.Linear(4, num_classes))
"""


def refused(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        data([str(word) for word in words])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1, error
    return error


@pytest.fixture
def folders(tmp_path):
    """Images whose bright pixels are class 1, and masks with the values 0 and 255."""
    for folder in ("images", "masks"):
        (tmp_path / folder / "a").mkdir(parents=True)
    for number in range(30):
        pixels = DRAW.integers(0, 256, (9, 6)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / "a" / f"{number}.bmp")
        Image.fromarray(np.where(pixels > 128, 255, 0).astype(np.uint8)).save(
            tmp_path / "masks" / "a" / f"{number}.png"
        )
    return tmp_path


def prepare(folder, *words):
    return ("prepare", "seg", "--from", folder / "images", "--masks", folder / "masks", "--data-dir", folder, *words)


@pytest.mark.rarely
def test_masks_are_the_classes_of_pixels(folders, capsys, monkeypatch):
    data([str(word) for word in prepare(folders)])
    assert "pixels 0, 255 of masks are the classes 0 to 1" in capsys.readouterr().out
    with h5py.File(folders / "seg.h5") as file:
        for split in ("train", "test"):
            assert np.array_equal(file[f"{split}/masks"][:], file[f"{split}/images"][:] > 128)
    (folders / "own.py").write_text(textwrap.dedent(MODELS))
    words = ["--task", "segmentation", "--model", "own.pixels", "--algorithm", "fedavg", "--algorithm.step_size", 1]
    env = {"PYTHONPATH": f"{folders}:{ROOT}"}
    ended = train(2, folders, *words, "--data", folders / "seg.h5", "--rounds", 40, "--name", "one", env=env)
    assert ended.returncode == 0, ended.stderr
    last = json.loads((folders / "one" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["dice"] > 0.97 and last["accuracy"] > 0.97
    facts = json.loads((folders / "one" / "model.json").read_text())["input"]
    with h5py.File(folders / "seg.h5") as file:
        assert np.allclose(facts["mean"], (file["train/images"][:] / 255).mean()) and facts["divide_by"] == 255
    monkeypatch.syspath_prepend(folders)
    for samples, names in (("images", [f"a/{number}.bmp" for number in range(30)]), ("seg.h5", None)):
        out = folders / f"{samples}.csv"
        predict([str(word) for word in (folders / "one", folders / samples, "--import", "own", "--out", out)])
        found = np.load(out.with_suffix(".npz"))
        with h5py.File(folders / "seg.h5") as file:
            images = file["test/images"][:]
        if names:
            assert sorted(found["files"]) == sorted(names)
            images = np.stack([np.asarray(Image.open(folders / "images" / name)) for name in found["files"]])
        assert (found["predicted"] == (images > 128)).mean() > 0.97 and found["class_names"].tolist() == ["0", "255"]
    words_of_silos = ["--partition", "iid", "--clients", "2", "--write", str(folders / "s{client}.h5")]
    data(["partition", str(folders / "seg.h5"), *words_of_silos])
    ended = train(2, folders, *words, "--data", folders / "s{client}.h5", "--rounds", 40, "--name", "silos", env=env)
    assert ended.returncode == 0, ended.stderr
    last = json.loads((folders / "silos" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["dice"] > 0.97 and len(last["clients"]["dice"]) == 2


def test_dice_is_the_mean_of_all_classes_but_the_first():
    def dice(answers, masks):
        counts = np.zeros((4, 4), int)
        np.add.at(counts, (masks, answers), 1)
        return Segmentation.metrics["dice"](torch.tensor(counts))

    assert dice([0, 0, 1, 1, 2], [0, 1, 1, 2, 2]) == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert dice([0, 3, 3], [0, 3, 0]) == pytest.approx(2 / 3)  # nobody has 1 and 2
    assert math.isnan(dice([0, 1], [0, 0])) and math.isnan(dice([0, 0], [0, 0]))


def test_masks_of_another_size_have_the_nearest_pixels(folders):
    data([str(word) for word in prepare(folders, "--size", 12)])
    rows, columns = (((np.arange(12) + 0.5) * side / 12).astype(int) for side in (9, 6))
    right = [np.asarray(Image.open(path))[rows][:, columns] > 128 for path in (folders / "images" / "a").iterdir()]
    with h5py.File(folders / "seg.h5") as file:
        masks = np.concatenate([file[f"{split}/masks"][:] for split in ("train", "test")])
    assert sorted(map(bytes, masks)) == sorted(bytes(one.astype(np.uint8)) for one in right)


def test_the_label_of_an_image_is_the_most_frequent_class_of_its_mask_besides_0(tmp_path):
    """So that the test set has a share of each."""
    shares = [(16, 0, 0)] * 5 + [(8, 5, 3)] * 10 + [(8, 3, 5)] * 15  # pixels of the classes 0, 1 and 2
    for number, counts in enumerate(shares):
        for folder in ("images", "masks"):
            (tmp_path / folder).mkdir(exist_ok=True)
            pixels = np.repeat([0, 1, 2], counts).astype(np.uint8).reshape(4, 4)
            Image.fromarray(pixels if folder == "masks" else pixels * 90).save(tmp_path / folder / f"{number}.png")
    data([str(word) for word in prepare(tmp_path)])
    with h5py.File(tmp_path / "seg.h5") as file:
        assert np.bincount(file["train/labels"][:]).tolist() == [4, 8, 12]
        assert np.bincount(file["test/labels"][:]).tolist() == [1, 2, 3]


def test_masks_that_do_not_fit_their_images(folders, capsys):
    mask = folders / "masks" / "a" / "3.png"
    Image.new("L", (5, 5)).save(mask)
    assert "3.png: is [5, 5]: expected [9, 6]" in refused(capsys, *prepare(folders))
    Image.new("RGB", (6, 9)).save(mask)
    assert "3.png: is uint8[9, 6, 3]: expected one whole number per pixel" in refused(capsys, *prepare(folders))
    mask.unlink()
    assert "1 images have no mask, like " in refused(capsys, *prepare(folders))
    Image.new("L", (6, 9), 7).save(mask)
    assert "expected one of 0, 255 (--classes)" in refused(capsys, *prepare(folders, "--classes", "0,255"))
    mask.with_name("more.png").write_bytes(mask.read_bytes())
    data([str(word) for word in prepare(folders, "--classes", "255,7,0")])
    assert "more.png: has no image" in capsys.readouterr().out
    with h5py.File(folders / "seg.h5") as file:
        masks = np.concatenate([file[f"{split}/masks"][:] for split in ("train", "test")])
        pixels = np.concatenate([file[f"{split}/images"][:] for split in ("train", "test")])
    of_7 = (masks == 1).all((1, 2))
    assert of_7.sum() == 1 and np.array_equal(masks[~of_7], np.where(pixels[~of_7] > 128, 0, 2))
    for file in mask.parent.iterdir():
        Image.open(file).convert("1").save(file)
    data([str(word) for word in prepare(folders, "--force")])
    assert "2 classes: 0 (" in capsys.readouterr().out  # they were called False and True


@pytest.mark.rarely
def test_volumes_reach_three_dimensional_convolutions(tmp_path):
    volumes = DRAW.standard_normal((60, 7, 6, 5)).astype(np.float32)
    volumes[30:, 2:5, 2:5, 2:4] += 3
    np.savez(tmp_path / "v.npz", x=volumes, y=np.arange(60) // 30)
    data(["prepare", "v", "--from", str(tmp_path / "v.npz"), "--data-dir", str(tmp_path)])
    (tmp_path / "own.py").write_text(textwrap.dedent(MODELS))
    words = [
        "--data",
        tmp_path / "v.h5",
        "--model",
        "own.Volume",
        "--rounds",
        60,
        "--name",
        "run",
        "--partition",
        "iid",
    ]
    ended = train(2, tmp_path, *words, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"] > 0.9
