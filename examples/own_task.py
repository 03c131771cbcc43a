"""A task of your own: Dataset, loss and metrics.

mpirun -np 4 python -m fedmpi.train --task own_task.Waves --rounds 50 --algorithm fedavg
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedmpi


def waves(first, number):
    """(signal [32], 1 if it is a saw and 0 if it is a sine), with noise."""
    noise = torch.Generator().manual_seed(first)
    labels, time = torch.arange(number) % 2, torch.linspace(0, 12, 32)
    phase = time + 6 * torch.rand(number, 1, generator=noise)
    signals = torch.where(labels[:, None] == 1, (phase % 2) - 1, torch.sin(3 * phase))
    return TensorDataset(signals + 0.1 * torch.randn(number, 32, generator=noise), labels)


def network(shape, hidden: int = 16):
    """A model is a class or a function that makes one; its arguments are settings: --model ... --model.hidden 32."""
    return nn.Sequential(nn.Linear(shape[0], hidden), nn.Tanh(), nn.Linear(hidden, 1), nn.Flatten(0))


class Waves(fedmpi.Task):
    """Is a noisy signal a saw or a sine? Every client has its own signals."""

    metrics = {"accuracy": "sklearn.metrics.accuracy_score", "f1": "sklearn.metrics.f1_score"}
    goal = ("accuracy", 1)
    outputs = "scores"  # logits
    model = "own_task.network"

    def train(self, client, num_clients):
        return waves(1 + client, 200)

    def test(self):
        return waves(0, 500)

    def loss(self, model, batch):
        signals, labels = batch
        return nn.functional.binary_cross_entropy_with_logits(model(signals), labels.float())

    def predict(self, model, batch):
        return (model(batch[0]) > 0).long(), batch[1]
