"""A task whose samples are drawn anew at every use, in batches by name, without a test set."""

import torch
from torch import nn

import fedmpi


class Noisy(torch.utils.data.Dataset):
    def __init__(self, client):
        self.client = client

    def __len__(self):
        return 30 + self.client

    def __getitem__(self, index):
        inputs = torch.randn(4) + index / 30
        return {"inputs": inputs, "target": inputs.sum(0, keepdim=True)}


def network(shape, width=3, **settings):
    assert settings == {"num_classes": 7}
    return nn.Sequential(nn.Linear(shape[0], width), nn.Linear(width, 1))


class Regression(fedmpi.Task):
    metrics = {"error": ("torchmetrics.functional.mean_squared_error", {"squared": False})}
    goal = ("error", -1)
    model = "noisy_task.network"
    num_classes = 7

    def train(self, client, num_clients):
        return Noisy(client)

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch["inputs"]), batch["target"])

    def predict(self, model, batch):
        return model(batch["inputs"]), batch["target"]


class Empty(Regression):
    def train(self, client, num_clients):
        return []


class Unfinished(fedmpi.Task):
    model, num_classes = "noisy_task.network", 7

    def train(self, client, num_clients):
        return Noisy(client)


class BadMetric(Regression):
    metrics = {"error": "sklearn.metrics.no_such_score"}
