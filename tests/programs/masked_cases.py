"""Every algorithm in many cases under --aggregation reproducible and masked: the same bits. Under mpirun with 4 ranks.

A case has 1 to 4 ranks, one or five clients on each, all or half of them in a round, with weights or without, float32
or float64, a transport, personal coordinates. A model has float buffers, one of them in float64, which clients change,
some only later. Then the same for fedmpi.join and fedmpi.average. Rank 0 prints how many cases there were.
"""

import hashlib
import sys
import traceback

import numpy as np
import torch
from mpi4py import MPI
from reproducible import check

import fedmpi
from fedmpi import algorithms
from fedmpi.aggregation.masked import Masked
from fedmpi.aggregation.reproducible import Reproducible
from fedmpi.aggregation.sending import Sending
from fedmpi.algorithms.base import Algorithm
from fedmpi.comm.sums.mpi import MPILink
from fedmpi.federation import Federation, Plan, Variables
from fedmpi.federation.participation import draw_participants
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import known
from fedmpi.oracles import FunctionOracle
from fedmpi.oracles.flat_module import BufferPart

DIM, ROUNDS = 23, 2
KNOWN = known(algorithms, Algorithm)
# (ranks, clients of each, participation, weighted, dtype, transport, neighbours, personal)
CASES = [
    (1, 1, 1.0, False, torch.float32, "auto", 0, False),
    (1, 5, 0.5, True, torch.float64, "auto", 0, True),
    (2, 1, 1.0, True, torch.float64, "shared", 0, False),
    (2, 5, 0.5, False, torch.float32, "allreduce", 0, False),
    (3, 1, 1.0, False, torch.float32, "shared", 1, True),
    (3, 5, 0.5, True, torch.float32, "shared", 0, False),
    (4, 1, 0.5, True, torch.float32, "allreduce", 2, False),
    (4, 5, 0.5, False, torch.float64, "auto", 2, True),
]


def gradient(client, x, sample):
    i = torch.arange(x.numel(), dtype=x.dtype)
    return (1 + 0.3 * torch.cos(client + i)) * (x - client) * 10.0 ** (client % 3) / 100 + 0.1 * torch.sin(i * sample)


class Changing(FunctionOracle):
    """A client's buffers change with its gradients: the first at once, others from round 1 on, by some clients only."""

    def gradient(self, z, xi):
        buffers, size = self.client.buffers, z.element_size()
        buffers[:2].add_(0.1 * (1 + self.client.index))
        if self.client.round_index > 0 and self.client.index % 2 == 0:
            PARTS[size][1].of(buffers).fill_(1e-3 * (1 + self.client.index))  # it was large before
            PARTS[size][2].of(buffers).add_(1 / 3 + self.client.index)
        return super().gradient(z, xi)


# Bytes of a row's elements -> the buffers; the last is summed in float64 beside float32 rows.
PARTS = {
    size: [
        BufferPart("mean", 0, 2, dtype),
        BufferPart("large", 2, 1, dtype),
        BufferPart("total", 4, 2, torch.float64),
        BufferPart("mask", 4 + 16 // size, 1, dtype),
    ]
    for size, dtype in ((4, torch.float32), (8, torch.float64))
}


def run(name, link, case, aggregation):
    """The hash of a federation's rows, buffers and losses."""
    _, each, participation, weighted, dtype, _, _, personal = case
    number = link.size * each
    plan = Plan(
        number,
        2,
        participants=lambda index: draw_participants(number, participation, 3, index),
        weights=([1.0, 2.0, 0.3, 7.0, 1e-3] * 4)[:number] if weighted else None,
    )
    size = dtype.itemsize
    buffers = torch.zeros(6 + 16 // size, dtype=dtype)
    buffers[2], buffers[-2] = 1e6, torch.finfo(torch.float32).max
    start = Variables(
        torch.linspace(-1, 1, DIM, dtype=dtype),
        buffers,
        ascent=slice(DIM - 3, DIM) if type(KNOWN[name]()).__module__.endswith("minmax") else None,
        private=(slice(2, 5),) if personal else (),
        buffer_parts=PARTS[size],
    )
    clients = range(each * link.rank, each * (link.rank + 1))
    oracles = {client: lambda state: Changing(gradient, state) for client in clients}
    federation = Federation(KNOWN[name](), link, oracles, plan, start, Sending(aggregation))
    federation.start()
    losses = np.array([federation.run_round() for _ in range(ROUNDS)])
    found, store = hashlib.sha256(losses.tobytes()), federation.store
    for row, values in sorted({**store.averaged_rows(), **store.server_rows()}.items()):
        assert torch.isfinite(values).all(), f"{row} is not finite"
        values = values.clone()
        for place in start.private:
            values[place] = 0  # each client's own
        found.update(values.numpy().tobytes())
    found.update(store.buffers.numpy().tobytes() + federation.server.numbers.numpy().tobytes())
    assert name != "fedavg" or PARTS[size][1].of(store.buffers).item() != 1e6
    return found.hexdigest()


def federations(world, names):
    """How many cases there were: of each algorithm every second one, of all algorithms all."""
    done = 0
    for position, case in enumerate(CASES):
        takes_part = world.rank < case[0]
        comm = world.Split(0 if takes_part else MPI.UNDEFINED, world.rank)
        link = MPILink(comm, transport=case[5]) if takes_part else None
        for number, name in enumerate(names):
            alone = any(exchange.alone for exchange in KNOWN[name]().exchanges())
            if alone or (number + position) % 2 and len(names) > 8:
                continue
            aggregations = Reproducible(), Masked(least_ranks=1, neighbours=case[6])
            found = [run(name, link, case, each) for each in aggregations] if takes_part else []
            check(len({*found}) < 2 and len({*sum(world.allgather(found[:1]), [])}) < 2, f"{name}, {case}")
            done += 1
        if link is not None:
            link.close()
    return done


def loops(world):
    """The parameters after a loop of the user's own."""
    done = 0
    for door, name in [("join", each) for each in ("fedavg", "fafed", "scaffold", "fednova")] + [("average", "")]:
        found = set()
        for aggregation in ("reproducible", Masked(), Masked(hidden_weights=True)):
            torch.manual_seed(0)
            model, weight = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)), 1.0 + world.rank
            inputs = torch.randn(16, 3, generator=torch.Generator().manual_seed(world.rank))
            if door == "join":
                fed = fedmpi.join(model, name, local_steps=2, weight=weight, aggregation=aggregation, step_size=0.1)
            else:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                fed = fedmpi.average(model, optimizer, every=2, weight=weight, aggregation=aggregation)
            for _ in range(6):
                if door == "join":
                    fed.step(lambda model=model, inputs=inputs: (model(inputs) - 1).square().mean())
                else:
                    optimizer.zero_grad()
                    (model(inputs) - 1).square().mean().backward()
                    optimizer.step()
                    fed.step()
            mean = fed.mean(float(world.rank), weight=weight)
            assert (
                abs(mean - sum(r * (1 + r) for r in range(world.size)) / sum(1 + r for r in range(world.size))) < 1e-12
            )
            fed.finish()
            hides_weights = getattr(aggregation, "hidden_weights", False)
            assert ("weights" in fed._link.crossed) != hides_weights
            found.add(hashlib.sha256(b"".join(p.numpy().tobytes() for p in model.state_dict().values())).hexdigest())
        model[1].running_mean.fill_(world.rank)
        if door == "average":
            try:
                fedmpi.average(model, optimizer, every=2, buffers="average", aggregation=Masked())
            except UserError as error:
                assert "begin with different buffers" in str(error)
            else:
                raise AssertionError("the first average of the buffers shows them")
        check(len(found) == 1 and len({*world.allgather(min(found))}) == 1, f"{door} {name}")
        done += 1
    return done


def main(names):
    world = MPI.COMM_WORLD
    done = federations(world, names), loops(world)
    if world.rank == 0:
        print("same bits in", *done, "cases", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        main(sys.argv[1:] or list(KNOWN))
    except BaseException:
        traceback.print_exc()
        MPI.COMM_WORLD.Abort(1)
