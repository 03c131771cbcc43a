"""Float buffers in runs: constants stay, frozen statistics stay, and statistics that are not finite are named."""

import pytest
import torch
from torch import nn

from fedmpi.comm.solo import SoloLink
from fedmpi.ground.errors import Diverged
from fedmpi.training.build import prepare
from fedmpi.training.config import read_command_line

LOWEST = torch.finfo(torch.float32).min


class Net(nn.Sequential):
    """Masks of three kinds, and two batch norms, of which one has no parameters."""

    def __init__(self, shape, num_classes):
        super().__init__(
            nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.BatchNorm1d(12, affine=False),
            nn.Linear(12, num_classes),
        )  # fmt: skip
        self.register_buffer("lowest", torch.full((5,), LOWEST))
        self.register_buffer("causal", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("table", torch.arange(50.0) / 7, persistent=False)


class Overflowing(Net):
    def __init__(self, shape, num_classes):
        super().__init__(shape, num_classes)
        self.register_buffer("peak", torch.zeros(2))

    def forward(self, inputs):
        if self.training and int(self[2].num_batches_tracked) > 4:
            self.peak = torch.full((2,), torch.inf)
        return super().forward(inputs)


def federation_of(words, rounds=3):
    words = f"--clients 3 --threads 1 --local_steps 2 --batch_size 8 {words}"
    federation = prepare(read_command_line(words.split()), SoloLink()).federation
    federation.start()
    start = federation.store.buffers.clone()
    for _ in range(rounds):
        federation.run_round()
    return federation, {part.name: part for part in federation.store.tail.sent.parts}, start


def name_of(cls):
    return f"{__name__}.{cls.__name__}"


@pytest.mark.parametrize("algorithm", ["fedavg", "fafed"])
def test_constants_are_neither_changed_nor_sent(algorithm):
    federation, parts, start = federation_of(f"--model {name_of(Net)} --algorithm {algorithm} --weighting samples")
    for name, part in parts.items():
        now, before = part.of(federation.store.buffers), part.of(start)
        assert torch.equal(now, before) == (name in ("lowest", "causal", "table")), name
    if algorithm == "fedavg":
        dim = 64 * 12 + 12 + 2 * 12 + 12 * 10 + 10
        assert federation.link.traffic.nbytes == 3 * 4 * (dim + 4 * 12)


@pytest.mark.parametrize(("frozen", "stay"), [("2", {"2"}), ("4,2", {"2", "4"}), ("1", set())])
def test_the_statistics_of_frozen_layers_stay(frozen, stay):
    federation, parts, start = federation_of(f"--model {name_of(Net)} --algorithm fedavg --freeze {frozen}")
    for name, part in parts.items():
        if "running" in name:
            is_equal = torch.equal(part.of(federation.store.buffers), part.of(start))
            assert is_equal == (name.split(".")[0] in stay), name


def test_statistics_that_are_not_finite_are_named():
    with pytest.raises(Diverged, match="buffer 'peak' of client 0 on rank 0 has values that are not finite"):
        federation_of(f"--model {name_of(Overflowing)} --algorithm fedavg")
