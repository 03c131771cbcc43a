"""Tasks with a sample that cannot be read, or has other numbers than the others: odd_samples.Odd, with HOW and WHERE.

With an argument it trains on such Datasets given as data: odd_samples.py FOLDER.
"""

import os
import sys

import torch
from torch.utils.data import Dataset

import fedmpi

HOW, WHERE, BAD = os.environ.get("HOW", ""), os.environ.get("WHERE", "train"), 37


class Rows(Dataset):
    """60 samples of a client, of which number 37 may be bad."""

    def __init__(self, client, is_bad=False):
        self.inputs = torch.randn(60, 8, generator=torch.Generator().manual_seed(client))
        self.is_bad = is_bad

    def __len__(self):
        return 60

    def __getitem__(self, index):
        row = self.inputs[index]
        label = int(row.sum() > 0)
        if not self.is_bad or index != BAD:
            return row, label
        if HOW == "raises":
            raise OSError("accession 37: no files")
        odd = {"none": None, "shape": (row[:5], label), "bytes": (row.to(torch.uint8), label)}
        odd |= {"nan": (row * torch.nan, label), "label": (row, 0.5), "short": (row,)}
        return odd[HOW]


class Odd(fedmpi.Task):
    model = "odd_samples.net"

    def train(self, client, num_clients):
        return Rows(client, client == 1 and WHERE == "train")

    def test_of(self, client, num_clients):
        return Rows(10 + client, client == 1 and WHERE == "test")

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def net():
    return torch.nn.Linear(8, 2)


if __name__ == "__main__":
    data = [Rows(0), Rows(1, is_bad=True)]
    try:
        fedmpi.train(data=data, model=net, rounds=2, out=sys.argv[1], threads=1)
    except fedmpi.ground.errors.UserError as error:
        print("LINE", error, flush=True)
