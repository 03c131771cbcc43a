"""Partitions: exact sizes, disjointness, coverage, determinism, and what each promises."""

import os
import sys
import types

import numpy as np
import pytest
import torch
from helpers import ROOT, execute
from hypothesis import given, settings
from hypothesis import strategies as st

import fedmpi.data.partitions
from fedmpi.comm.solo import SoloLink
from fedmpi.data.partitions import (
    IID,
    Classes,
    Column,
    Dirichlet,
    Even,
    Halves,
    Partition,
    Shared,
    Similarity,
    Stride,
    Uneven,
)
from fedmpi.data.source import open_source
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import known
from fedmpi.tasks.auc import DeepAUC
from fedmpi.tasks.base import RankContext
from fedmpi.tasks.classification import Classification

TEN_CLASSES = np.repeat(np.arange(10), 60)  # sorted by class, like no official file but like many own ones
EVERY = known(fedmpi.data.partitions, Partition)
SAME_SIZE = (Even(), IID(), Stride(), Similarity(), Similarity(percent=0), Dirichlet(), Column(by="labels", cut=True))
DISJOINT = (*SAME_SIZE, Uneven(), Dirichlet(concentration=0.01), Dirichlet(concentration=1e6))


def test_all_are_found_by_name_and_exported():
    assert len(EVERY) == 10
    for cls in EVERY.values():
        assert getattr(fedmpi.data.partitions, cls.__name__) is cls


def shuffled(seed=0):
    return np.random.default_rng(seed).permutation(TEN_CLASSES)


def classes_of(parts, labels):
    return [set(labels[part].tolist()) for part in parts]


labels_of_any_kind = st.lists(st.integers(0, 6), min_size=1, max_size=200).map(np.array)


@given(labels=labels_of_any_kind, num_clients=st.integers(1, 12), seed=st.integers(0, 2**40))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("partition", DISJOINT, ids=str)
def test_every_sample_has_exactly_one_owner(partition, labels, num_clients, seed):
    try:
        parts = partition(labels, num_clients, seed)
    except UserError:
        return  # more clients than samples, or a client without any: said in one line
    assert len(parts) == num_clients
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() and len(part) for part in parts)


@given(labels=labels_of_any_kind, num_clients=st.integers(1, 12), seed=st.integers(0, 2**40))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("partition", SAME_SIZE, ids=str)
def test_sizes_differ_by_at_most_one(partition, labels, num_clients, seed):
    if num_clients > len(labels):
        with pytest.raises(UserError, match="at most one per training sample"):
            partition(labels, num_clients, seed)
        return
    sizes = [len(part) for part in partition(labels, num_clients, seed)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("cls", EVERY.values(), ids=EVERY)
def test_the_seed_alone_decides(cls):
    partition = cls(by="labels", cut=True) if cls is Column else cls()
    first, again, other = (partition(shuffled(), 20, seed) for seed in (7, 7, 8))
    assert all(np.array_equal(a, b) for a, b in zip(first, again))
    draws = cls in (IID, Similarity, Classes, Dirichlet, Uneven)
    assert draws != all(np.array_equal(a, b) for a, b in zip(first, other))


def test_even_is_blocks_of_the_file():
    parts = Even()(np.zeros(11, dtype=int), 3, 0)
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_shared_gives_every_client_all_samples():
    assert all(np.array_equal(part, np.arange(600)) for part in Shared()(TEN_CLASSES, 4, 0))


def test_similarity_100_is_random_and_0_is_sorted():
    labels = shuffled()
    assert classes_of(Similarity(percent=0)(labels, 10, 3), labels) == [{c} for c in range(10)]
    assert all(len(held) == 10 for held in classes_of(Similarity(percent=100)(labels, 10, 3), labels))


def test_similarity_95_leaves_one_twentieth_sorted():
    labels = np.repeat(np.arange(10), 2000)
    parts = Similarity()(labels, 10, 0)
    own_class = [(labels[part] == client).mean() for client, part in enumerate(parts)]
    # 5 % of a client's own class and a tenth of the rest: 0.05 + 0.95 / 10
    assert np.allclose(own_class, 0.145, atol=0.03)


def test_stride_deals_the_sorted_file():
    labels = np.array([1, 0, 1, 0, 1, 0])
    assert [part.tolist() for part in Stride()(labels, 2, 0)] == [[1, 2, 5], [0, 3, 4]]


@pytest.mark.parametrize("deal", ["stride", "shuffle"])
@pytest.mark.parametrize(
    ("name", "first"), [("mnist", {0, 1, 2, 5, 9}), ("fashion_mnist", {0, 1, 2, 3, 4}), ("cifar10", {9, 1, 2, 3, 4})]
)
def test_halves_of_the_papers(name, first, deal):
    labels = shuffled()
    parts = Halves(first_classes=name, deal=deal)(labels, 4, 0)
    data_set = types.SimpleNamespace(name=name, groups=lambda: None, column=lambda column: labels)
    for mine, by_name in zip(parts, Halves(deal=deal).split_source(data_set, 4, 0)):
        np.testing.assert_array_equal(mine, by_name)  # the data set's name alone says as much
    assert classes_of(parts, labels) == [first, first, set(range(10)) - first, set(range(10)) - first]
    assert [len(part) for part in parts] == [150] * 4
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(600))


def test_halves_by_stride_hold_equal_shares_of_each_class():
    parts = Halves()(TEN_CLASSES, 4, 0)
    assert np.bincount(TEN_CLASSES[parts[1]]).tolist() == [30] * 5


def test_one_class_per_client_is_client_modulo_classes():
    labels = shuffled()
    parts = Classes()(labels, 20, 0)
    assert classes_of(parts, labels) == [{client % 10} for client in range(20)]
    assert [len(part) for part in parts] == [30] * 20


@given(num_clients=st.integers(1, 25), k=st.integers(1, 10), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_k_classes_per_client(num_clients, k, seed):
    labels = shuffled()
    if num_clients * k < 10:
        with pytest.raises(UserError, match="belong to no client"):
            Classes(per_client=k)(labels, num_clients, seed)
        return
    parts = Classes(per_client=k)(labels, num_clients, seed)
    assert [len(held) for held in classes_of(parts, labels)] == [k] * num_clients
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(600))
    for label in range(10):
        shares = [n for n in (np.count_nonzero(labels[part] == label) for part in parts) if n]
        assert max(shares) - min(shares) <= 1


def test_dirichlet_follows_the_concentration():
    labels = np.tile(np.arange(10), 1000)

    def mean_share_of_largest_class(concentration):
        parts = Dirichlet(concentration=concentration)(labels, 10, 1)
        return np.mean([np.bincount(labels[part]).max() / len(part) for part in parts])

    assert mean_share_of_largest_class(1e5) < 0.13
    assert 0.25 < mean_share_of_largest_class(0.5) < 0.6
    assert mean_share_of_largest_class(0.01) > 0.7


def test_dirichlet_counts_are_those_of_drawing_label_by_label():
    """The first client's counts against draws one at a time, as the paper writes it."""
    labels = np.repeat(np.arange(3), [4, 6, 8])
    fast = [np.bincount(labels[Dirichlet()(labels, 3, seed)[0]], minlength=3) for seed in range(1500)]
    rng, plain = np.random.default_rng(0), []
    for _ in range(1500):
        weights, left = rng.dirichlet([0.5] * 3), [4, 6, 8]
        for _ in range(6):
            label = rng.choice(3, p=weights / weights.sum())
            left[label] -= 1
            weights[label] *= left[label] > 0
            if weights.sum() == 0:
                weights = np.array(left, dtype=float)
        plain.append(np.subtract([4, 6, 8], left))
    assert np.allclose(np.mean(fast, axis=0), np.mean(plain, axis=0), atol=0.15)
    assert np.allclose(np.std(fast, axis=0), np.std(plain, axis=0), atol=0.15)


def test_uneven_sizes():
    sizes = np.array([len(part) for part in Uneven()(np.zeros(60_000), 50, 0)])
    assert sizes.sum() == 60_000 and sizes.min() >= 600 and sizes.std() > 300


def test_a_group_is_dealt_by_its_most_frequent_class():
    labels, groups = np.array([0, 1, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1]), np.arange(12) // 3
    data_set = types.SimpleNamespace(name="own", groups=lambda: groups, column=lambda column: labels)
    parts = Classes().split_source(data_set, 2, 0)
    assert [{*groups[part].tolist()} for part in parts] == [{0, 2}, {1, 3}]


def test_column_keeps_groups_whole_and_balances_them():
    writers = np.array([b"ann", b"bob", b"ann", b"eve", b"bob", b"ann", b"dan"])
    parts = Column(by="writer")(writers, 2, 0)
    assert not set(writers[parts[0]]) & set(writers[parts[1]])
    assert sorted(len(part) for part in parts) == [3, 4]
    sizes = [len(part) for part in Column(by="site")(np.repeat([0, 1, 2, 3], [1, 5, 1, 5]), 2, 0)]
    assert sizes == [6, 6]
    assert [len(part) for part in Column(by="site")(np.repeat([0, 1, 2], [1, 1, 4]), 2, 0)] == [4, 2]  # largest first
    with pytest.raises(UserError, match="groups in train/writer, 4"):
        Column(by="writer")(writers, 5, 0)


@pytest.mark.parametrize(
    ("partition", "num_clients", "message"),
    [
        (Classes(per_client=11), 4, "partition.per_client = 11: expected at most the 10 classes"),
        (Halves(), 3, "expected an even number"),
        (Halves(first_classes="0,x"), 4, "expected integers like 0,1,2 or one of"),
        (Halves(first_classes="0,77"), 4, "expected some but not all of the labels 0..9"),
        (Even(min_samples=200), 4, "client 0 of 4 only 150 samples: expected at least 200"),
        (Even(), 601, "clients = 601: expected at most one per training sample, 600"),
    ],
    ids=str,
)
def test_what_cannot_be_split_is_one_line(partition, num_clients, message):
    with pytest.raises(UserError, match=message) as error:
        partition(shuffled(), num_clients, 0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "make", [lambda: Dirichlet(concentration=0), lambda: Similarity(percent=101), lambda: Even(min_samples=0)]
)
def test_settings_out_of_range(make):
    with pytest.raises(UserError, match="expected a number"):
        make()


@pytest.mark.parametrize("concentration", [1e-300, 1e-9, 1e6])
def test_extreme_concentrations_make_no_nan(concentration):
    parts = Dirichlet(concentration=concentration)(TEN_CLASSES, 7, 0)
    assert sum(map(len, parts)) == 600


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("task", [Classification(), DeepAUC()], ids=["classification", "auc"])
def test_every_partition_splits_what_a_task_trains_on_or_is_refused(task, name):
    """By the data's own classes, also where the task's labels are two."""
    context = RankContext(10, range(10), 0, 1, 0, None, torch.device("cpu"), torch.float32)
    if name == "column":
        with pytest.raises(UserError, match="digits: has no column train/group"):
            task.load(context, Column())
    partition = Column(by="brightness", cut=True) if name == "column" else EVERY[name]()
    loaded = task.load(context, partition)
    loaded.synchronise(SoloLink())
    source = task.version(open_source("digits", None), 0)
    parts = partition(source.column(partition.column), 10, 0)
    assert [loaded.num_samples(client) for client in range(10)] == [len(part) for part in parts]


def test_without_matplotlib_plot_is_refused_before_any_work(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')")
    words = ["digits", "--clients", "2", "--write", "silo_{client}.h5", "--plot", "split.png"]
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    ended = execute([sys.executable, "-m", "fedmpi", "data", "partition", *words], env=variables, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "--plot needs matplotlib: pip install" in ended.stderr
    assert not list(tmp_path.glob("silo_*"))
