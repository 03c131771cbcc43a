"""Loops whose ranks agree on when to end, and on metrics; see checks.py."""

import math
import sys

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import fedmpi

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def begin(**settings):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return model, fedmpi.average(model, every=2, timeout=10, **settings)


def check_any():
    """Streams of 3 and 5 batches end together, after 3."""
    _, fed = begin()
    stream, steps = iter(range(3 + 2 * RANK)), 0
    while not fed.any(next(stream, None) is None):
        fed.step()
        steps += 1
    assert steps == 3 and fed.any(RANK == SIZE - 1) is True and fed.any(False) is False
    fed.finish()
    assert fed.any(RANK == 0) is True and fed.any(0) is False  # afterwards too


def check_mean():
    """Of numbers and tensors; by the weights of the averages or others; also after `finish`."""
    _, fed = begin(weight=1 + 2 * RANK)
    weights = [1 + 2 * rank for rank in range(SIZE)]
    for _ in range(2):
        assert fed.mean(float(RANK)) == pytest.approx(sum(r * w for r, w in enumerate(weights)) / sum(weights))
        assert fed.mean(RANK, 1) == pytest.approx((SIZE - 1) / 2)
        assert fed.mean(math.nan if RANK else 0.5, weight=RANK == 0) == 0.5
        assert math.isnan(fed.mean(1.0, 0))
        given = torch.full((2, 3), float(RANK))
        found = fed.mean(given, 1.0)
        assert found.dtype == given.dtype and torch.equal(found, torch.full((2, 3), (SIZE - 1) / 2))
        assert fed.mean(torch.tensor(RANK), 1).dtype == torch.float64
        with pytest.raises(fedmpi.UserError, match="the ranks' weights are"):
            fed.mean(1.0, -1)
        with pytest.raises(fedmpi.UserError):
            fed.mean(torch.zeros(1 + RANK))
        fed.finish()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.zeros(7, 2))


def check_one_pass():
    """One line on every rank, whichever rank has such a loader."""
    for wrong in ((n for n in range(3)), iter(DataLoader(torch.zeros(4, 2))), DataLoader(Stream())):
        for whose in ({0}, {0, 1}):
            _, fed = begin()
            with pytest.raises(fedmpi.UserError) as caught:
                next(fed.batches(wrong if RANK in whose else [1, 2]))
            text = max(MPI.COMM_WORLD.allgather(str(caught.value)))
            assert text.startswith("batches: the loader is a "), text
            fed.finish()


class Short:
    """A loader that has fewer batches than it says, or only one pass."""

    def __init__(self, says, passes):
        self.says, self.passes = says, iter(passes)

    def __len__(self):
        return self.says

    def __iter__(self):
        return iter(range(next(self.passes, 0)))


def check_short():
    for loader in (Short(3, [2, 2]), Short(3, [3]), Short(3, [])):
        _, fed = begin()
        with pytest.raises(fedmpi.UserError, match="batches: the loader gave [02] batches in a pass: its length is 3"):
            list(fed.batches(loader if RANK == 0 else range(7)))
            raise fedmpi.UserError("batches: the loader gave 0 batches in a pass: its length is 3")  # the other ranks
        fed.finish()


def check_calls():
    """A rank that averages while another asks: an error on both."""
    _, fed = begin()
    with pytest.raises(fedmpi.UserError, match=r"after 0 rounds ranks \[1\] average, ranks \[0\] call fed.any"):
        if RANK == 0:
            fed.mean(1.0)
        for _ in range(2):
            fed.step()


def check_distributed():
    """torch.distributed over several ranks, as accelerate and Trainer begin it."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore() if SIZE == 1 else torch.distributed.FileStore(sys.argv[-1], SIZE),
        rank=RANK, world_size=SIZE,
    )  # fmt: skip
    for door in (begin, lambda: fedmpi.train(algorithm="fedavg", rounds=1)):
        with pytest.raises(fedmpi.UserError) as caught:
            door()
        text = max(MPI.COMM_WORLD.allgather(str(caught.value)))
        assert f"torch.distributed is initialised with {SIZE} ranks" in text, text
    torch.distributed.destroy_process_group()
