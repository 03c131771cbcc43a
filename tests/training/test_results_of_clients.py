"""Silo files of a split by column are tested on their own group, with its name; each client's results are kept."""

import csv
import json
import sys

import h5py
import numpy as np
import pytest
from helpers import ROOT, execute, train

from fedmpi.data.partitions import Column, Dirichlet, Even
from fedmpi.data.source import HDF5Source
from fedmpi.ground.errors import UserError
from fedmpi.runs.folder import read_run

HOSPITALS = {"Aachen": 0.5, "Bonn": 0.3, "Celle": 0.2}


def data_program(folder, *words):
    ended = execute([sys.executable, "-m", "fedmpi", "data", *words], env={"PYTHONPATH": str(ROOT)}, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    """A folder with patients.h5, and silo_0.h5 ... of its hospitals."""
    folder, draw = tmp_path_factory.mktemp("hospitals"), np.random.default_rng(0)
    with open(folder / "patients.csv", "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["age", "pressure", "hospital", "ill"])
        for values in draw.standard_normal((400, 2)):
            lines.writerow(
                [*values.round(3), draw.choice(list(HOSPITALS), p=list(HOSPITALS.values())), values.sum() > 0]
            )
    data_program(folder, "prepare", "patients", "--from", "patients.csv", "--data-dir", ".", "--keep", "hospital")
    split = ("--partition", "column", "--partition.by", "hospital", "--clients", "3")
    assert "Bonn" in data_program(folder, "partition", "patients.h5", *split, "--write", "silo_{client}.h5")
    return folder


@pytest.mark.rarely
def test_a_silo_has_the_test_rows_of_its_own_group_and_its_name(hospitals):
    num_tests = 0
    for client, name in enumerate(HOSPITALS):
        with h5py.File(hospitals / f"silo_{client}.h5") as file:
            assert file.attrs["silo"] == name
            groups = {*file["train/hospital"][:], *file["test/hospital"][:]}
            assert groups == {name.encode()}
            num_tests += len(file["test/labels"])
    with h5py.File(hospitals / "patients.h5") as file:
        assert num_tests == len(file["test/labels"])


def test_results_of_each_silo_are_recorded_and_shown_with_its_name(hospitals, tmp_path):
    words = ("--data", hospitals / "silo_{client}.h5", "--rounds", 4, "--clients", 3, "--name", "silos")
    ended = train(2, tmp_path, *words)
    assert ended.returncode == 0, ended.stderr
    run = read_run(tmp_path / "silos")
    assert run.client_names == list(HOSPITALS)
    sizes = [len(h5py.File(hospitals / f"silo_{client}.h5")["test/labels"]) for client in range(3)]
    assert np.mean(run.clients["accuracy"]) == pytest.approx(run.final("accuracy"))
    assert np.average(run.clients["accuracy"], weights=sizes) == pytest.approx(run.final("accuracy_samples"))
    assert np.mean(run.clients["test_loss"]) == pytest.approx(run.final("test_loss"))
    assert np.mean(run.clients["train_loss"]) == pytest.approx(run.final("train_loss"))
    names, counts = run.cases
    of_file = [np.bincount(h5py.File(hospitals / f"silo_{client}.h5")["test/labels"][:]) for client in range(3)]
    assert names == ["False", "True"] and counts == [of_silo.tolist() for of_silo in of_file]
    lines = (tmp_path / "silos" / "metrics.jsonl").read_text().splitlines()
    assert sum("cases" in json.loads(line) for line in lines) == 1  # and not in every evaluation
    worst = int(np.argmin(run.clients["accuracy"]))
    assert f"{min(run.clients['accuracy']):.4f} at worst (client {worst}, {run.client_names[worst]})" in ended.stdout


def test_a_silo_file_that_no_client_uses_is_named(hospitals, tmp_path):
    ended = train(1, tmp_path, "--data", hospitals / "silo_{client}.h5", "--clients", 2, "--rounds", 1)
    assert ended.returncode == 0, ended.stderr
    assert "silo_2.h5 is not used: the run has 2 clients (--clients or mpirun -np)" in ended.stderr


def test_the_groups_of_a_shared_file_are_named(hospitals, tmp_path):
    split = ("--partition", "column", "--partition.by", "hospital", "--clients", 2, "--holdout", 0.2)
    ended = train(1, tmp_path, "--data", hospitals / "patients.h5", *split, "--rounds", 1, "--name", "shared")
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "shared" / "clients.json").read_text())["names"] == ["Aachen", "Bonn, Celle"]
    assert len(read_run(tmp_path / "shared").clients["holdout_accuracy"]) == 2
    assert "holdout accuracy of clients" in ended.stdout


def test_auc_is_measured_on_each_silo(hospitals, tmp_path):
    words = ("--task", "auc", "--task.removed_share", 0, "--data", hospitals / "silo_{client}.h5", "--rounds", 1)
    ended = train(1, tmp_path, *words, "--clients", 3, "--name", "auc")
    assert ended.returncode == 0, ended.stderr
    assert "is not used" not in ended.stderr
    assert len(read_run(tmp_path / "auc").clients["auc"]) == 3
    points = np.loadtxt(tmp_path / "auc" / "roc.csv", delimiter=",", skiprows=1)
    assert (np.diff(points, axis=0) >= 0).all()
    assert np.trapezoid(points[:, 1], points[:, 0]) == pytest.approx(read_run(tmp_path / "auc").final("auc"), abs=1e-3)


@pytest.mark.parametrize("partition", [Even(), Dirichlet(concentration=0.2), Column(by="hospital")], ids=str)
def test_test_rows_follow_the_split(hospitals, partition):
    """Every client's test set has its share of the test rows of each value, and every row has at most one client."""
    source, clients = HDF5Source(hospitals / "patients.h5"), 3
    parts = partition.split_source(source, clients, seed=0)
    tests = partition.split_test_set(source, parts)
    assert np.array_equal(np.sort(np.concatenate(tests)), np.arange(len(source.labels["test"])))
    values, test_values = source.column(partition.column), source.column(partition.column, "test")
    for value in np.unique(values):
        share = np.array([(values[part] == value).sum() for part in parts]) / (values == value).sum()
        got = np.array([(test_values[rows] == value).sum() for rows in tests])
        assert abs(got - share * (test_values == value).sum()).max() <= 2


def test_a_client_without_test_rows_is_named(hospitals):
    source = HDF5Source(hospitals / "patients.h5")
    only = Column(by="hospital")
    parts = only.split_source(source, 3, seed=0)
    with pytest.raises(UserError, match="client 2 gets no test row"):
        only.split_test_set(_WithoutCelle(source), parts)


class _WithoutCelle:
    """The same data, of which no test row comes from Celle."""

    def __init__(self, source):
        self._source = source

    def column(self, name, split="train"):
        values = self._source.column(name, split)
        return values if split == "train" else values[values != b"Celle"]
