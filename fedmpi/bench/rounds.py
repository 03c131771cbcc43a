"""A round: its time, where it goes, and its floor."""

import contextlib
import dataclasses
import time

import numpy as np
import torch

from fedmpi.bench.measure import Contestant, forget_peak_memory, peak_memory
from fedmpi.comm.agreement import agree
from fedmpi.comm.mpi import MPILink
from fedmpi.config.build import read_command_line
from fedmpi.training.build import prepare

FLOOR_BATCHES = 8  # minibatches that the floor's gradients take in turn


class Rounds:
    """The real federation of some settings, ready to run rounds. Collective on the link.

    Args:
        link: of the program; the rounds get one of their own over the same ranks.
        words: of a fedmpi.train command line.
    """

    def __init__(self, link, words):
        forget_peak_memory()
        before = peak_memory()
        self.config = agree(link, lambda: read_command_line(list(words)))
        self.link = MPILink(link.comm)
        self.training = prepare(self.config, self.link)
        self.federation = self.training.federation
        self.federation.start()
        state = self.federation.store
        self._averages = state.block if state.outgoing is state.block else torch.empty_like(state.block)
        run = self.config.run
        self.num_clients = self.training.place.num_clients
        self.local_steps = run.local_steps
        self.dim = self.training.flat.dim
        evaluated = [c.oracle.num_gradients for c in self.federation.clients]
        nbytes = self.link.traffic.nbytes
        self.federation.run_round()
        self.nbytes = self.link.traffic.nbytes - nbytes  # per rank and round
        gradients = sum(c.oracle.num_gradients for c in self.federation.clients) - sum(evaluated)
        self.memory = float(self.link.allgather([peak_memory() - before]).max())  # that it added, per rank
        self.gradients_per_step = gradients / max(1, len(self.federation.clients) * self.local_steps)

    def run(self):
        """One round."""
        self.federation.run_round()

    def gradients(self):
        """The gradients of one round on this rank's clients and nothing else, by plain PyTorch.

        Where they are two-point estimates: the losses that those need.
        """
        flat, task = self.training.flat, self.training.task
        batches = self._batches()
        flat.point_at(self.federation.server.x, self.federation.store.buffers)
        flat.module.train()
        number = round(self.gradients_per_step * self.local_steps * len(self.federation.clients))
        directions = getattr(self.config.oracle, "directions", None)
        with torch.set_grad_enabled(directions is None):
            for index in range(number if directions is None else number * (directions + 1)):
                loss = task.loss(flat.module, batches[index % len(batches)])
                if directions is None:
                    torch.autograd.grad(loss, flat.parameters)

    def _batches(self):
        if not hasattr(self, "_fixed"):
            oracle = self.federation.clients[0].oracle
            self._fixed = [oracle._sample(number).batch for number in range(FLOOR_BATCHES)]
        return self._fixed

    def floor(self):
        """What no implementation of the round can leave out, one after the other."""
        self.gradients()
        self.exchange()

    def exchange(self):
        """The communication of one round and nothing else."""
        self.link.average(self.federation.store.outgoing, self.link.size, out=self._averages)

    def close(self):
        """Give the shared memory back; the federation is of no use then. Collective."""
        self.link.close()

    def split(self, seconds):
        """Where the time of a round goes, as name -> seconds on this rank; runs some rounds.

        The parts are timed from outside, by stand-ins that the federation cannot tell from the
        algorithm, the link and the oracles.
        """
        clock = _Clock()
        federation = self.federation
        algorithm, link = federation.algorithm, federation.link
        oracles = [client.oracle for client in federation.clients]
        federation.algorithm, federation.link = _TimedAlgorithm(algorithm, clock), _Timed(link, clock, LINK_PARTS)
        for client, oracle in zip(federation.clients, oracles):
            client.oracle = _Timed(oracle, clock, ORACLE_PARTS)
        try:
            begun = time.perf_counter()
            number = self._agreed_number(seconds)
            for _ in range(number - 1):
                self.run()
            total = time.perf_counter() - begun
        finally:
            federation.algorithm, federation.link = algorithm, link
            for client, oracle in zip(federation.clients, oracles):
                client.oracle = oracle
        parts = {part: spent / number for part, spent in clock.seconds.items()}
        parts["overhead"] = total / number - sum(parts.values())
        return parts

    def _agreed_number(self, seconds):
        """How many rounds fit into the time, by running one of them."""
        begun = time.perf_counter()
        self.run()
        once = self.link.allgather([time.perf_counter() - begun]).max()
        return int(np.clip(seconds / once, 3, 200))


ORACLE_PARTS = {
    "draw": "data", "draw_first": "data", "whole": "data", "gradient": "gradient", "gradient_pair": "gradient",
}  # fmt: skip
LINK_PARTS = {"average": "communication", "gather": "waiting"}


class _Clock:
    """Adds up seconds by part; inner parts are taken off the outer one."""

    def __init__(self):
        parts = ("gradient", "update", "data", "communication", "waiting")
        self.seconds = dict.fromkeys(parts, 0.0)
        self._inner = [0.0]

    @contextlib.contextmanager
    def part(self, name):
        self._inner.append(0.0)
        begun = time.perf_counter()
        yield
        spent = time.perf_counter() - begun
        self.seconds[name] += spent - self._inner.pop()
        self._inner[-1] += spent

    def timed(self, name, function):
        def call(*args, **options):
            with self.part(name):
                return function(*args, **options)

        return call


class _Timed:
    """Stands in for an object and times some of its methods."""

    def __init__(self, real, clock, parts):
        self._real = real
        for method, part in parts.items():
            if hasattr(real, method):
                setattr(self, method, clock.timed(part, getattr(real, method)))

    def __getattr__(self, name):
        return getattr(self._real, name)


class _TimedAlgorithm(_Timed):
    """Stands in for an algorithm: whatever it does beside asking the oracle is the update."""

    def __init__(self, real, clock):
        methods = ("start", "server_start", "client_start", "download", "local_step", "upload")
        super().__init__(real, clock, dict.fromkeys(methods, "update"))
        self._clock = clock

    def exchanges(self):
        def timed(function):
            return function and self._clock.timed("update", function)

        return tuple(
            dataclasses.replace(exchange, work=timed(exchange.work), then=timed(exchange.then))
            for exchange in self._real.exchanges()
        )


def contestants(name, rounds):
    """A round and its floor, as rivals."""
    return [Contestant(f"{name} round", rounds.run), Contestant(f"{name} floor", rounds.floor)]


def facts(name, rounds, times, split_seconds):
    """One row of the table: a dict of numbers and texts. Collective."""
    round_times = times[f"{name} round"]
    floor = times[f"{name} floor"]
    split = rounds.split(split_seconds)
    mean_split = rounds.link.allgather(list(split.values())).mean(0)
    return {
        "algorithm": name,
        "seconds": round_times,
        "floor": floor,
        "ratio": round_times / floor,
        "split": dict(zip(split, mean_split.tolist())),
        "gradients per step": rounds.gradients_per_step,
        "client steps per second": rounds.num_clients * rounds.local_steps / round_times.median,
        "bytes": rounds.nbytes,
        "transport": rounds.link.used,
        "memory": rounds.memory,
    }
