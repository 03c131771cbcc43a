"""What a run decides for the user, or sends, is said in a line before its first round; and which classes lack tests."""

import csv

import h5py
import numpy as np
import pytest
import torch
from helpers import start, train
from torch.utils.data import TensorDataset

import fedmpi
from fedmpi.cli.predict.__main__ import main as predict

CROSSES = "every rank receives the labels and the model's outputs of all clients' test samples, to compute"
FEDAVG = {"algorithm": "fedavg", "threads": 1, "rounds": 1}


def write_silos(folder, counts, name="silo"):
    """Files of silos, with a list of the numbers of samples of each class, per silo and split."""
    stream = np.random.default_rng(0)
    for silo, of_splits in enumerate(counts):
        with h5py.File(folder / f"{name}_{silo}.h5", "w") as file:
            file.attrs["num_classes"], file.attrs["class_names"] = 3, ["ill", "well", "unknown"]
            for split, of_classes in zip(("train", "test"), of_splits):
                labels = np.repeat(np.arange(3), of_classes)
                inputs = stream.standard_normal((len(labels), 5)) + np.eye(5)[labels]
                file[f"{split}/images"], file[f"{split}/labels"] = inputs.astype("f4"), labels
    return str(folder / f"{name}_{{client}}.h5")


def lines_of(capfd):
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("fedmpi: ")]


@pytest.mark.rarely
def test_labels_that_cross_and_classes_without_tests(tmp_path):
    data = write_silos(tmp_path, [([20, 20, 20], [9, 4, 0]), ([20, 20, 20], [5, 6, 7])])
    words = ("--data", data, "--rounds", 1, "--algorithm", "fedavg", "--name", "run")
    ended = train(2, tmp_path, *words, "--task.metrics", "f1,auroc", "--scores", "samples")
    assert f"fedmpi: task.metrics: {CROSSES} auroc; without such" in ended.stderr, ended.stderr
    assert [line.split() for line in ended.stdout.splitlines() if "no test cases" in line] == [
        ["no", "test", "cases", "client", "0:", "unknown"]
    ]
    ended = start(2, "-m", "fedmpi", "evaluate", tmp_path / "run")
    header, first, second = ended.stdout.splitlines()[-3:]
    assert header.endswith("cases of ill  cases of well  cases of unknown"), ended.stdout + ended.stderr
    assert first.split()[-3:] == ["9", "4", "0"] and second.split()[-3:] == ["5", "6", "7"]
    ended = train(2, tmp_path, *words[:-1], "plain", "--task.metrics", "f1,auroc")
    assert "every rank receives" not in ended.stderr and ended.returncode == 0, ended.stderr
    ended = start(2, "-m", "own_metric_crosses", tmp_path)
    assert f"fedmpi: metrics of task Own: {CROSSES} of_all; without" in ended.stderr, ended.stderr
    ended = start(2, "-m", "own_metric_crosses", tmp_path, "bins")
    assert "LINE scores = bins: metric of_all needs the output and target of every sample" in ended.stdout, ended.stderr


@pytest.mark.parametrize("share", [100, 99])
def test_a_rare_class(tmp_path, capfd, share):
    data = write_silos(tmp_path, [([5 * share, 4, 50], [9, 4, 3]), ([0, 1, 50], [5, 6, 7])])
    fedmpi.train(data=data, clients=2, out=tmp_path, **FEDAVG)
    found = [line for line in lines_of(capfd) if "--task.class_weights balanced" in line]
    assert len(found) == (share == 100)
    assert not found or "500 of class ill and 5 of class well among the training samples" in found[0]
    balanced = {"name": "classification", "class_weights": "balanced"}
    fedmpi.train(data=data, task=balanced, clients=2, out=tmp_path, **FEDAVG)
    assert not lines_of(capfd)


@pytest.mark.parametrize("sizes", [(80, 20), (80, 80)])
def test_unequal_numbers_of_local_steps(tmp_path, capfd, sizes):
    data = [TensorDataset(torch.rand(size, 3), torch.arange(size) % 2) for size in sizes]
    for words in ({"local_epochs": 1.0}, {"local_steps": 2}):
        fedmpi.train(data=data, out=tmp_path, batch_size=10, weighting="samples", **words, **FEDAVG)
        expected = "local_epochs" in words and sizes[0] != sizes[1]
        assert ["clients make 2 to 8 local steps a round" in line for line in lines_of(capfd)] == [True] * expected
    fednova = {**FEDAVG, "algorithm": "fednova", "local_epochs": 1.0}
    fedmpi.train(data=data, out=tmp_path, batch_size=10, weighting="samples", **fednova)
    assert not lines_of(capfd)


def test_a_model_that_ends_in_softmax(tmp_path, capfd):
    data = [TensorDataset(torch.rand(20, 3), torch.arange(20) % 2)]
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Softmax(1))
    fedmpi.train(data=data, model=model, out=tmp_path, **FEDAVG)
    assert ["the model ends with Softmax: the loss applies softmax once more" in line for line in lines_of(capfd)] == [
        True
    ]


class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(3, 2))


@pytest.mark.parametrize("kind", ["multilabel", "regression"])
def test_predictions_of_labels_and_of_values(tmp_path, kind):
    """Neither is softmax over the columns."""
    inputs = torch.rand(20, 3)
    data = [TensorDataset(inputs, (inputs[:, :2] > 0.5).float())]
    run = fedmpi.train(data=data, task=kind, model=Net, test_data=data[0], out=tmp_path, **FEDAVG)
    np.savez(tmp_path / "samples.npz", x=inputs.numpy())
    words = [str(run.folder), str(tmp_path / "samples.npz"), "--import", __name__, "--out", str(tmp_path / "out.csv")]
    predict(words)
    with open(tmp_path / "out.csv", newline="") as file:
        header, *rows = csv.reader(file)
    with torch.no_grad():
        right = run.model(inputs)
    right = right.sigmoid() if kind == "multilabel" else right
    assert header[1] == ("probability of 0" if kind == "multilabel" else "predicted 0")
    assert np.allclose(np.array(rows, float)[:, 1:], right.numpy(), atol=1e-6)


def test_ranks_with_other_test_data_are_one_line(tmp_path):
    ended = start(2, "-m", "own_metric_crosses", tmp_path, "test")
    assert "LINE the test data are others on different ranks" in ended.stdout, ended.stdout + ended.stderr
