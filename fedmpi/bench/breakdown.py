"""Where the time of a round goes.

The parts are timed from outside: wrappers around the algorithm, the link and the oracles take the
time of their methods. A GPU is waited for between the parts, so that there they do not overlap.
"""

import contextlib
import dataclasses
import time

import numpy as np

from fedmpi.bench.timing import wait_for_gpu

ALGORITHM_METHODS = ("start", "server_start", "client_start", "download", "local_step", "upload")
ORACLE_PARTS = {
    "draw": "data", "draw_first": "data", "whole": "data", "gradient": "gradient", "gradient_pair": "gradient",
}  # fmt: skip
LINK_PARTS, STORE_PARTS = {"allgather": "waiting"}, {"average": "communication"}


def break_down(rounds, seconds):
    """Seconds of the parts of a round, from as many rounds as `seconds` allow. Collective.

    Args:
        rounds: a `Rounds`.

    Returns:
        dict: "gradient", "update" (of rows, by the algorithm), "data" (making minibatches),
        "communication" (sums over the rank's clients and over the ranks), "waiting" (for the slowest
        rank, when the ranks exchange their losses), "overhead" (the rest); means over the ranks.
    """
    clock = _Clock()
    federation = rounds.federation
    algorithm, link, store = federation.algorithm, federation.link, federation.store
    oracles = [client.oracle for client in federation.clients]
    federation.algorithm, federation.link = _TimedAlgorithm(algorithm, clock), _Timed(link, clock, LINK_PARTS)
    federation.store = _Timed(store, clock, STORE_PARTS)
    for client, oracle in zip(federation.clients, oracles):
        client.oracle = _Timed(oracle, clock, ORACLE_PARTS)
    try:
        begin = time.perf_counter()
        rounds.run()
        once = link.allgather([time.perf_counter() - begin]).max()
        number = int(np.clip(seconds / once, 3, 200))
        for _ in range(number - 1):
            rounds.run()
        total = time.perf_counter() - begin
    finally:
        federation.algorithm, federation.link, federation.store = algorithm, link, store
        for client, oracle in zip(federation.clients, oracles):
            client.oracle = oracle
    parts = {part: spent / number for part, spent in clock.seconds.items()}
    parts["overhead"] = total / number - sum(parts.values())
    return dict(zip(parts, link.allgather(list(parts.values())).mean(0).tolist()))


class _Clock:
    """Adds up seconds per part; a part that runs inside another is not counted in the other."""

    def __init__(self):
        self.seconds = dict.fromkeys(("gradient", "update", "data", "communication", "waiting"), 0.0)
        self._inner = [0.0]  # seconds of the parts inside each open part, outermost first

    @contextlib.contextmanager
    def part(self, name):
        self._inner.append(0.0)
        wait_for_gpu()
        begin = time.perf_counter()
        yield
        wait_for_gpu()
        spent = time.perf_counter() - begin
        self.seconds[name] += spent - self._inner.pop()
        self._inner[-1] += spent

    def timed(self, name, function):
        def call(*args, **options):
            with self.part(name):
                return function(*args, **options)

        return call


class _Timed:
    """Wraps an object and times some of its methods; `parts`: name of the method -> part."""

    def __init__(self, wrapped, clock, parts):
        self._wrapped = wrapped
        for method, part in parts.items():
            setattr(self, method, clock.timed(part, getattr(wrapped, method)))

    def __getattr__(self, name):
        return getattr(self._wrapped, name)


class _TimedAlgorithm(_Timed):
    """Wraps an algorithm: its methods, without the oracle calls inside them, are the update."""

    def __init__(self, wrapped, clock):
        super().__init__(wrapped, clock, dict.fromkeys(ALGORITHM_METHODS, "update"))
        self._clock = clock

    def exchanges(self):
        def timed(function):
            return function and self._clock.timed("update", function)

        return tuple(
            dataclasses.replace(exchange, work=timed(exchange.work), then=timed(exchange.then))
            for exchange in self._wrapped.exchanges()
        )
