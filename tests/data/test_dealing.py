"""Samples that are dealt anew in every round: who gets which, the update written out, ranks, resumption, refusals."""

import json
import signal

import h5py
import numpy as np
import pytest
import torch
from helpers import train
from safetensors.torch import load_file

from fedmpi.comm.solo import SoloLink
from fedmpi.data.partitions import IID, Classes
from fedmpi.data.source import DigitsSource
from fedmpi.ground.errors import Stopped, UserError
from fedmpi.ground.streams import generator
from fedmpi.runs.folder import read_run
from fedmpi.runs.recorder import Recorder
from fedmpi.training.config import read_command_line
from fedmpi.training.loop import train as train_here

LABELS = np.repeat(np.arange(10), 60)
ACTIVE = list(range(0, 50, 2))  # 25 of 50 clients
WORDS = (
    "--clients 6 --participation 0.5 --partition iid --partition.redeal true --local-epochs 2 --batch-size 100 "
    "--model mlp --model.hidden 4 --algorithm fedavg --algorithm.step_size 0.3 --dtype float64 --eval-every 1"
)


def dealt(partition, rounds=20, clients=ACTIVE, seed=3):
    return [partition.deal(LABELS, clients, seed, number) for number in range(rounds)]


@pytest.mark.parametrize("partition", [IID(), Classes(), Classes(per_client=4)], ids=str)
def test_every_round_deals_every_sample_to_one_of_its_clients(partition):
    rounds = dealt(partition)
    for parts in rounds:
        assert [*parts] == ACTIVE
        assert np.array_equal(np.sort(np.concatenate([*parts.values()])), np.arange(600))
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(rounds, dealt(partition)))  # by seed and round alone
    assert len({part[0].tobytes() for part in rounds}) == 20
    assert not np.array_equal(rounds[0][0], dealt(partition, 1, seed=4)[0][0])


def test_25_clients_with_one_class_each_five_random_classes_have_three():
    with_three, of_client_0 = [], []
    for parts in dealt(Classes()):
        classes = [set(LABELS[part].tolist()) for part in parts.values()]
        assert all(len(one) == 1 for one in classes)
        numbers = np.bincount([min(one) for one in classes], minlength=10)
        assert sorted(numbers.tolist()) == [2] * 5 + [3] * 5
        assert all(len(part) == 60 / numbers[LABELS[part[0]]] for part in parts.values())
        with_three.append(tuple(np.flatnonzero(numbers == 3)))
        of_client_0.append(min(classes[0]))
    assert len(set(with_three)) > 15 and len(set(of_client_0)) > 5


def test_a_round_with_fewer_clients_than_classes_has_random_classes():
    """Each round the samples of six classes; all clients together still need to hold all classes at the start."""
    classes = [{int(LABELS[part[0]]) for part in parts.values()} for parts in dealt(Classes(), clients=range(6))]
    assert {len(one) for one in classes} == {6} and len(set(map(frozenset, classes))) > 15
    assert all(len(part) == 60 for part in dealt(Classes(), clients=range(6))[0].values())
    assert set.union(*classes) == set(range(10))
    words = "--clients 6 --partition classes --partition.redeal true"
    with pytest.raises(UserError, match="clients = 6 with 1 classes each: expected at least 10"):
        train_here(read_command_line(words.split()), SoloLink())


def run(out, name, words=WORDS, more=()):
    words = f"{words} --threads 1 --name {name}".split()
    return train_here(read_command_line([*words, "--out", str(out), *more]), SoloLink()).folder


def fedavg_written_out(rounds, epochs=2, b=100, eta=0.3, num_clients=6):
    """FedAvg with two layers on the digits, all samples over the round's clients; draws by their streams alone."""
    source = DigitsSource()
    labels, n = source.labels["train"], len(source.labels["train"])
    x = (source.read("train", np.arange(n)).reshape(n, -1) / 255 - source.mean[0]) / source.std[0]
    x, labels, gradients = torch.tensor(x), torch.tensor(labels), 0
    net = torch.nn.Sequential(torch.nn.Linear(64, 4), torch.nn.ReLU(), torch.nn.Linear(4, 10)).double()
    vectors = list(net.parameters())

    def load(values):
        for vector, value in zip(vectors, values):
            vector.data.copy_(value)

    def run_from(values):
        nonlocal gradients
        server = [value.clone() for value in values]
        for r in range(rounds):
            active = np.sort(generator(0, "participants", r).choice(num_clients, num_clients // 2, replace=False))
            rng = generator(0, "deal", r)
            parts = [np.sort(part) for part in np.array_split(rng.permutation(n), len(active))]
            ends, whose = [], rng.permutation(len(active))
            for turn, client in enumerate(active):
                load(server)
                for passed in range(epochs):
                    order = generator(0, "order", client, r, passed).permutation(parts[whose[turn]])
                    for first in range(0, len(order), b):
                        batch = torch.tensor(order[first : first + b])
                        net.zero_grad()
                        torch.nn.functional.cross_entropy(net(x[batch]), labels[batch]).backward()
                        for vector in vectors:
                            vector.data -= eta * vector.grad
                        gradients += 1
                ends.append([vector.data.clone() for vector in vectors])
            server = [torch.stack(values).mean(0) for values in zip(*ends)]
        return server, gradients

    return run_from


def values_of(folder):
    """The model's tensors, weight before bias, layer by layer."""
    values = load_file(folder / "model.safetensors")
    return [values[name] for name in sorted(values, key=lambda name: (name.partition(".")[0], name.endswith("bias")))]


def test_the_update_written_out(tmp_path):
    """Two local epochs over what each client received, of all samples over three of six clients."""
    begun = run(tmp_path, "begun", f"{WORDS} --rounds 1 --algorithm.step_size 1e-300")
    ended = run(tmp_path, "ended", f"{WORDS} --rounds 4")
    expected, gradients = fedavg_written_out(4)(values_of(begun))
    assert read_run(ended).final("gradients") == gradients == 4 * 3 * 2 * 5  # 1438 samples: 5 batches of up to 100
    for found, value in zip(values_of(ended), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-12)


@pytest.mark.rarely
@pytest.mark.parametrize("partition", ["iid", "classes --partition.per_client 4"])
def test_the_number_of_ranks_does_not_matter(tmp_path, partition):
    words = WORDS.replace("iid", partition) + " --rounds 3 --aggregation reproducible --holdout 0.2"
    one, three = (train(ranks, tmp_path, *words.split(), "--name", f"on_{ranks}") for ranks in (1, 3))
    assert one.returncode == three.returncode == 0, one.stderr + three.stderr
    first, second = (values_of(tmp_path / f"on_{ranks}") for ranks in (1, 3))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    first, second = (read_run(tmp_path / f"on_{ranks}").final("holdout_loss") for ranks in (1, 3))
    assert first == pytest.approx(second, abs=1e-12)


def test_a_resumed_run_deals_the_same(tmp_path, monkeypatch):
    words = WORDS.replace("fedavg", "local_amsgrad").replace("0.3", "0.01") + " --rounds 5"
    whole, usual = run(tmp_path, "whole", words), Recorder.round

    def stop(recorder, record, metrics):
        usual(recorder, record, metrics)
        if record["round"] == 2:
            signal.raise_signal(signal.SIGUSR1)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "round", stop)
        with pytest.raises(Stopped):
            run(tmp_path, "parts", words)
    resumed = train_here(read_command_line(["--resume", str(tmp_path / "parts")]), SoloLink()).folder
    assert all(torch.equal(a, b) for a, b in zip(values_of(whole), values_of(resumed)))
    last = [json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]) for folder in (whole, resumed)]
    assert last[0]["gradients"] == last[1]["gradients"] and last[0]["loss"] == last[1]["loss"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--task auc", "task auc cannot distribute its data again in every round"),
        ("--weighting samples", "--weighting samples needs clients that keep their samples"),
        ("--on-loss continue", "leave --on-loss continue out"),
    ],
)
def test_what_cannot_be_dealt_anew_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        read_command_line(["--partition.redeal", "true", *words.split()])


def test_silo_files_stay_with_their_clients(tmp_path):
    source = DigitsSource()
    for client in range(2):
        with h5py.File(tmp_path / f"silo_{client}.h5", "w") as file:
            for split in ("train", "test"):
                file[f"{split}/images"] = source.read(split, np.arange(20))
                file[f"{split}/labels"] = source.labels[split][:20]
    words = ["--clients", "2", "--partition.redeal", "true", "--data", str(tmp_path / "silo_{client}.h5")]
    with pytest.raises(UserError, match=r"silo files .* stay with their clients: leave --partition"):
        train_here(read_command_line([*words, "--out", str(tmp_path)]), SoloLink())
