"""Three rounds of the benchmark's hand-written loops and of FedAvg by fedmpi, on the same minibatches."""

import torch
from mpi4py import MPI
from torch import nn

from fedmpi.cli.bench import baselines
from fedmpi.comm.sums.mpi import MPILink

CLIENTS, STEPS, BATCH, SAMPLES = 4, 3, 5, 20


def module():
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def data(client):
    draw = torch.Generator().manual_seed(client)
    return torch.randn(SAMPLES, 2, 2, generator=draw), torch.randint(0, 3, (SAMPLES,), generator=draw)


def loop(clients):
    torch.manual_seed(2)
    return baselines.Loop(module(), [data(client) for client in clients], CLIENTS, STEPS, BATCH)


def expected(loop_of_all):
    """FedAvg written out: every client in turn, the mean of their parameters."""
    start = [p.detach().clone() for p in loop_of_all.parameters]
    for _ in range(3):
        ends = []
        for client in range(CLIENTS):
            with torch.no_grad():
                for p, value in zip(loop_of_all.parameters, start):
                    p.copy_(value)
            loop_of_all.steps(client)
            ends.append([p.detach().clone() for p in loop_of_all.parameters])
        start = [torch.stack(pieces).mean(0) for pieces in zip(*ends)]
    return start


def main():
    link = MPILink()
    per_rank = CLIENTS // link.size
    mine = range(link.rank * per_rank, (link.rank + 1) * per_rank)
    everyone = loop(range(CLIENTS))
    orders = [order.clone() for order in everyone._orders]
    reference = expected(everyone)
    for kind in (baselines.flat_loop, baselines.per_tensor_loop):
        one = loop(mine)
        one._orders = [orders[client] for client in mine]
        run_round = kind(MPI.COMM_WORLD, one)
        for _ in range(3):
            run_round()
        for found, wanted in zip(one.parameters, reference):
            torch.testing.assert_close(found.detach(), wanted, rtol=1e-5, atol=1e-6)
    if link.rank == 0:
        print("equal")
    link.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
