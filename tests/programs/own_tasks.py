"""Tasks of vectors of values, of several labels, and of a class per pixel, with tests of the clients' own."""

import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

import fedmpi

SK, SIZES = "sklearn.metrics.", (9, 30, 1)


def data(size, seed, pixels=()):
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 4, *pixels, generator=draw)
    return inputs, inputs[:, :3] + torch.randn(size, 3, *pixels, generator=draw)


def linear():
    return torch.nn.Linear(4, 3)


def pixelwise():
    return torch.nn.Conv2d(4, 3, 1)


class Values(fedmpi.Task):
    model, pixels = "own_tasks.linear", ()
    metrics = {"r2": SK + "r2_score", "mae": SK + "mean_absolute_error"}

    def train(self, client, num_clients):
        return self.made(20 + 10 * client, client)

    def test_of(self, client, num_clients):
        return self.made(SIZES[client], 9 + client) if SIZES[client] > 1 else None

    def made(self, size, seed):
        inputs, values = data(size, seed, self.pixels)
        return TensorDataset(inputs, self.targets(values))

    def targets(self, values):
        return values

    def loss(self, model, batch):
        return functional.mse_loss(model(batch[0]), batch[1])


class Labels(Values):
    outputs = "scores"
    metrics = {"f1": (SK + "f1_score", {"average": "macro"}), "auc": SK + "roc_auc_score"}
    metrics["of_each"] = (SK + "recall_score", {"average": None})

    def targets(self, values):
        return (values > 0.5).long()

    def loss(self, model, batch):
        return functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1].float())


class Pixels(Values):
    model, pixels = "own_tasks.pixelwise", (5, 5)
    metrics = {"accuracy": SK + "accuracy_score", "confusion": SK + "confusion_matrix"}

    def targets(self, values):
        return values.argmax(1)

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1])
