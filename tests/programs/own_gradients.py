"""Gradients are those that the user meant, in own loops and in `fedmpi.train`; see checks.py."""

import contextlib
import random
import sys

import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

import fedmpi

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
DRAWN = torch.Generator().manual_seed(RANK)
INPUTS = torch.randn(64, 6, generator=DRAWN)
LABELS = (INPUTS[:, 0] > 0).long()
QUIET = {"threads": 1, "out": sys.argv[-1]}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def joined(module, loss=None, steps=8, algorithm="fafed", around=contextlib.nullcontext, **settings):
    """(the trainable parameters after some steps of two per round, the last loss)."""
    fed = fedmpi.join(module, algorithm, local_steps=2, step_size=0.1, **settings)
    loss = loss or (lambda: functional.cross_entropy(module(INPUTS), LABELS))
    with around():
        for _ in range(steps):
            last = fed.step(loss)
    fed.finish()
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]), last.item()


def in_bfloat16():
    return torch.autocast("cpu", torch.bfloat16)


def check_autocast():
    """Around the loop it gives the bits of autocast inside the closure; a loop with `average` learns within it, too."""
    inside, outside = network(), network()

    def loss():
        with in_bfloat16():
            return functional.cross_entropy(inside(INPUTS), LABELS)

    expected, _ = joined(inside, loss)
    found, _ = joined(outside, around=in_bfloat16)
    assert torch.equal(found, expected)
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    fed = fedmpi.average(module, optimizer, every=5)
    with in_bfloat16():
        for _ in range(60):
            optimizer.zero_grad()
            loss = functional.cross_entropy(module(INPUTS), LABELS)
            loss.backward()
            optimizer.step()
            fed.step()
    fed.finish()
    assert loss.item() < 0.25, loss


def check_checkpoints():
    """Reentrant checkpoints give the gradients of the plain model."""
    plain, checked = network(), network()

    def loss():
        hidden = checked[1](checked[0](INPUTS))
        return functional.cross_entropy(checkpoint(checked[2], hidden, use_reentrant=True), LABELS)

    assert torch.equal(joined(checked, loss)[0], joined(plain)[0])


def check_hooks():
    """All hooks run, and what they change counts, as in plain torch."""
    module, seen = network(), []
    module[0].weight.register_hook(lambda g: seen.append("parameter") or g)

    def after(parameter):
        seen.append("post")
        parameter.grad.zero_()

    module[2].weight.register_post_accumulate_grad_hook(after)
    module[2].register_full_backward_hook(lambda *_: seen.append("module"))
    before = module[2].weight.detach().clone()
    joined(module, steps=2, algorithm="fedavg")
    assert all(seen.count(name) == 2 for name in ("parameter", "post", "module")), seen
    assert torch.allclose(module[2].weight, before)
    module = nn.Linear(6, 2)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    fed = fedmpi.join(module, "fedavg", comm=MPI.COMM_SELF)
    assert_fails(lambda: fed.step(lambda: module(INPUTS).sum()), "or a hook removes it")


class Odd(nn.Module):
    """A frozen number, as CLIP's logit_scale, an empty parameter and an empty buffer, and a sparse embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.logit_scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.empty, self.table = nn.Parameter(torch.empty(0)), nn.Embedding(7, 6, sparse=True)
        self.register_buffer("nothing", torch.empty(0))
        self.last = nn.Linear(6, 2)

    def forward(self, inputs):
        of_table = self.table(inputs[:, 0].abs().long() % 7)
        return self.logit_scale * self.last(inputs + of_table) + self.empty.sum()


def check_odd_parameters():
    dense = Odd()
    dense.table.sparse = False
    assert torch.equal(joined(Odd())[0], joined(dense)[0])
    fed = fedmpi.average(Odd(), every=2)
    fed.finish()
    run = fedmpi.train(data=[TensorDataset(INPUTS, LABELS)] * SIZE, model=Odd(), rounds=2, **QUIET)
    assert run.final["train_loss"] > 0


def check_frozen_later():
    """A parameter that is frozen after `join` stays where it is, weight decay or not."""
    module = network()
    fed = fedmpi.join(module, "fedavg", local_steps=2, step_size=0.1, weight_decay=0.1)
    for step in range(6):
        if step == 2:
            module[0].weight.requires_grad_(False)
            before = module[0].weight.clone()
        fed.step(lambda: functional.cross_entropy(module(INPUTS), LABELS))
    fed.finish()
    assert torch.equal(module[0].weight, before)


class Noisy(Dataset):
    """Items with noise of all three generators; what is drawn is remembered."""

    def __init__(self):
        self.drawn = []

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))
        return INPUTS[index] + sum(self.drawn[-1]), int(LABELS[index])


DRAWS = []  # of the training's copy of the module


class Drawing(nn.Module):
    """Dropout by numpy and by Python."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, inputs):
        if self.training:
            DRAWS.append((np.random.rand(), random.random()))
            inputs = inputs * sum(DRAWS[-1])
        return self.layer(inputs)


def check_random_numbers():
    """Every client, pass and sample has noise of its own from all generators; a pair of gradients sees the same."""
    for task in (False, True):
        sets, module = [Noisy() for _ in range(SIZE)], Drawing()
        settings = {"model": lambda module=module: module, "rounds": 2, "local_steps": 4, "batch_size": 3}
        settings |= {"algorithm": "fafed", "eval_every": 9, **QUIET}
        DRAWS.clear()
        before = np.random.get_state()[1].tolist(), random.getstate()
        if task:
            own = fedmpi.Task.of(
                "Own",
                train=lambda client, _, sets=sets: sets[client],
                loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
            )
            fedmpi.train(task=own, clients=SIZE, **settings)
        else:
            fedmpi.train(data=sets, **settings)
        assert before == (np.random.get_state()[1].tolist(), random.getstate())
        ours = sets[RANK].drawn
        begin = 5 if task else 16  # before, the items are read and the model is tried out
        everyone = [draw for drawn in MPI.COMM_WORLD.allgather(ours[begin : begin + 27]) for draw in drawn]
        for generator in zip(*everyone):
            assert len({*generator}) == len(generator), f"the same numbers twice (own task: {task})"
        pairs = DRAWS[-16:]
        assert pairs[::2] == pairs[1::2] and len({*pairs}) == 8, f"two gradients, other noise (own task: {task})"


def check_reading():
    """Datasets whose items may change are read in every pass, others and all with cache=True once; the bits agree."""

    inputs, labels = MPI.COMM_WORLD.bcast((INPUTS, LABELS))  # test data are the same on all ranks

    class Still(Dataset):
        reads = 0

        def __len__(self):
            return 20

        def __getitem__(self, index):
            self.reads += 1
            return inputs[index], int(labels[index])

    def train(one, **settings):
        settings |= {"epochs": 4, "batch_size": 5, "holdout": 0.2, "test_data": one, "model": network(), **QUIET}
        return fedmpi.train(data=[one] * SIZE, **settings)

    memory = TensorDataset(inputs[:20], labels[:20])
    once = torch.utils.data.ConcatDataset([torch.utils.data.Subset(memory, range(20))])
    fresh, kept = Still(), Still()
    runs = [train(once), train(fresh), train(kept, cache=True)]
    assert fresh.reads > 4 * 16 and kept.reads <= 40, (fresh.reads, kept.reads)
    for run in runs[1:]:
        assert run.final == runs[0].final
        assert all(map(torch.equal, run.model.parameters(), runs[0].model.parameters()))


def check_alone():
    """With COMM_SELF, ranks train by themselves, also different numbers of steps, and in a local class."""

    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, inputs):
            return self.layer(inputs)

    module = Local()
    joined(module, comm=MPI.COMM_SELF, steps=2 + 2 * RANK)
    optimizer = torch.optim.Adam(module.parameters())
    fed = fedmpi.average(module, optimizer, every=2, exchange="exp_avg", comm=MPI.COMM_SELF)
    for _ in range(3 + RANK):
        module(INPUTS).sum().backward()
        optimizer.step()
        fed.step()
    fed.finish()
    data = [TensorDataset(INPUTS, LABELS)]
    fedmpi.train(data=data, model=Local, rounds=2 + RANK, comm=MPI.COMM_SELF, name=f"alone{RANK}", **QUIET)
    own = fedmpi.Task.of(
        "Own",
        train=lambda client, _: data[0],
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        model=Local,
    )
    fedmpi.train(task=own, clients=SIZE, rounds=2, **QUIET)


def check_lazy():
    """Modules without shapes are one line in own loops; `fedmpi.train` gives them shapes."""
    for make in (fedmpi.join, fedmpi.average):
        assert_fails(lambda make=make: make(nn.Sequential(nn.LazyLinear(2))), "'0.weight' has no shape yet")
    data = [TensorDataset(INPUTS, LABELS)] * SIZE
    fedmpi.train(data=data, model=nn.Sequential(nn.LazyLinear(2)), rounds=1, **QUIET)


def check_metrics():
    """A metric that fails is found before the first round, on all ranks; sequences of different lengths are padded."""

    def predict(model, batch):
        length = 2 + RANK + len(batch[0]) % 2
        outputs = model(batch[0])[:, :1].repeat(1, length)
        return outputs, torch.zeros(len(outputs), length, dtype=torch.int64)

    members = {
        "train": lambda client, _: TensorDataset(INPUTS[: 25 + client], LABELS[: 25 + client]),
        "loss": lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
    }
    shapes = []
    counted = {"count": lambda outputs, targets: shapes.append((outputs.shape, targets.shape)) or (targets >= 0).sum()}
    padded = fedmpi.Task.of("Padded", predict=predict, metrics=counted, **members)
    # `predict` names the rank: its code differs between the ranks.
    run = fedmpi.train(task=padded, clients=SIZE, model=network(), rounds=1, may_differ="code", **QUIET)
    assert run.final["count"] == sum((25 + rank) * (2 + rank + (25 + rank) % 2) for rank in range(SIZE))
    assert shapes[-1][0] == shapes[-1][1] and len(shapes) == 2
    started = []
    members["loss"] = lambda model, batch: started.append(model.training) or model(batch[0]).square().mean()
    for metric, words in (
        (lambda outputs, targets: {}["none"], "metric bad: KeyError"),
        (lambda outputs, targets: 1 / 0, "metric bad: ZeroDivisionError"),
    ):
        bad = fedmpi.Task.of("Bad", metrics={"bad": metric}, **members)
        settings = {"task": bad, "clients": SIZE, "model": network(), "rounds": 1, **QUIET}
        assert_fails(lambda settings=settings: fedmpi.train(**settings), words)
    assert sum(started) <= 4, "a round was begun"


def assert_fails(function, words):
    """Check the text of the `UserError` that a call raises; where the ranks agree on it, it may be on one rank only."""
    try:
        function()
    except fedmpi.UserError as error:
        assert words in str(error) or not str(error), error
        assert MPI.COMM_WORLD.allreduce(words in str(error)), error
    else:
        raise AssertionError(f"no error: {words}")
