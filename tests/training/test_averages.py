"""Losses and metrics are averaged as training weights the clients; the other average stands beside under its name."""

import json

import h5py
import numpy as np
import pytest
import torch
from helpers import ROOT, train

import fedmpi
from fedmpi.ground.errors import UserError
from fedmpi.tasks.base import averages

SIZES = (90, 30, 6)
MODULE = """
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset
import fedmpi

def data(size, seed):
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 3, generator=draw)
    return TensorDataset(inputs, (inputs.sum(1) > 0.5).long())

WEIGHTS = torch.tensor([1.0, 5.0])

class Pair(fedmpi.Task):
    model, num_classes = "mlp", 2
    def train(self, client, num_clients): return data(20 + 10 * client, client)
    def test(self): return data(250, 9)
    def loss(self, model, batch):
        each = functional.cross_entropy(model(batch[0]), batch[1], weight=WEIGHTS, reduction="sum")
        return each, WEIGHTS[batch[1]].sum()

class Mean(Pair):
    def loss(self, model, batch): return functional.cross_entropy(model(batch[0]), batch[1], weight=WEIGHTS)
"""


@pytest.fixture(scope="module")
def silos(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("silos"), np.random.default_rng(0)
    for client, size in enumerate(SIZES):
        with h5py.File(folder / f"silo_{client}.h5", "w") as file:
            for split, number in (("train", size), ("test", max(4, size // 3))):
                labels = draw.integers(0, 2, number)
                file[f"{split}/images"] = (draw.standard_normal((number, 4)) + labels[:, None]).astype("float32")
                file[f"{split}/labels"] = labels
    return folder


def loss_and_accuracy(model, path, split):
    with h5py.File(path) as file, torch.no_grad():
        inputs, labels = torch.tensor(file[f"{split}/images"][:]), torch.tensor(file[f"{split}/labels"][:])
        outputs = model(inputs)
    return torch.nn.functional.cross_entropy(outputs, labels).item(), (outputs.argmax(1) == labels).double().mean()


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_silos_of_different_sizes(silos, tmp_path, weighting):
    run = fedmpi.train(
        data=str(silos / "silo_{client}.h5"), clients=3, algorithm="fedavg", rounds=2, weighting=weighting, out=tmp_path
    )
    files = [silos / f"silo_{client}.h5" for client in range(3)]
    tests = [loss_and_accuracy(run.model, file, "test") for file in files]
    trained = [loss_and_accuracy(run.model, file, "train")[0] for file in files]
    other = "samples" if weighting == "uniform" else "clients"
    num_tests = [max(4, size // 3) for size in SIZES]
    for name, values, numbers in (
        ("train_loss", trained, SIZES),
        ("test_loss", [loss for loss, _ in tests], num_tests),
        ("accuracy", [accuracy for _, accuracy in tests], num_tests),
    ):
        means = {"clients": np.mean(values), "samples": np.average(values, weights=numbers)}
        assert run.final[f"{name}_{other}"] == pytest.approx(means.pop(other), rel=1e-5)
        assert run.final[name] == pytest.approx(*means.values(), rel=1e-5)


def test_the_loss_in_local_steps_follows_the_weighting(silos, tmp_path):
    runs = {}
    for weighting in ("uniform", "samples"):
        options = {"algorithm": {"name": "fedavg", "step_size": 1e-9}, "rounds": 1, "batch_size": 100, "local_steps": 1}
        data = str(silos / "silo_{client}.h5")
        runs[weighting] = fedmpi.train(data=data, clients=3, weighting=weighting, out=tmp_path, **options)
    for run in runs.values():  # full batches: the loss in local steps is the objective
        assert run.metrics[-1]["loss"] == pytest.approx(run.final["train_loss"], rel=1e-4)
    assert runs["uniform"].metrics[-1]["loss"] != pytest.approx(runs["samples"].metrics[-1]["loss"], rel=1e-3)


def test_equal_clients_have_one_average():
    assert averages("loss", [1.0, 3.0], [100, 100], "samples") == {"loss": 2.0}
    assert averages("loss", [1.0, np.nan, 3.0], [100, 0, 300], "uniform") == {"loss": 2.0, "loss_samples": 2.5}
    assert averages("loss", [np.nan], [0], "uniform") == {}
    assert averages("loss", [1.0, 3.0], [100, 101], "uniform") == {"loss": 2.0}  # the two means nearly agree
    assert averages("loss", [1.0, 3.0], [100, 150], "uniform") == {"loss": 2.0, "loss_samples": pytest.approx(2.2)}


@pytest.mark.parametrize("task", ["Pair", "Mean"])
def test_the_loss_of_an_own_task_does_not_depend_on_the_ranks(tmp_path, task):
    (tmp_path / "own.py").write_text(MODULE)
    records = []
    for ranks in (1, 2, 3):
        words = ("--task", f"own.{task}", "--clients", 3, "--rounds", 1, "--algorithm", "fedavg", "--name", f"{ranks}")
        ended = train(
            ranks, tmp_path, *words, "--aggregation", "reproducible", env={"PYTHONPATH": f"{ROOT}:{tmp_path}"}
        )
        assert ended.returncode == 0, ended.stderr
        records.append(json.loads((tmp_path / str(ranks) / "metrics.jsonl").read_text().splitlines()[-1]))
    assert len({(record["train_loss"], record["test_loss"]) for record in records}) == 1
    if task == "Mean":
        assert "weighted by samples" in ended.stdout
        return
    scope = {}
    exec(MODULE, scope)
    model, (inputs, targets) = fedmpi.load(tmp_path / "1"), scope["data"](250, 9).tensors
    with torch.no_grad():
        right = torch.nn.functional.cross_entropy(model(inputs), targets, weight=scope["WEIGHTS"]).item()
    assert records[0]["test_loss"] == pytest.approx(right, rel=1e-6)


def test_empty_tests_are_said_and_have_no_metrics(tmp_path, capfd):
    data = torch.utils.data.TensorDataset(torch.randn(6, 2), torch.zeros(6))
    task = fedmpi.Task.of(
        "Empty",
        train=lambda client, num: data,
        test=lambda: torch.utils.data.Subset(data, []),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        metrics={"error": "sklearn.metrics.r2_score"},
    )
    run = fedmpi.train(task=task, model=torch.nn.Linear(2, 1), rounds=1, out=tmp_path, algorithm="fedavg", threads=1)
    assert {*run.final} == {"train_loss"} and "the test sets are empty" in capfd.readouterr().err


@pytest.mark.parametrize("rule", ["keep", "merge", "drop"])
def test_batch_norm_with_one_sample_left(tmp_path, rule):
    """A minibatch of one sample has no variance: a run of 21 samples in minibatches of 10 ended before round 1."""
    inputs = torch.randn(21, 3, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
    task = fedmpi.Task.of(
        "Left",
        train=lambda client, num: data,
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    options = {"task": task, "model": model, "clients": 2, "batch_size": 10, "local_epochs": 1, "out": tmp_path}
    run = fedmpi.train(rounds=20, algorithm={"name": "fedavg", "step_size": 0.5}, last_batch=rule, threads=1, **options)
    assert run.final["train_loss"] < 0.3 and run.metrics[-1]["iteration"] == 40  # two minibatches in a pass


@pytest.mark.parametrize("ranks", [1, 3])
def test_further_metrics_of_silos_are_those_of_scikit_learn(silos, tmp_path, ranks):
    sk = pytest.importorskip("sklearn.metrics")
    words = (
        "--data",
        silos / "silo_{client}.h5",
        "--clients",
        3,
        "--rounds",
        1,
        "--algorithm",
        "fedavg",
        "--name",
        "a",
    )
    ended = train(ranks, tmp_path, *words, "--task.metrics", "f1,auroc,sensitivity,specificity,brier,confusion")
    assert ended.returncode == 0 and "brier, confusion: of all test samples" in ended.stdout, ended.stderr
    model, shares, labels = fedmpi.load(tmp_path / "a"), [], []
    for client in range(3):
        with h5py.File(silos / f"silo_{client}.h5") as file, torch.no_grad():
            shares.append(model(torch.tensor(file["test/images"][:])).double().softmax(1)[:, 1].numpy())
            labels.append(file["test/labels"][:])
    share, label = map(np.concatenate, (shares, labels))
    run = fedmpi.load_run(tmp_path / "a")
    for name, right in {
        "f1": sk.f1_score(label, share > 0.5),
        "auroc": sk.roc_auc_score(label, share),
        "sensitivity": sk.recall_score(label, share > 0.5),
        "specificity": sk.recall_score(label, share > 0.5, pos_label=0),
        "brier": sk.brier_score_loss(label, share),
    }.items():
        assert run.final(name) == pytest.approx(right, abs=1e-6), name
    assert run.tables["confusion"][1] == sk.confusion_matrix(label, share > 0.5).tolist()
    assert run.clients["f1"][0] == pytest.approx(sk.f1_score(labels[0], shares[0] > 0.5))


def test_wrong_names_of_metrics_are_one_line(tmp_path):
    with pytest.raises(UserError, match=r"task\.metrics = aurocc: unknown metric aurocc.*auroc"):
        fedmpi.train(task={"name": "classification", "metrics": "aurocc"}, rounds=1, out=tmp_path)
    with pytest.raises(UserError, match="specificity is of two classes, and the data have 10"):
        fedmpi.train(task={"name": "classification", "metrics": "specificity"}, rounds=1, out=tmp_path)


def test_one_data_set_without_test_data_is_evaluated(tmp_path):
    draw = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(10, 5, generator=draw), torch.arange(10) % 2)
    run = fedmpi.train(data=[data], model=torch.nn.Linear(5, 2), rounds=1, threads=1, out=tmp_path)
    assert run.final["train_loss"] > 0 and "test_loss" not in run.final


@pytest.mark.parametrize("ranks", [1, 3])
def test_balanced_class_weights_are_those_of_scikit_learn_over_all_silos(silos, tmp_path, ranks):
    sk = pytest.importorskip("sklearn.utils.class_weight")
    words = ("--data", silos / "silo_{client}.h5", "--clients", 3, "--rounds", 2, "--algorithm", "fedavg")
    ended = train(ranks, tmp_path, *words, "--name", "a", "--task.class_weights", "balanced")
    assert ended.returncode == 0 and "means over samples of class weight * loss" in ended.stdout, ended.stderr
    model, files = fedmpi.load(tmp_path / "a"), [h5py.File(silos / f"silo_{client}.h5") for client in range(3)]
    labels = np.concatenate([file["train/labels"][:] for file in files])
    weights = torch.tensor(sk.compute_class_weight("balanced", classes=np.arange(2), y=labels), dtype=torch.float32)
    run = fedmpi.load_run(tmp_path / "a")
    for split in ("train", "test"):
        of_silos = []
        for file in files:
            with torch.no_grad():
                losses = torch.nn.functional.cross_entropy(
                    model(torch.tensor(file[f"{split}/images"][:])),
                    right := torch.tensor(file[f"{split}/labels"][:]),
                    reduction="none",
                )
            of_silos.append((weights[right] * losses).mean().item())
        assert run.clients[f"{split}_loss"] == pytest.approx(of_silos, rel=1e-6)
        assert run.final(f"{split}_loss") == pytest.approx(np.mean(of_silos), rel=1e-6)


def test_a_class_without_samples_does_not_count_in_balanced_weights(tmp_path):
    sk, draw = pytest.importorskip("sklearn.utils.class_weight"), np.random.default_rng(0)
    labels, inputs = np.array([0] * 12 + [2] * 4), draw.standard_normal((16, 3)).astype("float32")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.attrs["num_classes"] = 3
        for split in ("train", "test"):
            file[f"{split}/images"], file[f"{split}/labels"] = inputs, labels
    task = {"name": "classification", "class_weights": "balanced", "data": str(tmp_path / "data.h5")}
    run = fedmpi.train(task=task, clients=1, rounds=1, algorithm="fedavg", threads=1, out=tmp_path, name="run")
    with torch.no_grad():
        outputs = fedmpi.load(tmp_path / "run")(torch.tensor(inputs))
        losses = torch.nn.functional.cross_entropy(outputs, torch.tensor(labels), reduction="none").numpy()
    weights = sk.compute_class_weight("balanced", classes=np.array([0, 2]), y=labels)
    assert run.final["train_loss"] == pytest.approx(np.mean(weights[labels // 2] * losses), rel=1e-5)


def test_balanced_class_weights_change_what_images_train_and_other_values_are_one_line(tmp_path):
    pytest.importorskip("sklearn")
    common = {"clients": 2, "rounds": 2, "batch_size": 40, "algorithm": "fedavg", "model": "mlp", "holdout": 0.1}
    words = {"partition": {"name": "dirichlet", "concentration": 0.3}, "threads": 1, "out": tmp_path}
    plain = fedmpi.train(**common, **words)
    run = fedmpi.train(task={"name": "classification", "class_weights": "balanced"}, **common, **words)
    assert run.metrics[0]["loss"] != plain.metrics[0]["loss"]
    with pytest.raises(UserError, match=r"task\.class_weights = 3: expected one of equal, balanced"):
        fedmpi.train(task={"name": "classification", "class_weights": "3"}, **common, **words)
    with pytest.raises(UserError, match=r"task\.class_weights = balanced: the task auc"):
        fedmpi.train(task={"name": "auc", "class_weights": "balanced"}, rounds=1, out=tmp_path)
