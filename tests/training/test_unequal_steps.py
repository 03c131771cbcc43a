"""The line about unequal numbers of local steps, which change the objective of most methods."""

import pytest
import torch
from torch.utils.data import TensorDataset

import fedmpi
from fedmpi.algorithms import Algorithm
from fedmpi.ground.registry import known
from fedmpi.training.build import KEEP_OBJECTIVE


class Net(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))

    def forward(self, inputs):
        return self.w + 0 * inputs


class Unlike(fedmpi.Task):
    """Client k has the loss ½ (w - k)², and client 0 has ten times as many samples."""

    model = Net

    def train(self, client, num_clients):
        size = (80, 8)[client]
        return TensorDataset(torch.full((size, 1), float(client)), torch.zeros(size))

    def loss(self, model, batch):
        return 0.5 * (model(batch[0]) - batch[0]).square().mean()


@pytest.mark.parametrize(
    ("name", "settings", "is_said"),
    [
        ("fedavg", {"local_epochs": 1}, True),
        ("fedavg", {"local_steps": 3}, False),
        ("fednova", {"local_epochs": 1}, False),
        ("scaffold", {"local_epochs": 1}, False),
    ],
)
def test_it_is_said_where_it_is_true(tmp_path, capfd, name, settings, is_said):
    given = {"task": Unlike(), "clients": 2, "batch_size": 4, "rounds": 1, "threads": 1, "out": tmp_path}
    fedmpi.train(algorithm=name, **given, **settings)
    said = " ".join(capfd.readouterr().err.split())
    assert ("where the rounds end is not the minimum of the mean loss" in said) == is_said


@pytest.mark.parametrize("name", ["fedavg", *KEEP_OBJECTIVE])
def test_these_end_at_the_minimum_of_the_weighted_loss(name):
    """Clients with f_0 = ½ x² and f_1 = ½ (x - 1)², 1 and 10 steps a round, and weights 10 and 1."""
    algorithm = known(fedmpi.algorithms, Algorithm)[name](step_size=0.01)
    rounds = 2000 if name == "feddyn" else 600
    trace = fedmpi.simulate(algorithm, lambda i, x, s: x - i, [0.2], 2, rounds, [1, 10].__getitem__, weights=[10, 1])
    distance = abs(trace[-1]["rows"]["x"][0, 0] - 1 / 11)
    assert distance > 0.3 if name == "fedavg" else distance < 0.005  # fednova's is exact for small steps only
