"""Trains on files of silos, some without test data, a class, or more than one sample; compares with scikit-learn.

Prints a line for each number that differs by more than 1e-6 from that of the saved model, and at the end "compared N".
"""

import math
import pathlib
import sys
import warnings

import h5py
import numpy as np
import torch
from mpi4py import MPI
from sklearn import metrics as sk
from sklearn.utils.class_weight import compute_class_weight

import fedmpi

warnings.simplefilter("ignore")
OUT, COMM, CLIENTS = pathlib.Path(sys.argv[1]), MPI.COMM_WORLD, 4
SIZES = {"train": (37, 5, 1, 21), "test": (23, 0, 1, 9)}
NAMES = "f1,sensitivity,balanced_accuracy,kappa,auroc,confusion"


def silo(kind, split, client, untested):
    """(inputs, labels) of a silo; the last one has no sample of class 2, the second one no test data."""
    stream = np.random.default_rng([client, split == "test"])
    number = 0 if split == "test" and untested else SIZES[split][client]
    labels = stream.integers(0, 2 if client == 3 else 3, number)
    shape = {"table": (6,), "grey": (5, 5), "colour": (4, 4, 3), "floats": (4, 4)}[kind]
    inputs = stream.standard_normal((number, *shape)) + labels.reshape(-1, *[1] * len(shape)) * 0.7
    if kind in ("table", "floats"):
        return inputs.astype("float32"), labels
    return (inputs * 30 + 90).clip(0, 255).astype("uint8"), labels


def write(kind, untested):
    """The pattern of new files of silos, and split -> [(inputs, labels)] of what they have."""
    folder = OUT / f"{kind}-{untested}"
    data = {split: [silo(kind, split, k, untested) for k in range(CLIENTS)] for split in SIZES}
    if COMM.rank == 0:
        folder.mkdir()
        for k in range(CLIENTS):
            with h5py.File(folder / f"silo_{k}.h5", "w") as file:
                file.attrs["num_classes"] = 3
                for split in SIZES:
                    inputs, labels = data[split][k]
                    if len(labels) or kind == "grey":  # a file may also have an empty test set
                        file[f"{split}/images"], file[f"{split}/labels"] = inputs, labels
    COMM.barrier()
    return str(folder / "silo_{client}.h5"), data


def outputs(model, inputs):
    inputs = torch.tensor(inputs.astype("float32") / (255 if inputs.dtype == np.uint8 else 1))
    inputs = inputs[:, None] if inputs.dim() == 3 else inputs.movedim(3, 1) if inputs.dim() == 4 else inputs
    with torch.no_grad():
        return model.eval()(inputs).double()


def right(models, data, weights):
    """(metric -> its value on all test samples, metric -> its value for each silo) by scikit-learn."""
    losses, accuracies, answers = [], [], []
    for model, (inputs, labels) in zip(models, data):
        found = outputs(model, inputs) if len(labels) else torch.empty(0, 3).double()
        each = torch.nn.functional.cross_entropy(found, torch.tensor(labels), torch.tensor(weights), reduction="none")
        losses.append(each.mean().item())
        accuracies.append(sk.accuracy_score(labels, found.argmax(1)) if len(labels) else math.nan)
        answers.append((found, labels))
    known, all_labels = [not math.isnan(loss) for loss in losses], np.concatenate([labels for _, labels in answers])
    pooled = {"test_loss": np.mean(np.array(losses)[known]), "accuracy": np.mean(np.array(accuracies)[known])}
    all_outputs = torch.cat([found for found, _ in answers])
    chosen, shares = all_outputs.argmax(1), all_outputs.softmax(1)
    pooled["f1"] = sk.f1_score(all_labels, chosen, average="macro")
    pooled["sensitivity"] = sk.recall_score(all_labels, chosen, average="macro")
    pooled["balanced_accuracy"] = sk.balanced_accuracy_score(all_labels, chosen)
    pooled["kappa"] = sk.cohen_kappa_score(all_labels, chosen)
    pooled["auroc"] = sk.roc_auc_score(all_labels, shares, multi_class="ovr", labels=[0, 1, 2])
    f1 = [
        sk.f1_score(y, found.argmax(1), average="macro", labels=np.unique(y)) if len(y) else math.nan
        for found, y in answers
    ]  # a class without test cases does not count
    table = sk.confusion_matrix(all_labels, chosen, labels=[0, 1, 2])
    return pooled, {"test_loss": losses, "accuracy": accuracies, "f1": f1}, table


def compare(kind, weighted, private):
    data, samples = FILES[kind]
    labels = np.concatenate([labels for _, labels in samples["train"]])
    weights = compute_class_weight("balanced", classes=np.arange(3), y=labels) if weighted else np.ones(3)
    task = {"name": "classification", "metrics": NAMES, "class_weights": "balanced" if weighted else "equal"}
    words = {"algorithm": "fedavg", "rounds": 2, "batch_size": 4, "threads": 1, "private": private, "model": "mlp"}
    run = fedmpi.train(data=data, task=task, clients=CLIENTS, out=OUT / "runs", **words)
    if COMM.rank:
        return
    record, models = fedmpi.load_run(run.folder), [run.models[k] if private else run.model for k in range(CLIENTS)]
    pooled, clients, table = right(models, samples["test"], weights)
    pairs = [(name, run.final[name], value) for name, value in pooled.items()]
    pairs += [(f"{name} of clients", record.clients[name], values) for name, values in clients.items()]
    pairs += [("confusion", record.tables["confusion"][1], table)]
    for name, found, value in pairs:
        if not np.allclose(found, value, rtol=1e-6, atol=1e-6, equal_nan=True):
            print(f"WRONG {kind}, {weighted}, {private}: {name} is {found}, right {value}", flush=True)


FILES = {kind: write(kind, False) for kind in ("table", "grey", "colour", "floats")}
for kind in FILES:
    for weighted in (False, True):
        for private in (None, "*"):
            compare(kind, weighted, private)
untested, samples = write("table", True)  # no silo has test data
run = fedmpi.train(
    data=untested, clients=CLIENTS, out=OUT / "runs", algorithm="fedavg", rounds=1, model="mlp", holdout=0.2
)
if not COMM.rank:
    names = {*run.final}
    if "test_loss" in names or "accuracy" in names or not math.isfinite(run.final["holdout_accuracy"]):
        print(f"WRONG without test data: {run.final}")
    print("compared 17", flush=True)
