"""Trains small tasks of many kinds on any number of ranks; each record is compared with values computed from the model.

Prints a line for each that differs by more than 1e-6, and at the end "compared N".
"""

import sys
import warnings

import numpy as np
import torch
from mpi4py import MPI
from sklearn import metrics as sk
from torch.nn import functional
from torch.utils.data import TensorDataset

import fedmpi

warnings.simplefilter("ignore")
OUT, RANK, CLIENTS = sys.argv[1], MPI.COMM_WORLD.rank, 4
SIZES = (37, 5, 1, 21)
WEIGHTS = torch.tensor([0.5, 1.0, 3.0])


def draw(number, seed, classes=3, one_class=None):
    stream = np.random.default_rng(seed)
    labels = stream.integers(0, classes, number) if one_class is None else np.full(number, one_class)
    inputs = stream.standard_normal((number, 4)) + np.eye(4)[labels]
    return TensorDataset(torch.tensor(inputs, dtype=torch.float32), torch.tensor(labels))


def make_task(kind, tests):
    """(a task, its model, function(model) -> {metric: value}, own tests) of a kind of outputs and of test data."""
    columns = {"two": 2, "one": 1, "flat": 1, "value": 1}.get(kind, 3)
    classes = 2 if kind in ("two", "one", "flat") else 3

    def data(number, seed, one_class=None):
        found = draw(number, seed, classes, one_class)
        if kind == "ignore":
            found.tensors[1][::4] = -100

        if kind == "image":
            found = TensorDataset(found.tensors[0].reshape(-1, 1, 2, 2), found.tensors[1])
        return found

    def outputs_of(model, inputs):
        return model(inputs).squeeze(1) if kind == "flat" else model(inputs)

    def loss(model, batch):
        outputs, labels = outputs_of(model, batch[0]), batch[1]
        if kind in ("one", "flat"):
            return functional.binary_cross_entropy_with_logits(outputs.reshape(-1), labels.float())
        if kind == "value":
            return functional.mse_loss(outputs.squeeze(1), labels.float())
        if kind == "weights":
            each = functional.cross_entropy(outputs, labels, WEIGHTS, reduction="sum")
            return each, WEIGHTS[labels].sum()
        if kind == "ignore":
            return functional.cross_entropy(outputs, labels, reduction="sum"), (labels >= 0).sum()
        return functional.cross_entropy(outputs, labels)

    names = {"accuracy": "sklearn.metrics.accuracy_score"}
    if classes == 2:
        names |= {"auc": "sklearn.metrics.roc_auc_score", "brier": "sklearn.metrics.brier_score_loss"}
    elif kind == "value":
        names = {"r2": "sklearn.metrics.r2_score", "mae": "sklearn.metrics.mean_absolute_error"}
    else:
        names |= {"f1": ("sklearn.metrics.f1_score", {"average": "macro"}), "logloss": "sklearn.metrics.log_loss"}
        names |= {"confusion": "sklearn.metrics.confusion_matrix"}
    if kind == "value":

        def predict(model, batch):
            return model(batch[0]), batch[1].float()
    else:

        def predict(model, batch):
            return outputs_of(model, batch[0]), batch[1]

    common = data(233, 99)
    own = [data(size, 50 + k, one_class=1 if tests == "a class" and k == 1 else None) for k, size in enumerate(SIZES)]
    own = [None if tests == "some" and k == 2 else one for k, one in enumerate(own)]
    members = {
        "train": lambda client, num: data(SIZES[client], client),
        "loss": loss,
        "predict": predict,
        "metrics": names,
        "outputs": "values" if kind == "value" else "scores",
    }
    members |= {"test": lambda: common} if tests == "common" else {}
    members |= {"test_of": lambda client, num: own[client]} if tests != "common" else {}
    layers = [torch.nn.Flatten(), torch.nn.Linear(4, columns)]
    if kind == "batchnorm":
        layers = [torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)]
        members["train"] = lambda client, num: data((37, 5, 9, 21)[client], client)
    parts = [common] if tests == "common" else [one for one in own if one is not None]
    torch.manual_seed(1)
    return fedmpi.Task.of(f"Task{kind}", **members), torch.nn.Sequential(*layers), right_of(kind, classes, parts), own


def right_of(kind, classes, parts):
    def right(model):
        with torch.no_grad():
            outputs = model.eval()(torch.cat([part.tensors[0] for part in parts])).double().numpy()
        labels = torch.cat([part.tensors[1] for part in parts]).numpy()
        if kind == "value":
            return {"r2": sk.r2_score(labels, outputs[:, 0]), "mae": sk.mean_absolute_error(labels, outputs[:, 0])}
        outputs, labels = outputs[labels >= 0], labels[labels >= 0]
        if outputs.shape[1] == 1:
            outputs = np.stack([np.zeros(len(outputs)), outputs[:, 0]], axis=1)
        shares = np.exp(outputs - outputs.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        found = {"accuracy": sk.accuracy_score(labels, outputs.argmax(1))}
        if classes == 2:
            margin = outputs[:, 1] - outputs[:, 0]
            return found | {"auc": sk.roc_auc_score(labels, margin), "brier": sk.brier_score_loss(labels, shares[:, 1])}
        found |= {"f1": sk.f1_score(labels, outputs.argmax(1), average="macro")}
        return found | {"logloss": sk.log_loss(labels, shares, labels=[0, 1, 2])}

    return right


def own_losses(kind, own, model):
    """The mean loss of each client's own tests."""
    losses = []
    for part in own:
        if part is None:
            losses.append(np.nan)
            continue
        with torch.no_grad():
            outputs, labels = model(part.tensors[0]), part.tensors[1]
            if kind in ("one", "flat"):
                loss = functional.binary_cross_entropy_with_logits(outputs[:, 0], labels.float())
            elif kind == "value":
                loss = functional.mse_loss(outputs[:, 0], labels.float())
            else:
                loss = functional.cross_entropy(outputs, labels, WEIGHTS if kind == "weights" else None)
        losses.append(float(loss))
    return losses


number = 0
for kind in ("three", "two", "one", "flat", "value", "weights", "mean", "ignore", "batchnorm", "image"):
    for tests in ("common", "own", "some", "a class"):
        for private in (None, "*") if tests == "own" else (None,):
            task, model, right, own = make_task(kind, tests)
            name, words = f"{kind}, {tests}, {private}", {"private": private, "batch_size": 4, "rounds": 2}
            run = fedmpi.train(task=task, model=model, clients=CLIENTS, out=OUT, algorithm="fedavg", threads=1, **words)
            number += 1
            if RANK:
                continue
            clients = fedmpi.load_run(run.folder).clients
            models = [run.models[k] if private else run.model for k in range(CLIENTS)]
            pairs = []
            if not private:
                pairs += [(metric, run.final.get(metric), value) for metric, value in right(run.model).items()]
            if tests != "common":
                for k, model in enumerate(models):
                    pairs.append((f"test_loss of {k}", clients["test_loss"][k], own_losses(kind, own, model)[k]))
            for metric, found, value in pairs:
                if not np.allclose(found, value, rtol=1e-6, atol=1e-6, equal_nan=True):
                    print(f"WRONG {name}: {metric} is {found}, right {value}", flush=True)
if not RANK:
    print(f"compared {number}", flush=True)
