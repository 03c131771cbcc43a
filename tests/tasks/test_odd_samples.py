"""A sample that cannot be read is named with its client and number, wherever it is read."""

import pytest
import torch
from helpers import start, train
from torch.utils.data import TensorDataset

import fedmpi
from fedmpi.ground.errors import UserError
from fedmpi.tasks.custom import Task

SETTINGS = (
    "--task",
    "odd_samples.Odd",
    "--rounds",
    1,
    "--local-steps",
    3,
    "--batch-size",
    20,
    "--algorithm",
    "fedavg",
    "--eval-every",
    1,
)


def line_of(tmp_path, how, where, *settings):
    ended = train(2, tmp_path, *SETTINGS, *settings, env={"HOW": how, "WHERE": where})
    lines = [line for line in ended.stderr.splitlines() if line.startswith("fedmpi: ")]
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, lines


@pytest.mark.rarely
@pytest.mark.parametrize(
    ("how", "where", "workers", "message"),
    [
        ("raises", "train", 0, "training data of client 1, item 37: cannot be read: OSError: accession 37"),
        ("raises", "train", 1, "training data of client 1, item 37: cannot be read: OSError: accession 37"),
        ("raises", "test", 1, "test data of client 1, item 37: cannot be read: OSError: accession 37: no files"),
        ("none", "train", 0, "training data of client 1, item 37 is NoneType, item "),
        ("bytes", "test", 0, "test data of client 1, item 37 is (uint8 [8], int), item 0 is (float32 [8], int)"),
    ],
)
def test_a_sample_that_cannot_be_read_is_named(tmp_path, how, where, workers, message):
    code, lines = line_of(tmp_path, how, where, "--task.workers", workers)
    assert code == 2 and message in lines[-1], lines


def test_a_sample_that_is_not_finite_is_named(tmp_path):
    code, lines = line_of(tmp_path / "train", "nan", "train")
    assert code in (1, 2) and "training data of client 1, item 37: has a value that is not finite" in lines[-1], lines
    code, lines = line_of(tmp_path / "test", "nan", "test")
    assert code == 0 and [line for line in lines if "test data of client 1, item 37: has a value" in line], lines


def test_datasets_given_as_data(tmp_path):
    for how, words in (("raises", "cannot be read: OSError"), ("none", "is a NoneType"), ("shape", "of shape [5]")):
        ended = start(2, "-m", "odd_samples", tmp_path, env={"HOW": how})
        assert f"data of client 1, item 37{':' if how == 'raises' else ''} " in ended.stdout, (
            ended.stdout + ended.stderr
        )
        assert words in ended.stdout and ended.stdout.count("LINE") == 2


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ((torch.zeros(3), 1), r"item 1 is \(float32 \[3\], int\), item 0 is \(float32 \[2\], int\).*different shapes"),
        ((torch.zeros(2, dtype=torch.int64), 1), "numbers with a fraction and whole numbers: expected one kind"),
        ((torch.zeros(2), 0.5), "part 1 of the samples are numbers with a fraction and whole numbers"),
        ((torch.zeros(2),), r"item 1 is \(float32 \[2\]\)"),
        (None, "item 1 is NoneType"),
    ],
)
def test_what_makes_no_batch_is_named(odd, message):
    from fedmpi.tasks.custom import _fetch

    items = [(torch.zeros(2), 0), odd, (torch.zeros(2), 1)]
    with pytest.raises(UserError, match=f"data of Bonn, .*{message}"):
        _fetch(Task(), items, [0, 1, 2], "data of Bonn")
    assert len(_fetch(Task(), [items[0], (torch.zeros(2).double(), True), items[2]], [0, 1, 2], "")[1]) == 3


def test_predict_returns_a_pair(tmp_path):
    data = TensorDataset(torch.rand(9, 2), torch.zeros(9))
    task = fedmpi.Task.of(
        "Single",
        train=lambda client, num: data,
        loss=lambda model, batch: model(batch[0]).square().mean(),
        predict=lambda model, batch: model(batch[0]),
        metrics={"mean": lambda outputs, targets: outputs.mean()},
    )
    with pytest.raises(UserError, match=r"predict returned float32 \[9, 1\]: expected a pair \(outputs, targets\)"):
        fedmpi.train(task=task, model=torch.nn.Linear(2, 1), rounds=1, out=tmp_path, threads=1)
