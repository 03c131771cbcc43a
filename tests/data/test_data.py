"""Reading, normalising and augmenting samples; the split in the run folder; the order of minibatches."""

import dataclasses
import functools
import re

import h5py
import numpy as np
import pytest
import torch
from helpers import start, train

from fedmpi.comm.solo import SoloLink
from fedmpi.data.partitions import IID, Even
from fedmpi.data.sampler import EpochSampler, LastBatch
from fedmpi.data.samples import Augmentation, Samples
from fedmpi.data.source import HDF5Source, open_source
from fedmpi.federation.client import Client
from fedmpi.ground.errors import UserError
from fedmpi.ground.machine.devices import fits
from fedmpi.ground.streams import FIRST
from fedmpi.oracles import AutogradOracle, seed_noise
from fedmpi.oracles.base import LocalObjective
from fedmpi.oracles.flat_module import FlatModule
from fedmpi.prepare.writer import write_file
from fedmpi.tasks.base import RankContext
from fedmpi.tasks.classification import Classification


def place(num_clients=1, dtype=torch.float32):
    return RankContext(num_clients, range(num_clients), 0, 1, 0, None, torch.device("cpu"), dtype)


def write(path, images, attributes=(), **columns):
    with h5py.File(path, "w") as file:
        for split in ("train", "test"):
            file[f"{split}/images"], file[f"{split}/labels"] = images, np.arange(len(images)) % 2
        for name, values in columns.items():
            file[f"train/{name}"] = values
        file.attrs.update(attributes)
    return path


@pytest.mark.parametrize("chunks", [None, 7])
@pytest.mark.parametrize("indices", [[0], [3, 4, 5], [0, 6, 7, 13, 14, 29], list(range(30)), []], ids=str)
def test_any_rows_can_be_read(tmp_path, chunks, indices):
    images = np.random.default_rng(0).integers(0, 256, (30, 4, 4), dtype=np.uint8)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        for split in ("train", "test"):
            file.create_dataset(f"{split}/images", data=images, chunks=chunks and (chunks, 4, 4))
            file[f"{split}/labels"] = np.zeros(30, np.uint8)
    read = HDF5Source(tmp_path / "data.h5").read("train", np.array(indices, dtype=np.int64))
    assert np.array_equal(read, images[indices])


def test_attributes_of_the_file(tmp_path):
    attributes = {"dataset": "mnist", "mean": 0.5, "std": [0.25], "num_classes": 5}
    source = HDF5Source(write(tmp_path / "mine.h5", np.zeros((4, 2, 2), np.uint8), attributes))
    assert (source.name, source.mean, source.std, source.num_classes) == ("mnist", (0.5,), (0.25,), 10)
    source = HDF5Source(write(tmp_path / "mine.h5", np.zeros((4, 2, 2)), {"num_classes": 5}))
    assert (source.name, source.mean, source.num_classes, source.classes_declared) == ("mine", (0.0,), 5, True)


@pytest.mark.parametrize("shape", [(3,), (4, 5, 3), (2, 4, 5, 3), (4, 5)])
def test_means_and_deviations_of_channels_are_measured(tmp_path, shape):
    """Of training samples; bytes count as pixel/255, grey images have one channel, a constant one is divided by 1."""
    draw = np.random.default_rng(0)
    for kind, per_value in (("uint8", 255), ("float32", 1)):
        images = draw.integers(0, 200, (1200, *shape)).astype(kind)
        images[..., 1] = 13 if len(shape) != 2 else images[..., 1]
        splits = {"train/images": images[:1100], "test/images": images[1100:] + 50}  # more than a chunk
        splits |= {"train/labels": np.arange(1100) % 2, "test/labels": np.arange(100) % 2}
        write_file(tmp_path / f"{kind}.h5", splits, {})
        source, values = HDF5Source(tmp_path / f"{kind}.h5"), images[:1100].astype(float) / per_value
        values = values.reshape(-1, 1 if len(shape) == 2 else 3)
        assert source.mean == pytest.approx(tuple(values.mean(0)), rel=1e-6)
        assert source.std == pytest.approx(tuple(np.where(values.std(0) > 1e-9, values.std(0), 1)), rel=1e-6)


def test_columns(tmp_path):
    path = write(tmp_path / "mine.h5", np.zeros((4, 2, 2)), site=["a", "b", "a", "c"], age=[3, 1, 2, 4])
    source = HDF5Source(path)
    assert source.column("site").tolist() == [b"a", b"b", b"a", b"c"]
    assert source.column("age").tolist() == [3, 1, 2, 4]
    assert source.column("labels").tolist() == [0, 1, 0, 1]


def test_brightness_is_a_column_of_all_images(tmp_path):
    images = np.arange(7 * 6, dtype=np.uint8).reshape(7, 2, 3)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for split in ("train", "test"):
            file[f"{split}/images"], file[f"{split}/labels"] = images, np.zeros(7, int)
    assert np.array_equal(HDF5Source(tmp_path / "x.h5").column("brightness"), images.mean((1, 2)))
    digits = open_source("digits", None)
    assert digits.column("brightness").shape == digits.labels["train"].shape


def test_inputs_are_normalised_and_channels_first():
    colours = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 1.0)
    inputs, labels = Samples.from_arrays(colours, np.array([1, 0]), mean, std, place(dtype=torch.float64)).at(
        torch.tensor([1, 0])
    )
    expected = (colours[[1, 0]] / 255 - np.array(mean)) / np.array(std)
    np.testing.assert_allclose(inputs.numpy(), expected.transpose(0, 3, 1, 2))
    assert labels.tolist() == [0, 1]
    features = Samples.from_arrays(np.array([[3.0, 4.0]]), np.array([0]), (1.0,), (2.0,), place(dtype=torch.float64))
    assert features.at(torch.tensor([0]))[0].tolist() == [[1.0, 1.5]]


def plainly_augmented(image, padding, shift, mirrored):
    """One image as the words say: pad, crop, mirror."""
    image = image[:, ::-1] if mirrored else image
    padded = np.pad(image, [(padding, padding), (padding, padding)] + [(0, 0)] * (image.ndim - 2))
    y, x = shift
    return padded[y : y + image.shape[0], x : x + image.shape[1]]


@pytest.mark.rarely
@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3)])
@pytest.mark.parametrize(("padding", "flip"), [(2, True), (2, False), (0, True), (5, False)])
def test_augmented_images_are_crops_and_mirror_images(shape, padding, flip):
    rows = np.random.default_rng(0).integers(1, 256, (10, *shape), dtype=np.uint8)
    torch.manual_seed(0)
    batch = Augmentation(padding, flip).apply(torch.from_numpy(rows)[torch.arange(10).repeat(20)]).numpy()
    seen = set()
    for number, image in enumerate(batch):
        ways = [
            (y, x, mirrored)
            for y in range(2 * padding + 1)
            for x in range(2 * padding + 1)
            for mirrored in ([False, True] if flip else [False])
            if np.array_equal(image, plainly_augmented(rows[number % 10], padding, (y, x), mirrored))
        ]
        assert ways
        seen.update(ways)
    assert len(seen) >= min(150, (2 * padding + 1) ** 2 * (1 + flip)) * 0.7  # and all of them occur
    assert batch.dtype == np.uint8


@pytest.mark.parametrize("augmentation", [None, Augmentation(2, True)])
def test_samples_in_the_memory_of_the_host(augmentation, monkeypatch):
    """The device "meta" stands for a GPU: a minibatch is there, and the data are not."""
    rows, labels = np.zeros((10, 8, 8, 3), np.uint8), np.arange(10)
    monkeypatch.setattr("fedmpi.tasks.base.memory_of", lambda device: (0, 0))
    context = dataclasses.replace(place(), device=torch.device("meta"))
    samples = Samples.from_arrays(rows, labels, (0.5, 0.4, 0.3), (0.3, 0.3, 0.3), context)
    inputs, its_labels = samples.at(torch.arange(4), augmentation)
    assert (inputs.device.type, inputs.shape, inputs.dtype) == ("meta", (4, 3, 8, 8), context.dtype)
    assert (its_labels.device.type, its_labels.shape) == ("meta", (4,))
    assert samples.labels.device.type == samples.take(np.arange(3)).labels.device.type == "cpu"
    assert [len(its_labels) for _, its_labels in samples.all()] == [10]


def test_a_task_knows_where_its_data_are(tmp_path):
    """The device "meta" stands for a GPU, to which the task belongs after its data were loaded."""
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8), dtype=np.uint8)
    loaded = Classification(data=str(write(tmp_path / "data.h5", images))).load(place(), Even())
    loaded.synchronise(SoloLink())
    assert not loaded.is_on_host
    loaded._context = dataclasses.replace(place(), device=torch.device("meta"))
    assert loaded.is_on_host


def test_data_lie_on_the_device_if_they_fit(monkeypatch):
    """Every data set has a place of its own; the device "meta" stands for a GPU."""
    monkeypatch.setattr("fedmpi.tasks.base.memory_of", lambda device: (1000, 1200))
    on = functools.partial(dataclasses.replace, place(), device=torch.device("meta"))
    found = []
    for num, num_local in [(8, 2), (24, 2), (24, 1)]:  # 8 bytes of pixels and 8 of a label each: 128 or 384 bytes
        rows, labels = np.zeros((num, 2, 2, 2), np.uint8), np.zeros(num, np.int64)
        context = on(num_local=num_local)
        found.append(Samples.from_arrays(rows, labels, (0.5, 0.4), (0.3, 0.2), context).labels.device.type)
    assert found == ["meta", "cpu", "meta"]
    assert fits(10**12, None, 8) and fits(400, (1000, 1200), 1) and not fits(401, (1000, 1200), 1)
    assert fits(200, (1000, 1200), 2) and not fits(201, (1000, 1200), 2) and not fits(1, (600, 1200), 1)


def test_both_gradients_of_a_pair_see_one_augmentation_and_evaluation_sees_none(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8), dtype=np.uint8)
    task = Classification(data=str(write(tmp_path / "data.h5", images)), crop_padding=3, flip=True)
    loaded = task.load(place(), Even())
    loaded.synchronise(SoloLink())
    flat = FlatModule(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2)))
    rows = torch.zeros(2, flat.dim)

    def oracle(seed=0):
        objective = LocalObjective(flat, loaded, loaded.sampler(0, 10, 10, 0, "cpu"), seed)
        return AutogradOracle(Client(0, buffers=flat.buffers), objective, rows)

    first = oracle()
    xi = first.draw()
    g, g_prev = first.gradient_pair(flat.x, flat.x.clone(), xi)
    assert torch.equal(g, g_prev)
    torch.rand(7)  # what others draw from torch's generator does not matter
    again = oracle().draw()
    assert torch.equal(xi.batch[0], again.batch[0])
    assert not torch.equal(xi.batch[0], first.draw().batch[0])
    assert not torch.equal(xi.batch[0], oracle(seed=1).draw().batch[0])
    plain = torch.from_numpy(images).float() / 255
    assert torch.allclose(torch.cat([inputs for inputs, _ in loaded._train[0].all()]).squeeze(1), plain)
    assert torch.allclose(torch.cat([inputs for inputs, _ in loaded._tests[0].all()]).squeeze(1), plain)


def darker(image):
    """Half as bright, or a third."""
    return image / (2 + torch.randint(2, ()))


def dimmed(image):
    return image.clamp(max=0.5)


class Upside:
    def __call__(self, image):
        return image.flip(-2)


not_callable = 3


@pytest.mark.parametrize(
    ("shape", "mean"), [((8, 6), (0.5,)), ((8, 6, 1), (0.5,)), ((8, 6, 3), (0.1, 0.2, 0.3)), ((5,), (0.5,))]
)
def test_a_transform_changes_training_inputs_before_they_are_normalised(tmp_path, shape, mean):
    images = np.random.default_rng(0).integers(0, 256, (20, *shape), dtype=np.uint8)
    path, settings = str(write(tmp_path / "data.h5", images)), {"mean": mean, "std": (0.25,) * len(mean)}
    loaded = Classification(data=path, transform=f"{__name__}.darker", **settings).load(place(), Even())
    loaded.synchronise(SoloLink())
    assert loaded.random_batches
    torch.manual_seed(3)
    changed, labels = loaded.batch(0, torch.arange(20))
    torch.manual_seed(3)
    factors = torch.stack([1 / (2 + torch.randint(2, ())) for _ in range(20)])
    plain, expected_labels = next(iter(loaded._train[0].all()))
    middle = torch.tensor(mean).view(-1, *(1,) * (plain.dim() - 2)) if plain.dim() > 2 else mean[0]
    pixels = plain * 0.25 + middle
    expected = (pixels * factors.view(-1, *(1,) * (plain.dim() - 1)) - middle) / 0.25
    assert changed.shape == plain.shape and torch.equal(labels, expected_labels) and len(set(factors.tolist())) == 2
    assert torch.allclose(changed, expected, atol=1e-5)
    assert torch.allclose(next(iter(loaded._tests[0].all()))[0], plain)


@pytest.mark.parametrize("kind", ["uint8", "float32"])
def test_a_transform_gets_pixels_from_0_to_1_or_values_as_they_are(tmp_path, kind):
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 6), dtype=np.uint8)
    images = images if kind == "uint8" else (images / 100).astype(kind)
    settings = {"mean": (0.1,), "std": (0.25,), "transform": f"{__name__}.dimmed"}
    loaded = Classification(data=str(write(tmp_path / "data.h5", images)), **settings).load(place(), Even())
    loaded.synchronise(SoloLink())
    values = torch.from_numpy(images).float()[:, None] / (255 if kind == "uint8" else 1)
    expected = (values.clamp(max=0.5) - 0.1) / 0.25
    assert torch.allclose(loaded.batch(0, torch.arange(20))[0], expected, atol=1e-5)


def test_a_transform_also_changes_samples_that_are_dealt_anew(tmp_path):
    path = str(write(tmp_path / "data.h5", np.random.default_rng(0).integers(0, 256, (20, 8, 8), dtype=np.uint8)))
    batches = []
    for transform in (None, f"{__name__}.Upside"):
        loaded = Classification(data=path, transform=transform).load(place(2), IID(redeal=True))
        loaded.synchronise(SoloLink())
        loaded.begin_round(0)
        batches.append(loaded.batch(0, torch.arange(5))[0])
    assert torch.allclose(batches[0].flip(-2), batches[1], atol=1e-6)


def test_a_transform_follows_crops_and_a_class_is_made(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8), dtype=np.uint8)
    path = str(write(tmp_path / "data.h5", images))
    batches = []
    for transform in (None, f"{__name__}.Upside"):
        loaded = Classification(data=path, crop_padding=2, transform=transform).load(place(), Even())
        loaded.synchronise(SoloLink())
        torch.manual_seed(1)
        batches.append(loaded.batch(0, torch.arange(20))[0])
    assert torch.allclose(batches[0].flip(-2), batches[1], atol=1e-6)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        ("nomodule.augment", "nomodule.augment: ModuleNotFoundError: No module named 'nomodule'"),
        (f"{__name__}.not_callable", "expected a function, and this is a int"),
        (
            "torch.argmax",
            r"torch.argmax: returned torch.int64 \[\] for an input \[1, 8, 8\]: expected floats of the same",
        ),
        ("torch.linalg.inv", "torch.linalg.inv: .*singular"),
    ],
)
def test_wrong_transforms_are_one_line(tmp_path, transform, message):
    path = str(write(tmp_path / "data.h5", np.zeros((20, 8, 8), dtype=np.uint8)))
    with pytest.raises(UserError, match=f"^task.transform = .*{message}") as error:
        loaded = Classification(data=path, transform=transform).load(place(), Even())
        loaded.synchronise(SoloLink())
        loaded.try_out(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2)), 0)
    assert "\n" not in str(error.value)


def test_shuffled_parts_are_the_rows_of_the_partition(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (40, 3, 3), dtype=np.uint8)
    loaded = Classification(data=str(write(tmp_path / "data.h5", images))).load(place(3), IID())
    loaded.synchronise(SoloLink())
    loaded.write_split(tmp_path)
    with h5py.File(tmp_path / "partition.h5") as file:
        for client in range(3):
            part = file[f"client_{client}"][:]
            inputs, labels = loaded.batch(client, torch.arange(len(part)))
            np.testing.assert_allclose(inputs[:, 0].numpy() * 255, images[part], rtol=1e-6)
            assert labels.tolist() == (part % 2).tolist()
        assert sum(len(file[name]) for name in file) == 40


def test_the_split_is_saved_with_the_run(tmp_path):
    ended = train(2, tmp_path, "--data", "digits", "--partition", "dirichlet", "--rounds", 1, "--name", "it")
    assert ended.returncode == 0, ended.stderr
    with h5py.File(tmp_path / "it" / "partition.h5") as file:
        parts = [file["client_0"][:], file["client_1"][:]]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(1438))


@pytest.mark.rarely
def test_training_loads_no_reader_of_other_formats(tmp_path):
    program = f"""
import sys
from fedmpi.train import main
main(["--out", {str(tmp_path)!r}, "--rounds", "1", "--clients", "1", "--name", "it"])
ours = [name for name in sys.modules if name.startswith("fedmpi.data.")]
others = ("formats", "prepare", "download", "official", "writer", "commands")
print("loaded", [name for name in ours if name.split(".")[2] in others])
"""
    ended = start(1, "-c", program)
    assert ended.returncode == 0 and "loaded []" in ended.stdout, ended.stderr
    assert (tmp_path / "it" / "partition.h5").exists()


def test_silo_files_train(tmp_path):
    source = open_source("digits", None)
    for client, part in enumerate(np.array_split(np.arange(1438), 3)):
        with h5py.File(tmp_path / f"silo_{client}.h5", "w") as file:
            file["train/images"], file["train/labels"] = source.read("train", part), source.labels["train"][part]
            file["test/images"], file["test/labels"] = (
                source.read("test", part[:50] // 5),
                source.labels["test"][part[:50] // 5],
            )
    ended = train(2, tmp_path, "--data", tmp_path / "silo_{client}.h5", "--clients", 3, "--rounds", 30)
    assert ended.returncode == 0, ended.stderr
    (folder,) = tmp_path.glob("*-silo-001")  # no braces, which a shell would expand
    assert not (folder / "partition.h5").exists()
    assert float(re.search(r"^  accuracy +(\S+)$", ended.stdout, re.MULTILINE)[1]) > 0.6


def test_without_a_hold_out_no_row_is_copied(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8), dtype=np.uint8)
    loaded = Classification(data=str(write(tmp_path / "data.h5", images))).load(place(), Even())
    rows = loaded._rows.collect(SoloLink())[0]
    loaded.synchronise(SoloLink())
    assert np.shares_memory(loaded._train[0]._rows.numpy(), rows)


@pytest.mark.parametrize("num_samples", [1, 7, 20])
def test_a_pass_is_every_sample_once(num_samples):
    sampler = EpochSampler(num_samples, 6, 6, seed=0, client=3)
    for first in (0, sampler.batches_per_pass):
        drawn = torch.cat([sampler(first + number) for number in range(sampler.batches_per_pass)])
        assert sorted(drawn.tolist()) == list(range(num_samples))


def test_each_client_has_an_order_of_its_own():
    for number in (0, FIRST):
        orders = [EpochSampler(50, 50, 50, seed, client)(number).tolist() for seed, client in ((0, 0), (0, 1), (1, 0))]
        assert len(set(map(tuple, orders))) == 3


def test_seeding_is_the_streams_own():
    seed_noise(5, torch.device("cpu"))
    first = torch.rand(3)
    seed_noise(5, torch.device("cpu"))
    assert torch.equal(first, torch.rand(3))


@pytest.mark.parametrize(
    ("num_samples", "last", "sizes"),
    [
        (20, LastBatch(), [8, 8, 4]),
        (17, LastBatch(), [8, 8, 1]),
        (17, LastBatch(least=2), [8, 9]),  # batch norm
        (18, LastBatch(least=2), [8, 8, 2]),
        (20, LastBatch("merge"), [8, 12]),
        (20, LastBatch("drop"), [8, 8]),
        (16, LastBatch("merge"), [8, 8]),
        (16, LastBatch("drop"), [8, 8]),
        (5, LastBatch("drop"), [5]),
    ],
)
def test_the_samples_left_at_the_end_of_a_pass(num_samples, last, sizes):
    sampler, plain = (EpochSampler(num_samples, 8, 8, seed=0, client=0) for _ in range(2))
    sampler.last_batch = last
    assert sampler.batches_per_pass == len(sizes)
    for of_pass in range(3):
        batches = [sampler(of_pass * len(sizes) + number) for number in range(len(sizes))]
        assert [*map(len, batches)] == sizes
        order = torch.cat([plain(of_pass * plain.batches_per_pass + n) for n in range(plain.batches_per_pass)])
        assert torch.cat(batches).tolist() == order[: sum(sizes)].tolist()
