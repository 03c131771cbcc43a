"""What must hold of `fedmpi.average`, on every rank; see checks.py."""

import io

import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedmpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size


def network(seed=0):
    """Convolutions, batch-norm, dropout, tied and frozen weights."""
    torch.manual_seed(seed)
    module = nn.Sequential(
        nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(180, 7),
        nn.Linear(7, 7, bias=False), nn.Linear(7, 7), nn.Linear(7, 3),
    )  # fmt: skip
    module[7].weight = module[6].weight
    module[8].bias.requires_grad_(False)
    return module


def data():
    """This rank's own samples."""
    drawn = torch.Generator().manual_seed(RANK)
    labels = torch.randint(3, (48,), generator=drawn)
    return TensorDataset(torch.randn(48, 1, 8, 8, generator=drawn) + labels[:, None, None, None], labels)


def groups(module):
    return [
        {"params": list(module[:4].parameters()), "lr": 0.02},
        {"params": list(module[4:].parameters()), "weight_decay": 0.1},
    ]


def hand_average(tensors):
    for tensor in tensors:
        COMM.Allreduce(MPI.IN_PLACE, tensor.numpy())
        tensor /= SIZE


def train(model, module, federate, after_step):
    """A person's loop: AdamW in two groups, a cosine schedule, bf16 autocast, accumulation, a loader with workers."""
    torch.manual_seed(5 + RANK)
    optimizer = torch.optim.AdamW(groups(module), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    loader = DataLoader(data(), 4, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(RANK))
    fed = federate(model, optimizer)
    for number, (inputs, labels) in enumerate(loader, 1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs), labels) / 2
        loss.backward()
        if number % 2 == 0:
            optimizer.step()
            after_step(fed, number // 2, optimizer)
            optimizer.zero_grad()
            schedule.step()
    return fed, optimizer


def check_hand():
    """The same bits as averages by hand, of parameters, statistics and both moments."""
    by_hand = network()

    def average_by_hand(fed, steps, optimizer):
        if steps % 2 == 0:
            floats = [b for b in by_hand.buffers() if b.is_floating_point()]
            moments = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
            hand_average([p.data for p in by_hand.parameters() if p.requires_grad] + floats + moments)

    _, optimizer = train(by_hand, by_hand, lambda model, optimizer: None, average_by_hand)
    expected = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    for wrap in (lambda module: module, lambda module: torch.compile(module, backend="eager")):
        module = network()
        if RANK == 1:
            module[5].weight.data.zero_()  # rank 0's values are taken
        fed, optimizer = train(
            wrap(module),
            module,
            lambda model, optimizer: fedmpi.average(model, optimizer, every=2, exchange=("exp_avg", "exp_avg_sq")),
            lambda fed, steps, optimizer: fed.step(),
        )
        assert fed.averaged and fed.accounts()["round"] == 3
        moments = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        fed.finish()
        for name, value in by_hand.state_dict().items():
            assert torch.equal(module.state_dict()[name], value), name
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(moments, expected, strict=True))
        module[5].weight.data.zero_()  # a plain module: this changes no other rank's
        optimizer.step()


def quadratic_run(federate, rounds=4):
    """[3] after some rounds of two SGD steps on a quadratic of this rank's own."""
    model = nn.Linear(3, 1, bias=False)
    model.weight.data.copy_(torch.tensor([[1.0, -2.0, 0.5]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fed = federate(model, optimizer)
    for _ in range(rounds):
        for _ in range(2):
            optimizer.zero_grad()
            loss = (model.weight - RANK).square().sum()
            loss.backward()
            optimizer.step()
            fed.step(loss.detach())
    assert not np.isnan(fed.round_loss)
    fed.finish()
    return model.weight.detach()


def check_bound():
    """A stage that bounds a rank's move sees the whole of it, also the first step."""
    for every in (1, 2):
        model = nn.Linear(1, 1, bias=False)
        model.weight.data.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        fed = fedmpi.average(model, optimizer, every=every, stages=["norm_bound"])
        for _ in range(3 * every):
            optimizer.zero_grad()
            (-5 * (RANK + 1) * model.weight.sum()).backward()
            optimizer.step()
            fed.step()
        assert model.weight.item() == 3, model.weight
        fed.finish()


class ByHand:
    """An outer torch optimizer on the mean move."""

    round_loss = 0.0

    def __init__(self, model, make):
        self.model, self.steps = model, 0
        self.start = nn.Parameter(model.weight.detach().clone())
        self.outer = make([self.start])

    def step(self, loss):
        self.steps += 1
        if self.steps % 2 == 0:
            hand_average([self.model.weight.data])
            self.start.grad = self.start.detach() - self.model.weight.detach()
            self.outer.step()
            self.model.weight.data.copy_(self.start.data)

    def finish(self):
        pass


def check_outer():
    """Outer momentum and Nesterov are torch's SGD on the mean move; adam is that of FedAdam."""
    for outer, nesterov in (("momentum", False), ("nesterov", True)):
        ours = quadratic_run(
            lambda m, o, outer=outer: fedmpi.average(m, o, every=2, outer=outer, server_step_size=0.7, momentum=0.8)
        )
        theirs = quadratic_run(
            lambda m, o, nesterov=nesterov: ByHand(
                m, lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.8, nesterov=nesterov)
            )
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    settings = {"server_step_size": 0.3, "epsilon": 0.1}
    as_torch = {"v0": 0.0, "correction": "torch", "second_moment_decay": 0.99, **settings}
    ours = quadratic_run(lambda m, o: fedmpi.average(m, every=2, outer="adam", **as_torch))
    theirs = quadratic_run(
        lambda m, o: ByHand(m, lambda p: torch.optim.Adam(p, lr=0.3, betas=(0.9, 0.99), eps=0.1)),
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    ours = quadratic_run(lambda m, o: fedmpi.average(m, every=2, outer="adam", **settings))
    fedadam = fedmpi.algorithms.FedAdam(step_size=0.1, server_step_size=0.3, epsilon=0.1)
    trace = fedmpi.simulate(fedadam, lambda i, x, sample: 2 * (x - i), [1.0, -2.0, 0.5], SIZE, 4, 2)
    np.testing.assert_allclose(ours[0].numpy(), trace[-1]["rows"]["x"][0], rtol=1e-5)


def check_diloco():
    """AdamW under average(outer="nesterov") is join with the algorithm diloco, to the last bit."""
    inputs = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(RANK))
    results = []
    for joins in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16))
        if joins:
            fed = fedmpi.join(model, "diloco", local_steps=2, step_size=0.01, decay=0.1)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
            fed = fedmpi.average(model, optimizer, every=2, outer="nesterov")
        for batch in inputs:
            if joins:
                fed.step(lambda model=model, batch=batch: model(batch).square().mean())
            else:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                fed.step()
        fed.finish()
        results.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(*results)


def check_resume():
    """model, optimizer and fed each save their state, in the middle of a round; the same bits afterwards."""
    final = []
    for stop in (None, 5):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))

        def begin(model):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            return optimizer, fedmpi.average(model, optimizer, every=3, exchange=("exp_avg",), outer="momentum")

        optimizer, fed = begin(model)
        inputs = torch.randn(9, 4, 5, generator=torch.Generator().manual_seed(RANK))
        for number, batch in enumerate(inputs):
            if number == stop:
                file = io.BytesIO()
                torch.save([model.state_dict(), optimizer.state_dict(), fed.state_dict()], file)
                fed.finish()
                file.seek(0)
                model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
                optimizer, fed = begin(model)
                for owner, state in zip((model, optimizer, fed), torch.load(file, weights_only=True)):
                    owner.load_state_dict(state)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            fed.step()
        fed.finish()
        final.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(*final)
