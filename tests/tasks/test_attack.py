"""The black-box attack: its loss, its classifier from a run folder, its data and metrics, its figure."""

import functools
import json
import shutil

import h5py
import numpy as np
import pytest
import torch
import yaml
from helpers import train
from safetensors.torch import load_file

import fedmpi.data.partitions
from fedmpi.comm.solo import SoloLink
from fedmpi.data.partitions import Column, Even, Partition, Shared
from fedmpi.data.source import DigitsSource
from fedmpi.federation.client import Client
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import known
from fedmpi.models.mlp import MLP
from fedmpi.oracles import TwoPoint
from fedmpi.oracles.base import LocalObjective
from fedmpi.oracles.flat_module import FlatModule
from fedmpi.tasks.attack import BlackBoxAttack, load_classifier
from fedmpi.tasks.base import RankContext
from fedmpi.training.config import read_command_line

Y = 4


PLACE = RankContext(3, range(3), 0, 1, 0, None, torch.device("cpu"), torch.float64)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """The run folder of a small network that fedmpi trained on the digits."""
    out = tmp_path_factory.mktemp("classifier")
    settings = ["--algorithm", "fedavg", "--model", "mlp", "--model.hidden", 16, "--name", "c"]
    done = train(1, out, *settings, "--rounds", 30, "--eval-every", 30)
    assert done.returncode == 0, done.stderr
    return out / "c"


@pytest.fixture(scope="module")
def task(classifier):
    loaded = BlackBoxAttack(classifier=str(classifier), distortion_weight=0.3).load(PLACE, Even())
    loaded.synchronise(SoloLink())
    return loaded


@functools.cache
def network(classifier):
    """The classifier by plain PyTorch, from pixels in [0, 1] to logits."""
    net = MLP((1, 8, 8), 10, hidden=16).double()
    net.load_state_dict(load_file(classifier / "model.safetensors"))
    source = DigitsSource()
    return lambda images: net(torch.as_tensor((images - source.mean[0]) / source.std[0])).detach().numpy()


def digits(split):
    source = DigitsSource()
    at = np.flatnonzero(source.labels[split] == Y)
    return source.read(split, at) / 255


def test_the_classifier_is_the_one_that_was_trained(classifier):
    loaded, source = load_classifier(classifier, PLACE)
    images = digits("test")
    found = loaded(torch.as_tensor(images - 0.5).unsqueeze(1)).detach().numpy()
    np.testing.assert_allclose(found, network(classifier)(images), atol=1e-12)
    assert not any(p.requires_grad for p in loaded.parameters()) and not loaded.net.training
    assert source.name == "digits"


def test_the_data_are_the_images_that_the_classifier_gets_right(classifier, task):
    right = (network(classifier)(digits("train")).argmax(1) == Y).sum()
    assert sum(task.num_samples(client) for client in range(3)) == right > 100


def test_the_split_that_is_saved_names_rows_of_the_file(task, tmp_path):
    task.write_split(tmp_path)
    source = DigitsSource()
    with h5py.File(tmp_path / "partition.h5") as file:
        assert dict(file.attrs) == {"data": "digits", "unit": "rows"}
        parts = [file[f"client_{client}"][:] for client in range(3)]
    for client, part in enumerate(parts):
        images = task.batch(client, torch.arange(task.num_samples(client))).squeeze(1).numpy() + 0.5
        np.testing.assert_allclose(images, source.read("train", part) / 255, atol=1e-12)
        assert set(source.labels["train"][part]) == {Y}


def test_a_partition_by_brightness_reads_the_brightness(classifier):
    """Every client's images are brighter than those of the client before it."""
    loaded = BlackBoxAttack(classifier=str(classifier)).load(PLACE, Column(by="brightness", cut=True))
    loaded.synchronise(SoloLink())
    means = [
        loaded.batch(client, torch.arange(loaded.num_samples(client))).mean((1, 2, 3)).numpy() for client in range(3)
    ]
    assert means[0].max() <= means[1].min() and means[1].max() <= means[2].min()
    assert means[0].mean() < means[1].mean() - 0.01 < means[2].mean() - 0.02


@pytest.mark.parametrize("name", known(fedmpi.data.partitions, Partition))
def test_every_partition_is_used_or_refused(classifier, name):
    """The images are of one class: a partition by class would deal as if it were another one."""
    cls = known(fedmpi.data.partitions, Partition)[name]
    task = BlackBoxAttack(classifier=str(classifier))
    if name in ("classes", "dirichlet", "halves", "similarity"):
        with pytest.raises(UserError, match=f"partition {name}: assigns samples by class"):
            task.load(PLACE, cls())
        return
    if cls is Column:
        with pytest.raises(UserError, match="has no column train/group"):
            task.load(PLACE, Column())
        with pytest.raises(UserError, match="partition column: assigns samples by class"):
            task.load(PLACE, Column(by="labels", cut=True))
        return
    loaded = task.load(PLACE, cls())
    loaded.synchronise(SoloLink())
    whole = sum(loaded.num_samples(client) for client in range(3))
    assert whole % 3 == 0 if cls is Shared else whole > 100


def written_out(classifier, images, xi, c):
    """Eq. (8) image by image: (mean of the first term, mean of ‖ϑ' - ϑ‖², share mistaken)."""
    margins, distortions, mistaken = [], [], []
    for image in images:
        theta = image - 0.5
        with np.errstate(divide="ignore"):
            attacked = 0.5 * np.tanh(np.arctanh(2 * theta) + xi)
        logits = network(classifier)((attacked + 0.5)[None])[0]
        others = max(logits[j] for j in range(10) if j != Y)
        margins.append(max(logits[Y] - others, 0))
        distortions.append(((attacked - theta) ** 2).sum())
        mistaken.append(logits.argmax() != Y)
    return np.mean(margins), np.mean(distortions), np.mean(mistaken)


@pytest.mark.parametrize("size", [0.0, 0.7, 3.0])
def test_loss_and_metrics_are_eq_8(classifier, task, size):
    module = task.build_model(None, {}).double()
    xi = size * np.random.default_rng(0).normal(size=(8, 8))
    module.xi.data = torch.as_tensor(xi)[None]
    batch = task.batch(1, torch.arange(9))
    images = batch.squeeze(1).numpy() + 0.5
    margin, distortion, _ = written_out(classifier, images, xi, 0.3)
    with torch.no_grad():
        assert task.loss(module, batch).item() == pytest.approx(margin + 0.3 * distortion, abs=1e-10)
        metrics = task.evaluate(module, SoloLink())
    tests = digits("test")
    tests = tests[network(classifier)(tests).argmax(1) == Y]
    assert metrics["attack_accuracy"] == pytest.approx(written_out(classifier, tests, xi, 0.3)[2])
    of_clients = [
        written_out(classifier, task.batch(c, torch.arange(task.num_samples(c))).squeeze(1).numpy() + 0.5, xi, 0.3)
        for c in range(3)
    ]
    margin, distortion, _ = np.mean(of_clients, axis=0)
    assert metrics["attack_loss"] == pytest.approx(margin, abs=1e-9)
    assert metrics["distortion"] == pytest.approx(distortion, abs=1e-9)
    assert metrics["train_loss"] == pytest.approx(margin + 0.3 * distortion, abs=1e-9)
    margins, distortions, _ = np.transpose(of_clients)
    assert metrics.clients["attack_loss"] == pytest.approx(margins, abs=1e-9)
    assert metrics.clients["distortion"] == pytest.approx(distortions, abs=1e-9)
    assert metrics.clients["train_loss"] == pytest.approx(margins + 0.3 * distortions, abs=1e-9)
    assert size or metrics["attack_accuracy"] == 0 == pytest.approx(metrics["distortion"])


@pytest.mark.parametrize(("darker", "num_mistaken"), [(0, 0), (1, 2), (3, 4)])
def test_the_figure_shows_mistaken_images_first(task, darker, num_mistaken):
    """Half of them at most: 3 fools the classifier on seven images."""
    module = task.build_model(None, {}).double()
    module.xi.data.fill_(-darker)
    with torch.no_grad():
        mistaken = task._attack(module, task._to_show(module))[2].tolist()
    assert mistaken == [True] * num_mistaken + [False] * (8 - num_mistaken)


def test_black_and_white_pixels_stay_unless_clipped(task):
    module = task.build_model(None, {}).double()
    module.xi.data.fill_(2.0)
    images = torch.tensor([-0.5, 0.5, 0.0], dtype=torch.float64).view(3, 1, 1, 1).expand(3, 1, 8, 8)
    with torch.no_grad():
        plain, clipped = module(images), module(images, clip=1e-2)
    assert torch.equal(plain[:2], images[:2]) and (plain[2] > 0.4).all()
    assert (clipped[0] > -0.5 + 1e-2).all() and clipped.isfinite().all()


def test_the_oracle_asks_about_all_directions_in_one_pass(task):
    """b2 perturbed images times the batch in a single call of the classifier, and no graph."""
    flat = FlatModule(task.build_model(None, {}).double())
    kind, calls = TwoPoint(directions=10), []
    objective = LocalObjective(flat, task, lambda number: torch.arange(6))
    oracle = kind.make(Client(0, buffers=flat.buffers), objective, kind.workspace(flat))
    handle = task._classifier.register_forward_hook(lambda module, inputs, logits: calls.append(logits))
    try:
        estimate = oracle.gradient(flat.x, oracle.draw())
    finally:
        handle.remove()
    assert len(calls) == 1 and calls[0].grad_fn is None and estimate.grad_fn is None
    assert oracle.num_evaluations == 11 and estimate.abs().max() > 0


def test_the_attack_brings_its_oracle_and_partition(classifier):
    config = read_command_line(["--task", "attack", "--task.classifier", str(classifier), "--algorithm", "fafed"])
    assert isinstance(config.oracle, TwoPoint) and type(config.partition).__name__ == "Uneven"
    with pytest.raises(UserError, match="does not take a model"):
        read_command_line(["--task", "attack", "--model", "mlp"])


def test_wrong_classifiers_are_one_line_each(classifier, tmp_path):
    def loading(folder, **fields):
        return BlackBoxAttack(classifier=str(folder), **fields).load(PLACE, Even())

    with pytest.raises(UserError, match="task.classifier is missing"):
        loading("")
    with pytest.raises(UserError, match=r"settings\.yaml and model\.h5"):
        loading(tmp_path / "nothing")
    with pytest.raises(UserError, match="target_class = 10: expected 0..9"):
        loading(classifier, target_class=10)
    for name, change in (
        ("another task", {"task": {"name": "quadratic"}}),
        ("another model", {"model": {"name": "mlp", "hidden": 17}}),
    ):
        shutil.copytree(classifier, folder := tmp_path / name)
        settings = yaml.safe_load((folder / "settings.yaml").read_text())
        (folder / "settings.yaml").write_text(yaml.safe_dump({**settings, **change}))
        with pytest.raises(UserError, match="expected classification|does not fit MLP"):
            loading(folder)
    shutil.copytree(classifier, folder := tmp_path / "normalised")
    settings = yaml.safe_load((folder / "settings.yaml").read_text())
    for name, value in (("mean", "x"), ("mean", [0.1, 0.2]), ("std", [0.0]), ("std", {"a": 1})):
        (folder / "settings.yaml").write_text(yaml.safe_dump({**settings, "task": {**settings["task"], name: value}}))
        with pytest.raises(UserError, match=f"normalised: {name} = .*: expected 1 numbers"):
            loading(folder)
    shutil.copytree(classifier, folder := tmp_path / "of-silos")
    settings = yaml.safe_load((folder / "settings.yaml").read_text())
    settings["task"]["data"] = "silo_{client}.h5"
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(UserError, match="was trained on silo files silo_{client}.h5: expected one data file"):
        loading(folder)
    shutil.copytree(classifier, folder := tmp_path / "torn")
    (folder / "model.h5").write_bytes(b"nothing")
    with pytest.raises(UserError, match="model.h5"):
        loading(folder)
    shutil.copytree(classifier, folder := tmp_path / "blind")
    with h5py.File(folder / "model.h5", "r+") as file:
        for value in file["model"].values():
            value[...] = 0
    with pytest.raises(UserError, match="recognises no image of class 4"):
        loading(folder).synchronise(SoloLink())


@pytest.mark.rarely
def test_an_attack_under_mpirun(classifier, tmp_path):
    """Two ranks, more clients than ranks: the objective falls, images are mistaken, a figure is drawn."""
    settings = ["--task", "attack", "--task.classifier", classifier, "--algorithm", "fafedzo", "--clients", 5]
    options = ["--batch-size", 10, "--rounds", 20, "--local-steps", 5, "--eval-every", 5, "--name", "a"]
    done = train(2, tmp_path, *settings, "--algorithm.step_size", 0.03, *options)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if "attack_accuracy" in line]
    assert evaluated[-1]["train_loss"] < 0.8 * evaluated[0]["train_loss"]
    assert evaluated[-1]["attack_accuracy"] > 0.2 > evaluated[0]["attack_accuracy"]
    xi = load_file(tmp_path / "a" / "model.safetensors")["xi"].double().numpy()[0]
    tests, source = digits("test"), DigitsSource()
    tests = tests[network(classifier)(tests).argmax(1) == Y]
    with h5py.File(tmp_path / "a" / "partition.h5") as file:
        of_clients = [source.read("train", file[f"client_{client}"][:]) / 255 for client in range(5)]
    margin, distortion, _ = np.mean([written_out(classifier, images, xi, 1.0) for images in of_clients], axis=0)
    last = evaluated[-1]
    assert last["attack_accuracy"] == pytest.approx(written_out(classifier, tests, xi, 1.0)[2])
    found = last["attack_loss"], last["distortion"], last["train_loss"]
    assert found == pytest.approx((margin, distortion, margin + distortion), rel=1e-4)
    pytest.importorskip("matplotlib")
    assert (tmp_path / "a" / "attack.png").read_bytes()[:4] == b"\x89PNG"
