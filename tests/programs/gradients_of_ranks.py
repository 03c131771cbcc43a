"""`fedmpi.average(every=None)` beside one process that has the batches of all ranks; ranks with weights, too."""

import copy
import json

import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional

import fedmpi

STEPS = 12


class Model(nn.Module):
    """The last layer is used by rank 0 alone; `unused` by none."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(2, 2)

    def forward(self, inputs, rank):
        hidden = self.first(inputs).tanh()
        return self.last(hidden) if rank == 0 else hidden


def make(weight, dtype=torch.float64):
    torch.manual_seed(0)
    model = Model().to(dtype)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1) for m in (model, twin)]
    return model, twin, *optimizers, fedmpi.average(model, optimizers[0], every=None, weight=weight)


def loss_of(model, batch, rank):
    return functional.mse_loss(model(batch, rank), torch.ones_like(batch[:, :1]).expand(-1, 7))


def apart(weight_of, resumes_at=None):
    """The largest difference to the process with all batches; `resumes_at`: a step after which it goes on anew."""
    rank = MPI.COMM_WORLD.rank
    model, twin, optimizer, twins, fed = make(weight_of(rank))
    batches = torch.randn(STEPS, fed.size, 8, 5, generator=torch.Generator().manual_seed(3)).double()
    weights = torch.tensor([weight_of(rank) for rank in range(fed.size)])
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batches[step, fed.rank], fed.rank)
        loss.backward()
        fed.step(loss)
        optimizer.step()
        assert fed.averaged
        for parameter in twin.parameters():
            parameter.grad = torch.zeros_like(parameter)
        losses = torch.stack([loss_of(twin, batches[step, rank], rank) for rank in range(fed.size)])
        ((losses * weights).sum() / weights.sum()).backward()
        twins.step()
        if step == resumes_at:
            values, moments, state = (copy.deepcopy(part.state_dict()) for part in (model, optimizer, fed))
            fed.finish()
            model, _, optimizer, _, fed = make(weight_of(rank))
            model.load_state_dict(values)
            optimizer.load_state_dict(moments)
            fed.load_state_dict(state)
    fed.finish()
    return max((p - q).abs().max().item() for p, q in zip(model.parameters(), twin.parameters()))


def main():
    found = {
        "equal": apart(lambda rank: 1.0),
        "weighted": apart(lambda rank: 1.0 + 2 * rank),
        "resumed": apart(lambda rank: 1.0 + rank, resumes_at=4),
    }
    model, _, optimizer, _, fed = make(1.0, torch.bfloat16)
    for _ in range(5):
        optimizer.zero_grad()
        loss_of(model, torch.full((4, 5), float(fed.rank), dtype=torch.bfloat16), fed.rank).backward()
        fed.step()
        optimizer.step()
    fed.finish()
    found["bfloat16"] = [p.float().tolist() for p in model.parameters()]
    found["bytes"] = fed.accounts()["bytes"]
    print(json.dumps([fed.rank, found]), flush=True)


main()
