"""FedAvg as people write it without fedmpi: the baselines of the part `workloads`.

Each `*_loop` function returns a function that runs one round: q steps of SGD on every client of this
rank, then the average over all clients.
"""

import datetime
import warnings

import numpy as np
import torch
from torch.nn import functional

from fedmpi.comm.start.mpi_library import MPI
from fedmpi.ground.streams import derive

STEP_SIZE = 0.01


class Loop:
    """The local steps of all baselines: a model, normalised float inputs in memory, torch.optim.SGD.

    Args:
        module: a new `torch.nn.Module`. data: a list of (inputs, labels), one per client of this rank.
        num_clients: N over all ranks. local_steps: q. batch_size: b. step_size: of the optimizer.
    """

    def __init__(self, module, data, num_clients, local_steps, batch_size, step_size=STEP_SIZE):
        self.module, self.data, self.num_clients = module, data, num_clients
        self._local_steps, self._batch_size = local_steps, batch_size
        self.parameters = list(module.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=step_size)
        self._orders = [torch.randperm(len(labels)) for _, labels in data]
        self._positions = [0] * len(data)

    def steps(self, client, after_step=lambda: None):
        """q steps on this rank's client at index `client`; `after_step` is called after each."""
        for inputs, labels in self.batches(client):
            self.optimizer.zero_grad()
            functional.cross_entropy(self.module(inputs), labels).backward()
            self.optimizer.step()
            after_step()

    def batches(self, client):
        """The next q minibatches of this rank's client at index `client`: (inputs, labels)."""
        inputs, labels = self.data[client]
        for _ in range(self._local_steps):
            begin = self._positions[client]
            self._positions[client] = begin + self._batch_size if begin + 2 * self._batch_size <= len(labels) else 0
            batch = self._orders[client][begin : begin + self._batch_size]
            yield inputs[batch], labels[batch]


def loops_by_hand(rounds):
    """A function without arguments that makes a new `Loop` on the model and the data of `rounds`, a `Rounds`."""
    job, config = rounds.job, rounds.config
    samples = [job.task.samples[client] for client in job.context.clients]
    data = [of_client.at(torch.arange(of_client.num)) for of_client in samples]

    def make():
        torch.manual_seed(derive(config.data.seed, "model"))
        module = job.task.build_model(config.model_class, config.model_settings)
        return Loop(module, data, rounds.num_clients, config.rounds.local_steps, config.data.batch_size)

    return make


def flat_loop(comm, loop):
    """One Allreduce of one flat vector; the parameters are views of it."""
    flat = torch.cat([p.data.reshape(-1) for p in loop.parameters])
    for parameter, piece in zip(loop.parameters, flat.split([p.numel() for p in loop.parameters])):
        parameter.data = piece.view_as(parameter)
    return _averaging_loop(comm, loop, [flat])


def per_tensor_loop(comm, loop):
    """One Allreduce per parameter tensor."""
    return _averaging_loop(comm, loop, [parameter.data for parameter in loop.parameters])


def _averaging_loop(comm, loop, tensors):
    """One Allreduce of each of the tensors, which are the model."""
    starts, totals = ([torch.empty_like(tensor) for tensor in tensors] for _ in range(2))

    def one_client():
        loop.steps(0)
        for tensor in tensors:
            comm.Allreduce(MPI.IN_PLACE, tensor.numpy())
            tensor.div_(loop.num_clients)

    def several_clients():
        torch._foreach_copy_(starts, tensors)
        torch._foreach_zero_(totals)
        for client in range(len(loop.data)):
            torch._foreach_copy_(tensors, starts)
            loop.steps(client)
            torch._foreach_add_(totals, tensors)
        for tensor, total in zip(tensors, totals):
            comm.Allreduce(MPI.IN_PLACE, total.numpy())
            torch.div(total, loop.num_clients, out=tensor)

    return one_client if len(loop.data) == 1 else several_clients


def model_averager_loop(loop, local_steps):
    """PyTorch's own PeriodicModelAverager; needs `join_gloo` and one client per rank."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it advises against a period of 1, and q may be 1
        averager = PeriodicModelAverager(period=local_steps, warmup_steps=0)
    return lambda: loop.steps(0, after_step=lambda: averager.average_parameters(loop.parameters))


def join_gloo(link):
    """Initialise torch's process group with gloo, if all ranks are on one node; whether it exists then. Collective."""
    if not torch.distributed.is_available() or link.num_nodes > 1 or link.size == 1:
        return False
    if torch.distributed.is_initialized():
        return True
    port = np.zeros(1, dtype=np.int32)
    limit = datetime.timedelta(seconds=60)
    if link.rank == 0:
        store = torch.distributed.TCPStore("127.0.0.1", 0, link.size, True, limit, wait_for_workers=False)
        port[0] = store.port
    link.comm.Bcast(port)
    if link.rank != 0:
        store = torch.distributed.TCPStore("127.0.0.1", int(port[0]), link.size, False, limit)
    torch.distributed.init_process_group("gloo", store=store, rank=link.rank, world_size=link.size, timeout=limit)
    return True
