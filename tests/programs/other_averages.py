"""The same loop with an averager of another system and with `fedmpi.average`: how far are their parameters apart?

python other_averages.py THERE HERE STEPS ...: expressions like "PeriodicModelAverager(period=q)" and
"fedmpi.average(model, every=q)", and how often `fed.step()` is called before the loop. Rank 0 prints a line for each:
the largest difference after any step, relative to the largest move of ours.
"""

import os
import sys
import tempfile

import torch
from mpi4py import MPI
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

import fedmpi

COMM = MPI.COMM_WORLD
STEPS, Q = 20, 4
NAMES = {"fedmpi": fedmpi, "q": Q, "eta": 0.7, "mu": 0.9, "SGD": torch.optim.SGD}


def parts():
    """A model, the same on all ranks, with its optimizer and this rank's own data."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8)
    drawn = torch.Generator().manual_seed(COMM.rank)
    inputs = torch.randn(STEPS, 8, 3, generator=drawn, dtype=torch.float64)
    return model, optim, list(zip(inputs, inputs.sum(2, keepdim=True).sin() + COMM.rank))


def train(model, optim, data, after_step):
    """[steps, dim]: the parameters after each step."""
    found = []
    for inputs, labels in data:
        optim.zero_grad()
        (model(inputs) - labels).square().mean().backward()
        optim.step()
        after_step()
        found.append(torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()]))
    return torch.stack(found)


def ours(here, steps_before):
    model, optim, data = parts()
    fed = eval(here, {**NAMES, "model": model})
    for _ in range(eval(steps_before, NAMES)):
        fed.step()
    found = train(model, optim, data, fed.step)
    fed.finish()
    return found


def torchs(there):
    model, optim, data = parts()
    names = {**NAMES, "PeriodicModelAverager": PeriodicModelAverager}
    made = eval(there, {**names, "optim": optim, "PostLocalSGDOptimizer": PostLocalSGDOptimizer})
    if isinstance(made, PostLocalSGDOptimizer):
        return train(model, made, data, lambda: None)
    return train(model, optim, data, lambda: made.average_parameters(model.parameters()))


def accelerates(there):
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    model, optim, data = parts()
    model, optim = accelerator.prepare(model, optim)
    with eval(there, {**NAMES, "LocalSGD": LocalSGD, "accelerator": accelerator, "model": model}) as local:
        return train(model, optim, data, local.step)


def torchfts(there):
    from datetime import timedelta

    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo, LocalSGD

    lighthouse = COMM.rank == 0 and LighthouseServer(bind="[::]:0", min_replicas=COMM.size)
    address = COMM.bcast(lighthouse and lighthouse.address())
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model, optim, data = parts()
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)), min_replica_size=COMM.size, use_async_quorum=False,
        load_state_dict=lambda state: model.load_state_dict(state), state_dict=lambda: model.state_dict(),
        replica_id=f"rank{COMM.rank}", store_addr="localhost", store_port=store.port, rank=0, world_size=1,
        lighthouse_addr=address, init_sync=False,
    )  # fmt: skip
    names = {**NAMES, "manager": manager, "model": model, "optim": optim, "LocalSGD": LocalSGD, "DiLoCo": DiLoCo}
    try:
        with eval(there, names):
            return train(model, optim, data, lambda: None)
    finally:
        COMM.Barrier()
        manager.shutdown(wait=False)
        if lighthouse:
            lighthouse.shutdown()


def find_trainer(there):
    """The function for an expression: by the name of the class that it makes."""
    if "Periodic" in there:
        return torchs
    return accelerates if "accelerator" in there else torchfts


rows = list(zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3]))
found = [
    ours(here, steps_before) for _, here, steps_before in rows
]  # first: `fedmpi.average` refuses to be where torch.distributed averages
with tempfile.TemporaryDirectory() as folder:
    file = COMM.bcast(f"{folder}/store")
    os.environ |= {"RANK": str(COMM.rank), "WORLD_SIZE": str(COMM.size), "LOCAL_RANK": str(COMM.rank)}
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=COMM.rank, world_size=COMM.size)
    start = torch.cat([parameter.detach().flatten() for parameter in parts()[0].parameters()])
    for (there, *_), mine in zip(rows, found):
        theirs = find_trainer(there)(there)
        difference = float((mine - theirs).abs().max() / (mine - start).abs().max())
        difference = COMM.allreduce(difference, MPI.MAX)
        if COMM.rank == 0:
            print(f"{there}: {difference:.2g}", flush=True)
    COMM.Barrier()
    torch.distributed.destroy_process_group()
    COMM.Barrier()  # torch waits without end for its file if another rank has removed the folder
