"""A regression that ends after three rounds and goes on, beside one of six rounds: each rank prints what is equal."""

import sys

import torch
from torch.utils.data import TensorDataset

import fedmpi

torch.manual_seed(3)
data = [TensorDataset(inputs, inputs.sum(1).sin()) for inputs in (torch.randn(40, 5), torch.randn(70, 5))]
given = {"task": "regression", "data": data, "test_data": data[1], "dtype": "float64", "out": sys.argv[1]}
given |= {"local_steps": 3, "batch_size": 20, "algorithm": {"name": "fafed", "step_size": 0.003}}
for codec in ("none", "half", "random_k"):
    given["codec"] = codec
    whole = fedmpi.train(rounds=6, **given)
    part = fedmpi.train(rounds=3, **given)
    again = fedmpi.train(rounds=6, resume=part.folder, **given)
    is_same = all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), again.model.parameters()))
    print(is_same, whole.final == again.final, len(again.metrics))
