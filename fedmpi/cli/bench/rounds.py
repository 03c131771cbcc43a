"""Rounds of the real federation, their floor and their memory."""

import dataclasses
import functools

import torch

from fedmpi.comm.agreement import agree
from fedmpi.comm.sums.mpi import MPILink
from fedmpi.ground.machine.memory import peak_memory, reset_peak_memory
from fedmpi.training.build import prepare
from fedmpi.training.config import read_command_line

NUM_BATCHES = 8  # minibatches that the floor's gradients take in turn


class Rounds:
    """The federation of a fedmpi.train command line, after its first round. Collective on the link.

    Args:
        link: of the program; the rounds get their own over the same ranks.
        arguments: of fedmpi.train. stages: objects, which take the place of those in the arguments.

    Attributes:
        job: the `Job`; federation: its `Federation`; config: its `Config`.
        num_clients, local_steps, dim: of the federation.
        nbytes: sent per rank and round.
        gradients_per_step: evaluated per client and local step.
        memory: bytes by which the federation raised the peak memory, on the rank that needs most.
    """

    def __init__(self, link, arguments, stages=()):
        reset_peak_memory()
        memory_before = peak_memory()
        self.config = agree(link, lambda: read_command_line(list(arguments)))
        if stages:
            sending = dataclasses.replace(self.config.sending, stages=stages)
            self.config = dataclasses.replace(self.config, sending=sending)
        self.link = MPILink(link.comm)
        self.job = prepare(self.config, self.link)
        self.federation = self.job.federation
        self.federation.start()
        store = self.federation.store
        self._averages = store.block if store.aggregation.block is store.block else torch.empty_like(store.block)
        self.num_clients = self.job.context.num_clients
        self.local_steps = self.config.rounds.local_steps
        self.dim = self.job.flat.dim
        gradients, nbytes = self._num_gradients(), self.link.traffic.nbytes
        self.run()
        self.nbytes = self.link.traffic.nbytes - nbytes
        num_steps = max(1, len(self.federation.clients) * self.local_steps)
        self.gradients_per_step = (self._num_gradients() - gradients) / num_steps
        self.memory = float(self.link.allgather([peak_memory() - memory_before]).max())

    def _num_gradients(self):
        return sum(client.num_gradients for client in self.federation.clients)

    def run(self):
        """One round."""
        self.federation.run_round()

    def floor(self):
        """What no implementation of the round can leave out: its gradients, then its communication."""
        self.evaluate_gradients()
        self.communicate()

    def evaluate_gradients(self):
        """The gradients of one round on this rank's clients and nothing else, by plain PyTorch.

        If the oracle estimates gradients from losses: those losses.
        """
        flat, task = self.job.flat, self.job.task
        flat.point_at(self.federation.server.x, self.federation.store.buffers)
        flat.train()
        number = round(self.gradients_per_step * self.local_steps * len(self.federation.clients))
        directions = getattr(self.config.oracle, "directions", None)
        with torch.set_grad_enabled(directions is None):
            for index in range(number if directions is None else number * (directions + 1)):
                loss = task.loss(flat.module, self._batches[index % NUM_BATCHES])
                if directions is None:
                    torch.autograd.grad(loss, flat.parameters)

    @functools.cached_property
    def _batches(self):
        oracle = self.federation.clients[0].oracle
        return [oracle.draw().batch for _ in range(NUM_BATCHES)]

    def communicate(self):
        """The communication of one round and nothing else."""
        self.link.average(self.federation.aggregation.block, self.link.size, out=self._averages)

    def close(self):
        """Free the shared memory; the federation cannot be used afterwards. Collective."""
        self.link.close()
